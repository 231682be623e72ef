"""ampcheck."""
