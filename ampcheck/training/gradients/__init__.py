"""The gradients of a step beside float64, and beside other loss scales."""
