"""Exact and sampled tests of laws, and intervals. Knows nothing of models: arrays of numbers in, results out."""
