"""Which stage, which op, which modules a failure goes back to, and with which change it is gone; see `blame`."""
