import torch
from torch_geometric.nn import InstanceNorm, LayerNorm

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torch_geometric", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    return (3 + 2 * torch.randn(70000, 2)).to(DTYPE), torch.zeros(
        70000, dtype=torch.long
    )  # one graph; features from a Linear


def f(x, batch):
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.stack([LayerNorm(2).to(wide)(x, batch), InstanceNorm(2)(x, batch).to(wide)])


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
