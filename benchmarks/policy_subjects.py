"""Models of ops whose autocast policy a release of PyTorch changed; `dtypes` declares what the op gave before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ampcheck import Subject


class Changed(nn.Module):
    """The op as a module, so that its dtype can be declared."""

    def __init__(self, op: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.op = op
        self.weight = nn.Parameter(torch.randn(shape)) if shape else None

    def forward(self, x: Any) -> Any:
        return self.op(x) if self.weight is None else self.op(x, self.weight)


class Model(nn.Module):
    """A layer that autocast runs in 16 bits, then the op."""

    def __init__(self, changed: Changed, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.before, self.changed, self.shape = nn.Linear(8, 8), changed, shape

    def forward(self, x: Any) -> Any:
        return self.changed(self.before(x).reshape(self.shape))


def of(changed: Changed, before: torch.dtype, shape: tuple[int, ...]) -> Subject:
    torch.manual_seed(0)
    return Subject((Model(changed, shape), (torch.randn(4, 8),)), dtypes={"changed": before})


def rms_norm() -> Subject:
    return of(Changed(lambda x: F.rms_norm(x, (8,))), torch.float16, (4, 8))


def conv3d() -> Subject:
    def op(x: Any, weight: Any) -> Any:
        return F.conv3d(x.float(), weight)

    return of(Changed(op, 2, 1, 1, 1, 1), torch.float32, (1, 1, 2, 4, 4))


def conv_transpose3d() -> Subject:
    def op(x: Any, weight: Any) -> Any:
        return F.conv_transpose3d(x, weight.to(x.dtype))

    return of(Changed(op, 1, 2, 1, 1, 1), torch.float16, (1, 1, 2, 4, 4))


def linalg_matrix_sqrth() -> Subject:
    """The new op where there is one, as a repository that supports older releases writes it."""

    def op(x: Any) -> Any:
        symmetric = x.t() @ x
        if hasattr(torch.linalg, "matrix_sqrth"):
            return torch.linalg.matrix_sqrth(symmetric)
        values, vectors = torch.linalg.eigh(symmetric.float())
        return (vectors * values.clamp_min(0).sqrt()) @ vectors.t()

    return of(Changed(op), torch.float16, (4, 8))
