"""Diffusion timesteps are cast to the model's bfloat16 before their sinusoidal embedding.

Mechanism: the spacing of bfloat16 between 512 and 1024 is 4 and the fastest frequency is 1 rad per step, so 998.4
becomes 1000 and its sine another number.
Source: https://github.com/modelscope/DiffSynth-Studio/pull/1025
Expected: precision-loss at `time`.
"""

import torch
from torch import nn

ID = "timestep_cast_before_sine"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "time"}


class TimeEmbedding(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.dim, self.wide = dim, wide

    def forward(self, timestep, dtype):
        t = timestep if self.wide else timestep.to(dtype)
        frequency = torch.exp(-9.21 * torch.arange(self.dim // 2, dtype=torch.float32) / (self.dim // 2))
        phase = t[:, None].float() * frequency
        return torch.cat((phase.cos(), phase.sin()), -1).to(dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.time, self.net = TimeEmbedding(16, wide), nn.Linear(16, 16)

    def forward(self, latent, timestep):
        return self.net(latent + self.time(timestep, latent.dtype))


def inputs():
    torch.manual_seed(1)
    timestep = torch.tensor([998.39, 901.3, 805.7, 610.2, 513.9, 333.3])
    return torch.randn(6, 16).bfloat16(), timestep


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    _, timestep = inputs()
    exact = TimeEmbedding(16, True)(timestep, torch.float32)
    assert (buggy()[0].time(timestep, torch.float32) - exact).abs().max() < 1e-3
    assert (buggy()[0].time(timestep, torch.bfloat16) - exact).abs().max() > 0.5
    assert (fixed()[0].time(timestep, torch.bfloat16) - exact).abs().max() < 0.01
