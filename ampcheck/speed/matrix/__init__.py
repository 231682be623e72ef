"""A model in every mode and precision: speed, memory, compilation and accuracy of each."""
