"""A time stamp in seconds is cast to the model's float16.

Mechanism: 1.7e9 is infinite in float16 before the encoding subtracts its origin.
Source: no single report; written from the mechanism.
Expected: overflow at `time`, in the cast.
"""

import torch
from torch import nn

ID = "seconds_since_1970"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "time", "op": "aten::_to_copy"}


class Time(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.project = wide, nn.Linear(1, 4)

    def forward(self, stamp):
        dtype = self.project.weight.dtype
        stamp = stamp if self.wide else stamp.to(dtype)
        return self.project(((stamp - stamp[:1]) / 86400).to(dtype))


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.time, self.out = Time(wide), nn.Linear(4, 2)

    def forward(self, stamp):
        return self.out(self.time(stamp))


def inputs():
    return (1_700_000_000 + 3600 * torch.arange(5, dtype=torch.float64)[:, None],)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
