import torch
from focal_loss.focal_loss import FocalLoss

PACKAGE, DTYPE, AUTOCAST, LIMIT = "focal-loss-torch", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    logits = 3 * torch.randn(512, 1000)
    logits[:, 0] += 20  # a confident model, which one sample in ten surprises
    target = torch.randint(0, 1000, (512,)) * (torch.rand(512) < 0.1)
    return logits.softmax(-1).to(DTYPE), target  # probabilities in 16 bits, as the CPU's softmax gives them


def f(probabilities, target):
    return FocalLoss(gamma=2)(probabilities, target)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
