import ot
import torch

PACKAGE, DTYPE, AUTOCAST, LIMIT = "POT", torch.bfloat16, True, 0.2


def inputs(seed):
    torch.manual_seed(seed)
    x = 4 + 0.2 * torch.randn(64, 128)  # features of a batch, float32: like those of a ReLU they share a direction
    return x, x + 0.1 * torch.randn(64, 128)  # and of the batch in another domain


def f(x, y):
    return ot.dist(x, y)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
