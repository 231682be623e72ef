import torch
from torch_geometric.nn import TemporalEncoding

PACKAGE, DTYPE, AUTOCAST, LIMIT = "torch_geometric", torch.bfloat16, True, 0.2


def inputs(seed):
    torch.manual_seed(seed)
    return (16 * torch.randint(0, 256, (200,)).float(),)  # times that bfloat16 holds exactly


def f(t):
    return TemporalEncoding(32).to(t.dtype)(t)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
