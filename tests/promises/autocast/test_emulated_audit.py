"""A machine without CUDA finds what float16 does on CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcheck import Finding, Subject, Verdict, audit, demo

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, which is used then")


class GatedFeedForward(nn.Module):
    """As in T5: the product grows with the square of the input and the output projection sums it."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(32, 256), nn.Linear(32, 256), nn.Linear(256, 32)
        self.norm = nn.LayerNorm(32)
        with torch.no_grad():
            for layer in (self.gate, self.up):
                layer.weight.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.gate(x)) * self.up(x)))


def overflows(subject: object) -> list[Finding]:
    run = audit(subject, device="cuda", dtype="float16", compile=False)
    return [finding for finding in run.of(Verdict.FAIL) if finding.check == "overflow"]


def test_a_feed_forward_network_that_overflows_on_cuda_is_found_where_it_overflows() -> None:
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    (found,) = overflows((GatedFeedForward(400.0), (x,)))
    assert found.subject == "subject [float16, eager, cuda emulated]"
    assert (found.where.module, found.where.phase) == ("", "forward")
    assert found.where.op == "aten::mul.Tensor"
    assert overflows((GatedFeedForward(1.0), (x,))) == []


def test_the_demo_with_hot_weights_overflows_at_the_layer_that_is_hot() -> None:
    made = demo.subject()
    with torch.no_grad():
        made.model.blocks[1].up.weight.mul_(400.0)
        made.model.blocks[1].down.weight.mul_(400.0)
    (found, *_) = overflows(Subject((made.model, *made.shape[1:]), name="hot demo", loss=made.loss))
    assert found.where.module == "blocks.1.down"
    assert "cuda emulated" in found.subject
    assert overflows(demo.subject()) == []


def test_what_the_device_keeps_in_float32_is_no_overflow() -> None:
    """The CPU's autocast leaves exp in float16, where 12 is too much; CUDA's runs it in float32."""

    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)
            nn.init.constant_(self.linear.weight, 3.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).exp().log()

    subject = (Exponential(), (torch.ones(2, 4),))
    assert overflows(subject) == []
    on_cpu = audit(subject, device="cpu", dtype="float16", compile=False)
    assert "overflow" in {finding.check for finding in on_cpu.of(Verdict.FAIL)}
