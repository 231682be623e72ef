import torch
from speechbrain.nnet.losses import mse_loss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "speechbrain", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    target = torch.randn(4, 400, 80)
    return (target + 0.3 * torch.randn(4, 400, 80)).to(DTYPE), target.to(DTYPE), torch.tensor([1.0, 0.9, 0.7, 0.5])


def f(a, b, lengths):
    return mse_loss(a, b, lengths)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
