import torch
from torchcrf import CRF

PACKAGE, DTYPE, AUTOCAST, LIMIT = "pytorch-crf", torch.bfloat16, False, 0.2


def inputs(seed):
    torch.manual_seed(seed)
    tags = torch.randint(0, 9, (512, 4))
    emissions = torch.randn(512, 4, 9) + 6 * torch.nn.functional.one_hot(tags, 9)  # of a trained tagger
    return emissions.to(DTYPE), tags


def f(emissions, tags):
    torch.manual_seed(0)
    return -CRF(9).to(emissions.dtype)(emissions, tags, reduction="token_mean")


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
