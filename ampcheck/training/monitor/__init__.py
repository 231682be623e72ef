"""The eyes of `ampcheck.watch` on a user's own loop."""
