"""A leaky integrator in bfloat16 never decays.

Mechanism: h * 0.998 lies less than half a spacing below h and rounds back to it; after 300 steps the state is where it
was.
Source: no single report; written from the mechanism.
Expected: precision-loss at `memory`.
"""

import torch
from torch import nn

ID = "leaky_state_never_decays"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "memory"}


class Memory(nn.Module):
    def __init__(self, steps, wide):
        super().__init__()
        self.steps, self.wide = steps, wide

    def forward(self, state, x):
        held = state.float() if self.wide else state
        for _ in range(self.steps):
            held = held * 0.9985
        return held.to(state.dtype) + x


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.memory = nn.Linear(8, 8), Memory(500, wide)

    def forward(self, state, x):
        return self.memory(state, self.encode(x))


def inputs():
    torch.manual_seed(1)
    return 4 + torch.rand(2, 8).bfloat16(), torch.randn(2, 8).bfloat16()


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.2 * wanted.norm()
