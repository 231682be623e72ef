import torch
from allrank.models.losses import listMLE

PACKAGE, DTYPE, AUTOCAST, LIMIT = "allRank", torch.float16, True, 0.1


def inputs(seed):
    torch.manual_seed(seed)
    relevance = torch.randint(0, 5, (4, 30)).float()
    return (8 * relevance + torch.randn(4, 30)).to(DTYPE), relevance  # scores of a ranker that is sure of its order


def f(scores, relevance):
    torch.manual_seed(0)  # listMLE shuffles ties
    return listMLE(scores, relevance)


if __name__ == "__main__":
    with torch.autocast("cpu", dtype=DTYPE):
        args = inputs(0)
        got = f(*args)
    exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    error = ((got.double() - exact).norm() / exact.norm()).item()
    print(f"{DTYPE}: {got.flatten()[:3].tolist()}; float64: {exact.flatten()[:3].tolist()}; error {error:.2g}")
    raise SystemExit(not error < LIMIT)
