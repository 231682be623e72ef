"""The seconds that a search may take, and what compiled code is charged with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ampcheck import assert_property
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.parity.example import Example
from ampcheck.records.property import ACCURACY, NONFINITE, Look, Problem
from ampcheck.search import SearchOptions
from ampcheck.search.ascent import climb
from ampcheck.search.compiling import Compiled
from ampcheck.search.evaluate import Evaluator
from ampcheck.search.loop import Search
from ampcheck.search.runner import Runner
from ampcheck.strategies import tensors


class Clock:
    """Time that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_no_step_of_gradient_ascent_begins_when_the_time_is_over() -> None:
    runner = Runner(Subject((torch.square, (torch.ones(1),))), torch.float16)
    example = Example((torch.ones(1),))
    (path,) = example.floats()
    asked: list[int] = []

    def spent() -> bool:
        asked.append(1)
        return len(asked) > 5

    assert len(list(climb(runner, example, {path: (-10.0, 10.0)}, spent))) == 1
    assert len(asked) == 6


def test_the_search_and_making_small_take_the_seconds_and_half_of_them_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampcheck.search import loop

    clock = Clock()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=clock))
    looks: list[float] = []

    def look(self: Evaluator, example: Example) -> Look:
        """A second problem is come upon while the first is made small, and would have its own half."""
        looks.append(clock.now)
        kind = ACCURACY if clock.now > 55 else NONFINITE
        return Look([Problem(kind)] if clock.now > 35 else [], elements=1)

    monkeypatch.setattr(Evaluator, "look", look)
    runner = Runner(Subject((torch.relu, (torch.ones(1),))), torch.float16)
    inputs = tensors("float16", shape=4, max_value=100)
    search = Search(Evaluator(runner))
    search.run(inputs, SearchOptions(examples=200, seconds=40))
    assert set(search.smallest) == {ACCURACY, NONFINITE}
    # The first look, which fills caches, is free, and a look that began in time may end later.
    assert 40 < max(looks) <= looks[0] + 2 + 1.5 * 40


def test_a_module_without_a_length_is_compiled_as_any_other() -> None:
    model = torch.nn.Linear(8, 4)
    runner = Runner(Subject((model, (torch.ones(2, 8),))), torch.bfloat16)

    class Lengthy(torch.nn.Module):
        """As `torch.compile` wraps a module: it has `__len__`, which the module inside lacks."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return runner.plain(x)  # type: ignore[no-any-return]

        def __len__(self) -> int:
            raise TypeError("Linear does not support len()")

    compiled = Compiled(runner)
    compiled._function = Lengthy()
    assert Evaluator(runner, (), compiled).look(Example((torch.ones(2, 8),))).problems == []
    assert compiled.examples == 1


def test_why_a_model_that_draws_is_not_compiled_is_told() -> None:
    run = assert_property(
        torch.nn.Dropout(0.5),
        inputs=tensors("float32", shape=3, min_value=-4, max_value=4),
        dtype="bfloat16",
        compile=True,
        options=SearchOptions(examples=3),
    )
    found: Finding
    (found,) = (f for f in run.findings if f.check == "property-compiled")
    assert found.verdict is Verdict.SKIP
    assert "draws random numbers" in found.message or "nothing can be compiled here" in found.message


@pytest.mark.parametrize("message", ["", "\n", "mat1 and mat2 shapes cannot be multiplied"])
def test_what_compiled_code_raises_is_the_models_whatever_its_message(message: str) -> None:
    compiled = Compiled(Runner(Subject((torch.square, (torch.ones(1),))), torch.float16))
    assert not compiled.cannot_run(RuntimeError(message))
    assert compiled.cannot_run(RuntimeError("\"erfinv_cpu\" not implemented for 'Half'"))
    assert "erfinv_cpu" in compiled.missing
