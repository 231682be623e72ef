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
from ampcheck.core.run import Verdict
from ampcheck.core.subject import as_subject
from ampcheck.training.loop import STEPS, TrainingLoop, quiet

assert all((healthy_optimizers, healthy_protocols, healthy_variants))

SLOW = {
    "bert_bfloat16",
    "diffusion_with_average_float16",
    "gan_in_alternate_steps",
    "gan_one_scaler",
    "gan_regularised_lazily",
    "gan_two_scalers_interleaved",
    "gpt2_float16",
    "gru_float16",
    "large_vocabulary_float16",
    "llama_pure_bfloat16_with_masters",
    "mixture_of_experts_float16",
    "momentum_teacher_float32",
    "resnet_float16_one_cycle",
    "t5_float16",
    "vae_float16",
    "vit_float16",
    "wgan_gradient_penalty",
}


names = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LOOPS])


@pytest.mark.every(16)
@names
def test_a_healthy_loop_has_no_failure(name):
    torch.manual_seed(0)
    run = audit(LOOPS[name]())
    assert [(finding.check, finding.message) for finding in run.of(Verdict.FAIL)] == []


@pytest.mark.every(12)
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
