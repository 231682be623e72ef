"""The calls of a loop to its scaler, optimizers and schedulers: recorded, then judged."""
