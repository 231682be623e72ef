import torch
from segmentation_models_pytorch.losses import MCCLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "segmentation_models_pytorch", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    target = (torch.rand(1, 1, 128, 128) < 0.3).long()
    return torch.sigmoid(6 * (target - 0.5) + torch.randn(1, 1, 128, 128)).to(DTYPE), target


def f(a, b):
    return MCCLoss()(a, b)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
