import torch
from auraloss.time import SISDRLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "auraloss", torch.float16, False, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    silence = torch.zeros(1, 1, 16000)
    return (silence + 1e-3 * torch.randn(1, 1, 16000)).to(DTYPE), silence.to(DTYPE)  # network and data in half


def f(a, b):
    return SISDRLoss()(a, b)


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
