"""PyTorch's recipe on automatic mixed precision, in the copy of PyTorch-China/tutorials."""

from _driving import run_with_constants


def main():
    run_with_constants(
        "amp_recipe.py",
        {"batch_size": 16, "in_size": 64, "out_size": 64, "num_batches": 4, "epochs": 1},
    )
