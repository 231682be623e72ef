import torch
from torch_geometric.nn.aggr import StdAggregation, VarAggregation

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torch_geometric", torch.bfloat16, True, 0.3


def inputs(seed):
    torch.manual_seed(seed)
    return (5 + 0.3 * torch.randn(500, 8)).to(DTYPE), torch.zeros(
        500, dtype=torch.long
    )  # one graph; features from a Linear


def f(x, batch):
    return VarAggregation()(x, batch)


FORMS = {"torch_geometric.nn.aggr.StdAggregation": lambda *args: StdAggregation()(*args)}


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
