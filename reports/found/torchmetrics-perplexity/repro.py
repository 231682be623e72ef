import torch
from torchmetrics.functional.text import perplexity
from torchmetrics.text import Perplexity

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchmetrics", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    logits = 3 * torch.randn(1, 512, 1000)
    logits[..., 0] += 20  # a confident language model
    return logits.to(DTYPE), torch.randint(0, 1000, (1, 512)) * (torch.rand(1, 512) < 0.1)


def f(a, b):
    return perplexity(a, b)


FORMS = {"torchmetrics.text.Perplexity": lambda a, b: Perplexity()(a, b)}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
