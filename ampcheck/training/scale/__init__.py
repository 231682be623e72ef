"""Which loss scales serve, and where the scaler is."""
