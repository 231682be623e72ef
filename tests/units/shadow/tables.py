"""What looks `torch.tensor` up in tables: inside of a shadow, where the tables may be made, and after it."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ampcheck.shadow import Shadow


def scaled(x: Tensor) -> Tensor:
    return x * torch.tensor(0.1, dtype=torch.float16)


class Scaled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x) + x.new_tensor(0.1)


def make_tensors() -> None:
    with torch.device("meta"):
        assert torch.tensor(0.1, dtype=torch.float16).device.type == "meta"
    with FakeTensorMode():
        assert scaled(torch.ones(2)).shape == (2,)
    assert {torch.tensor, torch.Tensor.new_tensor} <= torch.overrides.get_ignored_functions()


def compile_functions(*, fullgraph: bool = True) -> None:
    inputs = (torch.ones(2),)
    scripted: Tensor = torch.jit.script(scaled)(*inputs)
    compiled: Tensor = torch.compile(Scaled(), backend="eager", fullgraph=fullgraph)(*inputs)
    exported: Tensor = torch.export.export(Scaled(), inputs).module()(*inputs)
    assert scripted.shape == compiled.shape == exported.shape == (2,)


if "warm" in sys.argv:
    make_tensors()
    compile_functions()
with Shadow():
    make_tensors()
    compile_functions(fullgraph=False)
make_tensors()
compile_functions()
