import torch
from schedulefree import AdamWScheduleFree

PACKAGE, DTYPE, AUTOCAST, LIMIT = "schedulefree", torch.bfloat16, False, 0.1


def inputs(seed):
    torch.manual_seed(seed)
    return torch.ones(4, 4).to(DTYPE), torch.randn(500, 4, 4).to(DTYPE)


def f(start, noise):
    weight = torch.nn.Parameter(start.clone())
    optimizer = AdamWScheduleFree([weight], lr=0.02, foreach=False)
    optimizer.train()
    for part in noise:
        weight.grad = weight.detach() - 3 + part  # the minimum is at 3
        optimizer.step()
    optimizer.eval()
    return weight.detach()


if __name__ == "__main__":
    args = inputs(0)
    got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
