import torch
from torchmetrics.classification import BinaryAUROC
from torchmetrics.functional.classification import binary_auroc

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torchmetrics", torch.bfloat16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    target = torch.arange(20000) % 2
    return (6.5 + torch.randn(20000) + target).to(DTYPE), target  # confident logits, as a Linear gives them


def f(logits, target):
    return binary_auroc(logits, target)


FORMS = {"torchmetrics.classification.BinaryAUROC": lambda logits, target: BinaryAUROC()(logits, target)}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
