import torch
from torchmetrics.functional.regression import kl_divergence
from torchmetrics.regression import KLDivergence

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchmetrics", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    return tuple((1.7 * torch.randn(2, 2000, 1000)).softmax(-1).to(DTYPE))  # of two models, 2,000 samples


def f(a, b):
    return kl_divergence(a, b)


FORMS = {"torchmetrics.regression.KLDivergence": lambda a, b: KLDivergence()(a, b)}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
