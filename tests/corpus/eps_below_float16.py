"""The guard eps=1e-8 is zero in float16, and a min-max normalisation divides 0 by 0.

Mechanism: 1e-8 lies below half of the smallest subnormal (6e-8), so `0 + eps` stays 0; every candidate of a query with
equal scores becomes NaN.
Source: https://github.com/lightonai/pylate/issues/239
Expected: silent-zero at `rescale`, in the addition of eps.
"""

import torch
from torch import nn

ID = "eps_below_float16"
RUN = "autocast:float16"
EXPECTED = {"check": "silent-zero", "module": "rescale", "op": "aten::add.Tensor"}


class Rescale(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, scores):
        low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
        return (scores - low) / (high - low + self.eps)


class Reranker(nn.Module):
    def __init__(self, eps=1e-8):
        super().__init__()
        self.encoder, self.score, self.rescale = nn.Linear(8, 8), nn.Linear(8, 1), Rescale(eps)

    def forward(self, candidates):
        return self.rescale(self.score(self.encoder(candidates).tanh()).squeeze(-1))


def inputs():
    torch.manual_seed(0)
    candidates = torch.randn(3, 4, 8)
    candidates[1] = candidates[1, :1]  # a query whose candidates are duplicates of one another
    return (candidates,)


def buggy():
    return Reranker(), inputs()


def fixed():
    return Reranker(eps=1e-4), inputs()


def manifests():
    model, args = buggy()
    assert model(*args).isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(*args).isfinite().all()
    with torch.autocast("cpu", torch.float16):
        assert model(*args)[1].isnan().all()
        assert fixed()[0](*args).isfinite().all()
