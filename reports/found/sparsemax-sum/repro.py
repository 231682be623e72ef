import torch
from sparsemax import Sparsemax

PACKAGE, DTYPE, AUTOCAST, LIMIT = "sparsemax", torch.bfloat16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    return ((0.004 * torch.randn(16, 32000)).to(DTYPE),)  # scores of a large memory before training


def f(scores):
    return Sparsemax(dim=-1)(scores).sum(-1)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
