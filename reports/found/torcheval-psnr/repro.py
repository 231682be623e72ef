import torch
import torch.nn.functional as F
from torcheval.metrics import PeakSignalNoiseRatio
from torcheval.metrics.functional import peak_signal_noise_ratio

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torcheval", torch.float16, False, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    image = 255 * F.interpolate(torch.rand(1, 3, 12, 12), size=(96, 96), mode="bicubic").clamp(0, 1)
    return (image + 3 * torch.randn_like(image)).to(DTYPE), image.to(DTYPE)  # as a convolution gives them


def f(a, b):
    return peak_signal_noise_ratio(a, b)


FORMS = {"torcheval.metrics.PeakSignalNoiseRatio": lambda a, b: PeakSignalNoiseRatio().update(a, b).compute()}


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
