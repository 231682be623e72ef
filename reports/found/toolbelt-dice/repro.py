import torch
from pytorch_toolbelt.losses import BinarySoftF1Loss, DiceLoss, JaccardLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "pytorch-toolbelt", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    target = (torch.rand(2, 1, 320, 320) < 0.7).long()  # a mask of most of each picture
    return (2 + torch.randn(2, 1, 320, 320)).to(DTYPE), target  # logits as a convolution gives them


def f(logits, target):
    return DiceLoss("binary")(logits, target)


FORMS = {
    "pytorch_toolbelt.losses.JaccardLoss": lambda logits, target: JaccardLoss("binary")(logits, target),
    "pytorch_toolbelt.losses.BinarySoftF1Loss": lambda logits, target: BinarySoftF1Loss()(logits, target),
}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
