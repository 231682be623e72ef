"""What was probed and emulated without a GPU, on one. Every test here needs a CUDA device."""

from __future__ import annotations

import op_samples
import pytest
import torch
import torch.nn.functional as F
from op_oracle import compare_rule
from torch import Tensor, nn

from ampcheck import Subject, Verdict, assert_policy, audit, demo, emulate
from ampcheck.autocast.probe import measure_policy
from ampcheck.core.run import Run

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
def test_the_probed_policy_is_what_real_cuda_tensors_get(low: torch.dtype) -> None:
    calls = op_samples.harvest(each=1)
    rows = compare_rule(measure_policy("cuda", low), low, calls, lambda tensor: tensor.cuda())
    parted = [f"{row.op} ({row.rule}) given {row.given}: {row.difference}" for row in rows if row.difference]
    assert parted == []
    assert len({row.op for row in rows if row.looked_at}) > 100


def test_the_installed_build_has_the_policy_of_its_release() -> None:
    assert not assert_policy("cuda").failed


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(32, 256), nn.Linear(32, 256), nn.Linear(256, 32)
        with torch.no_grad():
            self.gate.weight.mul_(400)
            self.up.weight.mul_(400)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x)) * self.up(x))


def hot_demo() -> Subject:
    made = demo.subject()
    with torch.no_grad():
        made.model.blocks[1].up.weight.mul_(400.0)
        made.model.blocks[1].down.weight.mul_(400.0)
    return Subject((made.model, *made.shape[1:]), name="hot demo", loss=made.loss)


def producers(run: Run, *checks: str) -> set[tuple[str, str, str]]:
    """Which modules produce what the checks name, and in which phase."""
    found = (finding for finding in run.findings if finding.verdict in (Verdict.FAIL, Verdict.WARN))
    return {(f.check, f.where.phase, f.where.module) for f in found if f.check in checks}


@pytest.mark.parametrize("make", [hot_demo, lambda: Subject((Gated(), torch.randn(2, 5, 32))), demo.subject])
def test_emulation_names_the_producers_that_the_device_has(make: object) -> None:
    real = audit(make(), device="cuda", dtype="float16", compile=False)  # type: ignore[operator]
    with emulate("cuda"):
        emulated = audit(make(), device="cpu", dtype="float16", compile=False)  # type: ignore[operator]
    checks = ("overflow", "flush", "silent-zero", "nonfinite-gradient")
    assert producers(emulated, *checks) == producers(real, *checks)
