"""Sums and norms of gradients in 16 bits."""
