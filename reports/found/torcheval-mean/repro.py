import torch
from torcheval.metrics import Mean
from torcheval.metrics.functional import mean

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torcheval", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    return (torch.rand(200000).to(DTYPE),)  # scores of pixels, as a sigmoid gives them


def f(scores):
    return mean(scores)


FORMS = {"torcheval.metrics.Mean": lambda scores: Mean().update(scores).compute()}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
