"""What a repository and a machine need before the first report: `ampcheck init` and `ampcheck doctor`."""
