"""What PyTorch does while a block runs, for everyone who subscribes to it."""
