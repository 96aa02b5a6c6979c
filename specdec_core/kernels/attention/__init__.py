"""Attention of new nodes over a ragged cache; the torch form is torch's own `scaled_dot_product_attention`."""
