import torch
from torchmetrics.functional.regression import relative_squared_error
from torchmetrics.regression import RelativeSquaredError

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchmetrics", torch.bfloat16, False, 0.1


def inputs(seed):
    torch.manual_seed(seed)
    target = 50 + 2 * torch.randn(3000)
    return (target + 0.5 * torch.randn(3000)).to(DTYPE), target.to(DTYPE)  # as a Linear gives them


def f(a, b):
    return relative_squared_error(a, b)


FORMS = {"torchmetrics.regression.RelativeSquaredError": lambda a, b: RelativeSquaredError()(a, b)}


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
