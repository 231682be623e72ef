"""The initial hidden state of a recurrent layer has the default dtype.

Mechanism: torch.zeros gives float32 beside bfloat16 weights and inputs.
Source: no single report; written from the mechanism.
Expected: low-precision-error at `memory.cell`.
"""

import pytest
import torch
from torch import nn

ID = "hidden_state_default_dtype"
RUN = "native"
EXPECTED = {"check": "low-precision-error", "module": "memory.cell"}


class Memory(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.cell = wide, nn.GRUCell(8, 8)

    def forward(self, x):
        state = torch.zeros(x.shape[0], 8, dtype=x.dtype if self.wide else None)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.memory = nn.Linear(4, 8), Memory(wide)

    def forward(self, x):
        return self.memory(self.embed(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 5, 4).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert whole(*args).isfinite().all()
    with pytest.raises(RuntimeError, match="dtype"):
        broken(*args)
