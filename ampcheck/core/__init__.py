"""Foundations of every package: findings and runs, limits, subjects, formats, errors. Imports no torch at module
level."""
