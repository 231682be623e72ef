"""Does this loop learn, or only run? Gradients, loss scale, protocol, stagnation and residency of a training loop."""
