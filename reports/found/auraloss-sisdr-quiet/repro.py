import torch
from auraloss.time import SISDRLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "auraloss", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    voice = 1e-3 * torch.sin(torch.arange(16000) * 0.17)[None, None]
    return (voice + 3e-5 * torch.randn(1, 1, 16000)).to(DTYPE), voice.to(DTYPE)  # outputs of a decoder


def f(a, b):
    return SISDRLoss()(a, b)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
