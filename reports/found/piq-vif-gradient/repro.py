import torch
import torch.nn.functional as F
from piq import VIFLoss, vif_p

PACKAGE, DTYPE, AUTOCAST, LIMIT = "piq", torch.float16, True, 0.5


def inputs(seed):
    torch.manual_seed(seed)
    image = F.interpolate(torch.rand(1, 3, 12, 12), size=(96, 96), mode="bicubic").clamp(0, 1)
    image, noisy = image * 1, (image + 0.01 * torch.randn_like(image)).clamp(0, 1) * 1
    return image, noisy


def f(a, b, score=vif_p):
    b = b.detach().requires_grad_()
    return torch.autograd.grad(score(b, a), b)[0]


FORMS = {"piq.VIFLoss": lambda a, b: f(a, b, VIFLoss())}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
