"""Helpers that the tests of `ampcheck init` import."""
