"""What lives across steps, in which dtype."""
