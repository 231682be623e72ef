"""Training loops as real projects have them, and as they should be: none of them may fail."""

from __future__ import annotations

import healthy_optimizers
import healthy_protocols
import healthy_variants
import pytest
import torch
from healthy_loops import LOOPS

import ampcheck
from ampcheck.audit import audit
from ampcheck.core.environment import quiet
from ampcheck.core.run import Verdict
from ampcheck.core.subject import as_subject
from ampcheck.training.loop import STEPS, TrainingLoop

assert all((healthy_optimizers, healthy_protocols, healthy_variants))


names = pytest.mark.parametrize("name", LOOPS)


@names
def test_a_healthy_loop_has_no_failure(name):
    torch.manual_seed(0)
    run = audit(LOOPS[name]())
    assert [(finding.check, finding.message) for finding in run.of(Verdict.FAIL)] == []


@names
def test_a_healthy_loop_that_is_watched_with_its_scaler_keeps_the_order_of_calls(name):
    torch.manual_seed(0)
    loop = TrainingLoop(as_subject(LOOPS[name]()))
    model = torch.nn.ModuleList(loop.reached.modules.values())
    scaler = next(iter(loop.reached.scalers.values()), None)
    with ampcheck.watch(model, [*loop.optimizers.values()], scaler, every=10, fail_on="never") as seen, quiet():
        for number in range(STEPS):
            loop.step(number)
    judged = [f for f in seen.run.findings if f.check in ("scaler-protocol", "scheduler-skip")]
    assert not [f.message for f in judged if f.verdict is Verdict.FAIL]
    if scaler is not None and scaler.is_enabled():
        assert [f.check for f in judged][:1] == ["scaler-protocol"]
