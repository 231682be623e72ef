"""The outcome of an audit: whether what a repository accepts is still there."""
