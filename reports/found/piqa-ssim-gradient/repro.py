import torch
from piqa import SSIM

PACKAGE, DTYPE, AUTOCAST, LIMIT = "piqa", torch.bfloat16, True, 0.2


def inputs(seed):
    torch.manual_seed(seed)
    x = torch.nn.functional.avg_pool2d(torch.rand(1, 3, 70, 70), 7, 1)
    return x, (x + 0.01 * torch.randn(1, 3, 64, 64)).clamp(0, 1)


def f(x, y):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(SSIM().to(x.dtype)(x, y), x)[0]


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
