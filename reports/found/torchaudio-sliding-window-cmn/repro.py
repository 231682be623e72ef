import torch
from torchaudio.transforms import SlidingWindowCmn

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchaudio", torch.bfloat16, True, 0.1


def inputs(seed):
    torch.manual_seed(seed)
    return ((2 * torch.randn(1, 200, 20) + 10).to(DTYPE),)  # log-mel features, as a matrix product gives them


def f(a):
    return SlidingWindowCmn(norm_vars=True)(a)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
