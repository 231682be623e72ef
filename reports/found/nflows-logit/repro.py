import torch
from nflows.transforms import Logit

PACKAGE, DTYPE, AUTOCAST, LIMIT = "nflows", torch.bfloat16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    return (torch.sigmoid(4 * torch.randn(1000, 10)).to(DTYPE),)  # of a layer before


def f(x):
    return Logit().to(x.dtype)(x)[0]


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
