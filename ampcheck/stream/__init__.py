"""Events of PyTorch while a block runs, for all subscribers."""
