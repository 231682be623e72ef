import torch
from geomloss import SamplesLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "geomloss", torch.bfloat16, True, 0.3


def inputs(seed):
    torch.manual_seed(seed)
    points = torch.rand(1, 60, 3)
    return points, points + 0.02 * torch.randn(1, 60, 3)


def f(a, b):
    return SamplesLoss("gaussian", p=2, blur=0.05, backend="tensorized")(a, b)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
