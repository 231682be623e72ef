import torch
from auraloss.time import LogCoshLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "auraloss", torch.bfloat16, False, 0.3


def inputs(seed):
    torch.manual_seed(seed)
    voice = 0.5 * torch.sin(torch.arange(16000) * 0.17)[None, None]
    return (voice + 0.03 * torch.randn(1, 1, 16000)).to(DTYPE), voice.to(DTYPE)  # network and data in bfloat16


def f(a, b):
    return LogCoshLoss()(a, b)


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
