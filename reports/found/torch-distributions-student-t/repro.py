import torch
from torch import distributions as D

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torch", torch.bfloat16, True, 0.15


def inputs(seed):
    torch.manual_seed(seed)
    return (2 + 200 * torch.rand(300)).to(DTYPE), torch.randn(300).to(DTYPE)  # as 2 + relu(Linear(x)) gives them


def f(df, x):
    return D.StudentT(df).log_prob(x)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
