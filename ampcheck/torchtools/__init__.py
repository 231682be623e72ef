"""Extensions of PyTorch that several packages need, and the private interfaces of PyTorch that they share."""
