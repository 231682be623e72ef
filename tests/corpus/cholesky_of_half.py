"""A whitening layer factorises a float16 covariance.

Mechanism: the factorisation has no 16-bit kernel.
Source: no single report; written from the mechanism.
Expected: low-precision-error at `whiten`.
"""

import pytest
import torch
from torch import nn

ID = "cholesky_of_half"
RUN = "native"
EXPECTED = {"check": "low-precision-error", "module": "whiten"}


class Whiten(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        y = x.float() if self.wide else x
        y = y - y.mean(0)
        factor = torch.linalg.cholesky(y.T @ y / len(y) + torch.eye(y.shape[1], dtype=y.dtype))
        return torch.linalg.solve_triangular(factor, y.T, upper=False).T.to(x.dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.whiten = nn.Linear(4, 4), Whiten(wide)

    def forward(self, x):
        return self.whiten(self.embed(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(20, 4).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert whole(*args).isfinite().all()
    with pytest.raises(RuntimeError, match=r"not implemented|Half|Low precision"):
        broken(*args)
