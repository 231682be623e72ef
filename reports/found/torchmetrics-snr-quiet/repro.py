import torch
from torchmetrics.audio import SignalNoiseRatio
from torchmetrics.functional.audio import signal_noise_ratio

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchmetrics", torch.bfloat16, True, 0.15


def inputs(seed):
    torch.manual_seed(seed)
    t = torch.arange(16000) / 16000
    voice = 0.01 * torch.sin(6.2832 * 440 * t)
    noisy = voice + 3e-4 * torch.randn(16000)
    return noisy.to(DTYPE), voice  # as a convolution of a decoder gives it, and the float32 recording


def f(a, b):
    return signal_noise_ratio(a, b)


FORMS = {"torchmetrics.audio.SignalNoiseRatio": lambda a, b: SignalNoiseRatio()(a, b)}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
