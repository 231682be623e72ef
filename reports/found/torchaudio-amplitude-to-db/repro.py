import torch
from torchaudio.transforms import AmplitudeToDB

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchaudio", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    power = torch.rand(1, 40, 20) * 1e-6  # a quiet recording
    power[..., :5] = 0  # padded frames
    return (power.to(DTYPE),)


def f(a):
    return AmplitudeToDB()(a)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
