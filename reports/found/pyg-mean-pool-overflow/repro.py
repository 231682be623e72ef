import torch
from torch_geometric.nn import global_mean_pool
from torch_geometric.nn.aggr import MeanAggregation

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torch_geometric", torch.float16, True, 0.05


def inputs(seed):
    torch.manual_seed(seed)
    return (50 + torch.randn(2000, 8)).to(DTYPE), torch.zeros(
        2000, dtype=torch.long
    )  # one graph; features from a Linear


def f(x, batch):
    return global_mean_pool(x, batch)


FORMS = {"torch_geometric.nn.aggr.MeanAggregation": lambda x, batch: MeanAggregation()(x, batch)}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
