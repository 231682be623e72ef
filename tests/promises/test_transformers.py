"""Real architectures of the ecosystem: healthy ones pass, a planted overflow is found where transformers has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers_models as models

from ampcheck import Subject, Verdict, audit

pytest.importorskip("transformers")


@pytest.mark.parametrize("factory", [models.gpt2, models.t5, models.vit])
def test_a_healthy_architecture_passes_in_both_formats(factory: Callable[[], Any]) -> None:
    run = audit(Subject(factory(), name=factory.__name__), compile=False)
    assert not run.failed, [f.message for f in run.of(Verdict.FAIL)]
    assert run.coverage.seen["modules"] > 20
    assert run.coverage.seen["gradients"] > 20


def test_a_compiled_architecture_passes_too() -> None:
    run = audit(Subject(models.gpt2(), name="gpt2"), dtype="bfloat16")
    assert not run.failed, [f.message for f in run.of(Verdict.FAIL)]
    assert run.coverage.seen["graphs"] >= 1


def test_the_overflow_of_a_gated_feed_forward_network_is_named_at_its_output_projection() -> None:
    run = audit(Subject(models.t5_hot(), name="t5"), dtype="float16", compile=False)
    first = next(f for f in run.of(Verdict.FAIL) if f.check == "overflow")
    assert "DenseReluDense" in first.where.module
    assert first.where.file.startswith("transformers/")
    assert not [
        f
        for f in audit(models.t5_hot(), dtype="bfloat16", compile=False).findings
        if f.check == "overflow" and f.verdict is Verdict.FAIL
    ]
