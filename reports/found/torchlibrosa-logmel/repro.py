import torch
from torchlibrosa.stft import LogmelFilterBank

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchlibrosa", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    t = torch.arange(48000) / 48000
    audio = 0.8 * torch.sin(6.2832 * 440 * t) + 0.01 * torch.randn(48000)  # a loud tone
    window = torch.hann_window(2048)
    return (torch.stft(audio, 2048, 480, window=window, return_complex=True).abs().square().T[None, None],)  # float32


def f(power):
    return LogmelFilterBank(sr=48000, n_fft=2048, n_mels=64).to(power.dtype)(power)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
