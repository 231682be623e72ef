import torch
from pytorch_toolbelt.losses import LogCoshLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "pytorch-toolbelt", torch.bfloat16, False, 0.5


def inputs(seed):
    torch.manual_seed(seed)
    target = torch.randn(1000)
    return (target + 0.03 * torch.randn(1000)).to(DTYPE), target.to(DTYPE)  # a good estimate, as a Linear gives it


def f(estimate, target):
    return LogCoshLoss()(estimate, target)


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
