"""The published ways of batched speculative decoding, from their descriptions (notes: ragged.md), for comparison."""
