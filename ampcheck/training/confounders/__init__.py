"""What makes float32 something else."""
