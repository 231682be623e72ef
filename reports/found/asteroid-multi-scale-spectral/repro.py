import torch
from asteroid.losses import SingleSrcMultiScaleSpectral

PACKAGE, DTYPE, AUTOCAST, LIMIT = "asteroid", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    t = torch.arange(16000) / 16000
    voice = 0.8 * torch.sin(6.2832 * 440 * t) + 0.05 * torch.randn(16000)
    return (voice[None] + 0.03 * torch.randn(1, 16000)).to(DTYPE), voice[None]  # a 16-bit output and a float32 target


def f(a, b):
    return SingleSrcMultiScaleSpectral().to(a.dtype if a.dtype == torch.double else torch.float)(a, b)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
