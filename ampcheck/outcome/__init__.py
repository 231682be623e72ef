"""From a run to its outcome: what the repository accepts of it, and which verdicts fail."""
