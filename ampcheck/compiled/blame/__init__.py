"""Which stage, which op, which modules: what a failure goes back to, and what mends it; see `blame`."""
