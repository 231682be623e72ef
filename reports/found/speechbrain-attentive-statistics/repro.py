import torch
from speechbrain.lobes.models.ECAPA_TDNN import AttentiveStatisticsPooling

PACKAGE, DTYPE, AUTOCAST, LIMIT = "speechbrain", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    features = torch.randn(4, 64, 100).relu()
    features[:, :4] = 0  # channels that a ReLU has switched off
    return (features.to(DTYPE),)


def f(x):
    torch.manual_seed(0)
    x = x.detach().requires_grad_()
    pool = AttentiveStatisticsPooling(64).to(torch.double if x.dtype == torch.double else torch.float)
    return torch.autograd.grad(pool(x).square().mean(), x)[0]


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
