"""Gradients, loss scale, calls of the scaler, stagnation and state dtypes of a training loop."""
