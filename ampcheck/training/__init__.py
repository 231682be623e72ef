"""Does this loop learn, or only run? Gradients, loss scale, protocol, stagnation and state dtypes of a training loop."""
