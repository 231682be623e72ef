import torch
from whisper.audio import log_mel_spectrogram

PACKAGE, DTYPE, AUTOCAST, LIMIT = "openai-whisper", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    return (1e-5 * torch.randn(16000),)  # the noise of a good microphone: a clip where nobody speaks


def f(audio):
    return log_mel_spectrogram(audio.float()).to(audio.dtype)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
