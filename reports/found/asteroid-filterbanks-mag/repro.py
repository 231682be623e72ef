import torch
from asteroid_filterbanks import STFTFB, Encoder
from asteroid_filterbanks.transforms import mag

PACKAGE, DTYPE, AUTOCAST, LIMIT = "asteroid-filterbanks", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    audio = 0.1 * torch.randn(1, 1, 8000)
    audio[..., 6000:] = 0  # padding of a shorter clip
    return (audio,)


def f(audio):
    audio = audio.detach().requires_grad_()
    encoder = Encoder(STFTFB(n_filters=256, kernel_size=256, stride=128)).to(audio.dtype)
    return torch.autograd.grad(mag(encoder(audio)).mean(), audio)[0]


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
