import torch
from torch import distributions as D

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torch", torch.bfloat16, True, 0.2


def inputs(seed):
    torch.manual_seed(seed)
    p = 1 + 50 * torch.rand(300, 2)
    return (p.to(DTYPE),)  # as 1 + relu(Linear(x)) gives them


def f(p):
    return D.Beta(p[:, 0], p[:, 1]).entropy()


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
