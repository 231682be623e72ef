"""Real defects of training loops and reductions, from the corpus that is shared beside this repository."""

from __future__ import annotations

from typing import Any

import pytest
from test_corpus import SHARED, failures, load

from ampcheck import Verdict, audit

EXPECTED: dict[str, str] = {
    "acm_train_loop_inside_autocast": "autocast-scope",
    "bfs_beta2_no_decay_bf16": "stagnation",
    "bfs_ema_in_bf16": "stagnation",
    "bfs_small_lr_update_lost": "stagnation",
    "bfs_step_counter_buffer_bf16": "stagnation",
    "dst_bf16_gradient_reduce": "reduce-precision",
    "dst_grad_norm_bf16_grouping": "reduce-precision",
    "dst_tf32_conv_default": "tf32",
    "gsc_half_model": "master-weights",
    "gsc_loss_unscaled_with_new_scale": "scale-invariance",
    "gsc_scheduler_steps_on_skip": "scheduler-skip",
    "gsc_state_not_in_checkpoint": "resume",
    "gsc_two_optimizers_update_between": "scaler-protocol",
    "gsc_unscale_update_each_microbatch": "scaler-protocol",
    "gun_fp16_without_scaler": "gradient-underflow",
    "prec_loss_accumulator_bf16": "stagnation",
}
"""The check that the `expected detection:` of each case asks for, in this package's words."""


def subject(name: str, which: str) -> Any:
    """What is judged: a training case returns its loop, of a call case `buggy` itself is the repro."""
    path = SHARED / f"{name}.py"
    if not path.is_file():
        pytest.skip("the shared corpus is not beside this repository")
    made = getattr(load(path), which)
    return made if "\nkind: call\n" in path.read_text(encoding="utf-8") else made()


@pytest.mark.parametrize("name", EXPECTED)
def test_shared_defect_is_found_by_its_check(name):
    run = audit(subject(name, "buggy"))
    assert EXPECTED[name] in {finding.check for finding in run.of(Verdict.FAIL)}, failures(run)


@pytest.mark.parametrize("name", EXPECTED)
def test_shared_mended_defect_passes(name):
    assert failures(audit(subject(name, "fixed"))) == []


def test_every_shared_training_case_is_expected():
    if not SHARED.is_dir():
        pytest.skip("the shared corpus is not beside this repository")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in SHARED.glob("*.py")}
    training = {name for name, text in texts.items() if "\nkind: train\n" in text or name.startswith("dst_")}
    assert training == set(EXPECTED)
