import torch
from torch import distributions as D

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torch", torch.bfloat16, True, 0.15


def inputs(seed):
    torch.manual_seed(seed)
    p, q = 1 + 50 * torch.rand(2, 300, 10)
    return p.to(DTYPE), (q * 0.1 + p * 0.9).to(DTYPE)  # as 1 + relu(Linear(x)) gives them


def f(p, q):
    return D.kl_divergence(D.Dirichlet(p), D.Dirichlet(q))


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
