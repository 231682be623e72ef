"""Training loops as real projects have them, and as they should be: none of them may fail."""

from __future__ import annotations

import healthy_optimizers
import healthy_protocols
import healthy_variants
import pytest
import torch
from healthy_loops import LOOPS

from ampcheck.audit import audit
from ampcheck.core.run import Verdict

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


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LOOPS])
def test_a_healthy_loop_has_no_failure(name):
    torch.manual_seed(0)
    run = audit(LOOPS[name]())
    assert [(finding.check, finding.message) for finding in run.of(Verdict.FAIL)] == []
