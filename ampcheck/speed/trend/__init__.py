"""Change points of a history, with an error rate that was simulated."""
