"""Expert outputs of 16 bits are added into a float32 buffer with index_add_.

Mechanism: the buffer takes the dtype of the input, the experts that of autocast, and index_add_ does not promote.
Source: https://github.com/Tencent/YOLO-Master/pull/124
Expected: low-precision-error at `moe`, in index_add_.
"""

import pytest
import torch
from torch import nn

ID = "index_add_into_float32"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "low-precision-error", "module": "moe", "op": "aten::index_add_"}


class MoE(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        out, route = torch.zeros_like(x), torch.arange(x.shape[0]) % 2
        for number, expert in enumerate(self.experts):
            chosen = (route == number).nonzero().squeeze(-1)
            given = expert(x[chosen])
            out.index_add_(0, chosen, given.to(out.dtype) if self.wide else given)
        return out


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.moe = nn.LayerNorm(8), MoE(wide)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(6, 8),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    broken(*args)
    with torch.autocast("cpu", torch.bfloat16):
        whole(*args)
        with pytest.raises(RuntimeError, match=r"scalar type|dtype"):
            broken(*args)
