import torch
import torch.nn.functional as F
from lightly.loss import SwaVLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "lightly", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    w = F.normalize(torch.randn(100, 64), dim=1)
    z = F.normalize(w[torch.arange(32)] + 0.1 * torch.randn(32, 64), dim=1)
    return (z @ w.T).to(DTYPE), (z @ w.T).to(DTYPE)  # cosines with the prototypes


def f(a, b):
    return SwaVLoss()([a, b], [])


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
