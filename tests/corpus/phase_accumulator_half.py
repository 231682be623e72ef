"""A harmonic source sums its phase in float16 and takes the sine.

Mechanism: after a thousand samples the phase is 300 rad, where the spacing is 0.25; harmonics turn to noise.
Source: https://github.com/hexgrad/kokoro/pull/353
Expected: precision-loss at `source`.
"""

import math

import torch
from torch import nn

ID = "phase_accumulator_half"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "source"}


class Source(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, pitch):
        pitch = pitch.float() if self.wide else pitch
        phase = (pitch / 16000 * 2 * math.pi).cumsum(-1)
        return (phase[..., None] * torch.arange(1, 5)).sin()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.source, self.mix = Source(wide), nn.Linear(4, 1)

    def forward(self, pitch):
        return self.mix(self.source(pitch).to(pitch.dtype))


def inputs():
    return (torch.linspace(180, 260, 2000)[None].half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.05 * wanted.norm()
