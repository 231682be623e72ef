"""Sampled monitoring of a user's own training loop, for `ampcheck.watch`."""
