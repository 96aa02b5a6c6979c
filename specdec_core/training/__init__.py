"""Training drafters: the target's own text and its features."""
