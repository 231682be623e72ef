"""`ampcheck speed TARGET`: each configuration against the first; what was never compiled is not timed as compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated import SimulatedClock

from ampcheck import Run, Subject, UsageError, Verdict
from ampcheck.numerics.compiled import compilations
from ampcheck.speed import compiling, modes
from ampcheck.speed.modes import compare_modes
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.steps import StepConfig

EAGER, COMPILED, HALF = StepConfig(), StepConfig("default"), StepConfig("default", "bfloat16")
SUBJECT = Subject((torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),)), name="net")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Steps that say how long they take; a compiled one makes a graph unless it is `hollow`."""

    def judge(seconds: dict[StepConfig, float], hollow: tuple[StepConfig, ...] = (), **settings: float) -> Run:
        def step_of(subject: Subject, config: StepConfig, *, device: str) -> Callable[[], float]:
            made = config.mode == "eager" or config in hollow
            function = (lambda x: x) if made else torch.compile(lambda x: x + 1, backend="eager")

            def step() -> float:
                function(torch.ones(2))
                return seconds[config]

            return step

        monkeypatch.setattr(modes, "step_of", step_of)
        monkeypatch.setattr(compiling, "_warm_up_compiler", lambda device: None)
        return compare_modes(SUBJECT, list(seconds), SpeedOptions(clock=SimulatedClock()), **settings)  # type: ignore[arg-type]

    return judge


def test_a_step_that_is_fast_enough_passes(planted: Callable[..., Run]) -> None:
    (finding,) = planted({EAGER: 0.02, COMPILED: 0.01}, at_least=1.5).findings
    assert (finding.check, finding.verdict) == ("speedup", Verdict.PASS)


def test_a_slow_step_fails_where_a_speedup_is_asked_for_and_warns_where_none_is(planted: Callable[..., Run]) -> None:
    (asked,) = planted({EAGER: 0.01, COMPILED: 0.02}, at_least=1.5).findings
    (told,) = planted({EAGER: 0.01, COMPILED: 0.02}).findings
    assert (asked.verdict, told.verdict) == (Verdict.FAIL, Verdict.WARN)


@pytest.mark.parametrize(("at_least", "verdict"), [(1.1, Verdict.FAIL), (None, Verdict.WARN)])
def test_what_ran_eager_is_not_timed_as_compiled(
    planted: Callable[..., Run], at_least: float | None, verdict: Verdict
) -> None:
    run = planted({EAGER: 0.02, COMPILED: 0.01, HALF: 0.01}, hollow=(HALF,), at_least=at_least)
    assert {(finding.check, finding.verdict) for finding in run.findings} == {
        ("eager-fallback", verdict),
        ("speedup", Verdict.PASS),
    }
    assert [row[0] for row in run.tables[0].rows] == [str(EAGER), "A/A twin", str(COMPILED)]


def test_more_steps_than_dynamo_compiles_one_function_by_default_are_all_compiled() -> None:
    """The limit is 8; a ninth copy would run eager without a word."""
    before = compiling.dynamo.setting(compiling.dynamo.recompile_limit())
    model = torch.nn.Linear(2, 2)
    with compiling.many_compilations():
        for number in range(12):
            told = compilations()
            copy = torch.nn.Linear(2, 2)
            copy.load_state_dict(model.state_dict())
            torch.compile(copy, backend=lambda graph, _, number=number: graph)(torch.ones(1, 2))
            assert told().count == 1, number
    assert compiling.dynamo.setting(compiling.dynamo.recompile_limit()) == before


@pytest.mark.parametrize(
    ("several", "settings", "found"),
    [
        ([EAGER], {}, "two configurations are required, found eager, float32 alone"),
        ([], {}, "found none"),
        ([EAGER, StepConfig(precision="bfloat16")], {"at_least": 2.0}, "2 times as fast is required of compiled steps"),
        ([EAGER, COMPILED], {"device": "xpu:7"}, "'xpu:7' is not there"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(
    several: list[StepConfig], settings: dict[str, object], found: str
) -> None:
    with pytest.raises(UsageError, match=found):
        compare_modes(SUBJECT, several, **settings)  # type: ignore[arg-type]


def test_a_loop_is_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "many_compilations", lambda device: pytest.fail("the compiler was asked"))
    with pytest.raises(UsageError, match="runs by itself, so default, float32 cannot be chosen for it"):
        compare_modes(Subject({"step": lambda i: 0.0}), [EAGER, COMPILED])
