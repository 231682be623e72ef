"""The stages of an audit: eager before compiled, each reported as it ends, and more of them in a full audit."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.audit import judge_subject
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Listener
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.stages import Stage, run_stages
from ampcheck.torchtools.restore import restored
from ampcheck.training.loop import STEPS

AUDIT = sys.modules["ampcheck.audit"]  # ampcheck.audit is the function
X = torch.ones(2, 4)
EAGER = ["float16, eager", "bfloat16, eager", "autocast policy"]
COMPILED = ["float16, compiled", "bfloat16, compiled"]
FULL = [
    f"{dtype}, compiled, {what}" for what in ("dynamic shapes", "max-autotune") for dtype in ("float16", "bfloat16")
]


def stages_of(monkeypatch: pytest.MonkeyPatch, subject: object, **options: Any) -> list[str]:
    """The titles of the stages of an audit, none of which runs."""
    titles: list[str] = []
    run_none = lambda name, stages, listener: titles.extend(stage.title for stage in stages) or []  # noqa: E731
    monkeypatch.setattr(AUDIT, "run_stages", run_none)
    judge_subject(subject, **options)
    return titles


def test_everything_eager_comes_before_anything_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    assert stages_of(monkeypatch, (model, (X,))) == [*EAGER, *COMPILED]
    assert stages_of(monkeypatch, (model, (X,)), compile=False) == EAGER
    calls = stages_of(monkeypatch, (model, [(X,), (X,)]), dtype=["float16", "bfloat16"])
    assert calls == [*EAGER, *COMPILED, "graphs", "compiled against eager"]
    assert stages_of(monkeypatch, (model, [(X,)])) == ["dtypes", "graphs", "compiled against eager"]


def test_a_full_audit_also_compiles_with_dynamic_shapes_and_max_autotune(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    assert stages_of(monkeypatch, (model, (X,)), full=True) == [*EAGER, *COMPILED, *FULL]
    assert stages_of(monkeypatch, (model, (X,)), full=True, checks=["overflow"]) == [*EAGER, *COMPILED]
    assert stages_of(monkeypatch, (model, (X,)), full=True, compile=False) == EAGER
    compiled = torch.compile(model)
    assert stages_of(monkeypatch, (compiled, (X,)), full=True) == [*EAGER, *COMPILED], "it keeps its own options"


@pytest.mark.parametrize(("shape", "steps"), [({}, 4 * STEPS), ({"steps": 6}, 24)])
def test_a_full_audit_observes_four_times_as_many_steps(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], steps: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("ampcheck.unchanged.judge_training", lambda plan, *_: asked.append(plan.steps) or Run())
    loop = {"model": nn.Linear(4, 4), "step": lambda i: 0.0, **shape}
    judge_subject(loop, full=True)
    judge_subject(loop, full=True, steps=3)
    judge_subject(loop)
    assert asked == [steps, 3, None]


def judged(verdict: Verdict) -> Run:
    return Run(findings=(Finding("overflow", verdict, "m", "text"),))


def prevented() -> Run:
    raise UsageError("it raises in float32 too")


def test_a_listener_hears_each_stage_its_findings_and_when_compilation_begins() -> None:
    heard: list[object] = []
    listener = Listener(
        lambda stage, done, total: heard.append((stage, done, total)),
        lambda run: heard.append(run.findings[0].verdict),
        lambda: heard.append("compiling"),
    )
    stages = [
        Stage("eager", lambda: judged(Verdict.PASS)),
        Stage("graphs", lambda: judged(Verdict.WARN), compiles=True),
        Stage("compiled", lambda: judged(Verdict.FAIL), compiles=True),
    ]
    runs = run_stages("m", stages, listener)
    assert heard == [
        ("m: eager", 0, 3), Verdict.PASS, "compiling", ("m: graphs", 1, 3), Verdict.WARN, ("m: compiled", 2, 3),
        Verdict.FAIL, ("m: done", 3, 3),
    ]  # fmt: skip
    assert [run.findings[0].verdict for run in runs] == [Verdict.PASS, Verdict.WARN, Verdict.FAIL]


def test_what_the_model_leaves_behind_in_one_stage_is_gone_in_the_next() -> None:
    seen: list[object] = []

    def leave() -> Run:
        seen.append((torch.get_default_device(), torch.get_default_dtype(), torch.is_grad_enabled()))
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return Run()

    with restored():
        run_stages("m", [Stage("eager", leave), Stage("compiled", leave, compiles=True)], Listener())
        leave()
    assert set(seen) == {(torch.device("cpu"), torch.float32, True)}


def test_numerics_that_cannot_be_judged_are_a_skip_only_beside_a_failure() -> None:
    ran: list[str] = []

    def stages(verdict: Verdict) -> list[Stage]:
        later = Stage("bfloat16", lambda: ran.append("bfloat16") or Run(), optional=True)
        return [
            Stage("float16", prevented, optional=True),
            later,
            Stage("graphs", lambda: judged(verdict), compiles=True),
        ]

    failed, skipped = run_stages("m", stages(Verdict.FAIL), Listener())
    assert (failed.findings[0].verdict, skipped.findings[0].verdict) == (Verdict.FAIL, Verdict.SKIP)
    assert "it raises in float32 too" in skipped.findings[0].message
    assert not ran, "what follows from the same run is left out"
    with pytest.raises(UsageError, match="float32 too"):
        run_stages("m", stages(Verdict.PASS), Listener())
    with pytest.raises(UsageError, match="float32 too"):
        run_stages("m", [Stage("float16", prevented), *stages(Verdict.FAIL)], Listener())
