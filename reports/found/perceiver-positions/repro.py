import torch
from perceiver_pytorch.perceiver_pytorch import fourier_encode

PACKAGE, DTYPE, AUTOCAST, LIMIT = "perceiver-pytorch", torch.bfloat16, False, 0.2


def inputs(seed):
    return (torch.linspace(-1.0, 1.0, 224, dtype=DTYPE),)  # as Perceiver makes them for a picture of this dtype


def f(positions):
    return fourier_encode(positions, max_freq=224, num_bands=64)


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
