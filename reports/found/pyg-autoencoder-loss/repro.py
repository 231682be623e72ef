import torch
from torch_geometric.nn import GAE

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torch_geometric", torch.float16, True, 0.5


def inputs(seed):
    torch.manual_seed(seed)
    return (torch.randn(300, 16) * 1.5).to(DTYPE), torch.randint(0, 300, (2, 200)), torch.randint(0, 300, (2, 200))


def f(z, pos, neg):
    return GAE(torch.nn.Identity()).recon_loss(z, pos, neg)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
