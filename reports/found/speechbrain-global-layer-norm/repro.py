import torch
from speechbrain.lobes.models.dual_path import GlobalLayerNorm

PACKAGE, DTYPE, AUTOCAST, LIMIT = "speechbrain", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    x = torch.randn(2, 64, 100)
    x[0] = 0  # silence
    return (x.to(DTYPE),)


def f(x):
    return GlobalLayerNorm(64, 3).to(torch.double if x.dtype == torch.double else torch.float)(x)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
