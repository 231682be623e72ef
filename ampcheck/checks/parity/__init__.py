"""Two executions that should agree."""
