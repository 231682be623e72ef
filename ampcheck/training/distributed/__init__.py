"""Training in several processes: sums over ranks, and differences between ranks."""
