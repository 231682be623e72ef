"""Extensions of PyTorch that several packages need; the only package that uses private interfaces of PyTorch."""
