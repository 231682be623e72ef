"""The loss-scale window, and the steps of a GradScaler."""
