"""The lock: what a model sends through autocast, kept in a file (`file`) and compared (`checks`) at the next run."""
