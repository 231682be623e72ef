"""What a loop does with its scaler, optimizers and schedulers: heard, then judged."""
