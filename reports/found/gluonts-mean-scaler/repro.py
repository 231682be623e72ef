import torch
from gluonts.torch.scaler import MeanScaler

PACKAGE, DTYPE, AUTOCAST, LIMIT = "gluonts", torch.float16, False, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    series = 100 * torch.rand(8, 3000)
    return series.to(DTYPE), torch.ones(8, 3000).to(DTYPE)


def f(a, b):
    return MeanScaler(dim=-1)(a, b)[0]


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
