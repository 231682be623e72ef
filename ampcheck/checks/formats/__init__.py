"""Checks of the losses in narrow formats."""
