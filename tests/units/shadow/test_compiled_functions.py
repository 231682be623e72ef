"""Promise: compiled functions run in eager mode under a shadow, the report says so, and they are compiled after it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.shadow import Shadow


class Counted:
    """A compiled function of which every compiled call is counted."""

    def __init__(self, **settings: Any) -> None:
        self.calls = 0

        def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                self.calls += 1
                return graph(*args)

            return run

        def function(x: torch.Tensor) -> torch.Tensor:
            return (x * 3).sin()

        torch._dynamo.reset()
        self.function = torch.compile(function, backend=backend, **settings)

    def __call__(self) -> int:
        """Call the function; return how many of its calls have been compiled."""
        self.function(torch.ones(4))
        return self.calls


def coverage(run: Run) -> Finding:
    """What was looked at; a skip is about graphs, whose trace PyTorch 2.6 lacks."""
    (finding,) = (f for f in run.findings if f.check == "coverage" and f.verdict is not Verdict.SKIP)
    return finding


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_that_was_compiled_before_the_block_is_compiled_again_after_it(fullgraph: bool) -> None:
    function = Counted(fullgraph=fullgraph)
    assert function() == 1
    with Shadow() as shadow:
        assert function() == 1
        assert function() == 1
    assert shadow.compiled == 2
    assert [function(), function()] == [2, 3]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_that_is_first_called_inside_the_block_is_compiled_after_it(fullgraph: bool) -> None:
    function = Counted(fullgraph=fullgraph)
    with ampcheck.watch(fail_on="never"):
        assert function() == 0
    assert [function(), function()] == [1, 2]


def test_the_stance_of_the_user_has_no_say_inside_and_is_kept() -> None:
    function = Counted(fullgraph=True)
    with torch.compiler.set_stance("fail_on_recompile"), Shadow():
        assert function() == 0
        with torch.compiler.set_stance("default"):
            assert function() == 0
    assert function() == 1
    with torch.compiler.set_stance("force_eager"):
        with Shadow():
            function()
        assert function() == 1


def test_blocks_that_end_in_another_order_leave_compiled_code_on() -> None:
    function, first_ended, second_began = Counted(), threading.Event(), threading.Event()

    def second() -> None:
        with Shadow():
            second_began.set()
            assert first_ended.wait(60)

    thread = threading.Thread(target=second)
    with Shadow():
        thread.start()
        assert second_began.wait(60)
    first_ended.set()
    thread.join()
    assert function() == 1


def test_a_thread_that_outlives_the_block_compiles() -> None:
    function, ended = Counted(fullgraph=True), threading.Event()
    counts: list[int] = []

    def compute() -> None:
        assert ended.wait(60)
        counts.append(function())

    with Shadow():
        thread = threading.Thread(target=compute)
        thread.start()
    ended.set()
    thread.join()
    assert counts == [1]


def test_what_a_compiled_function_overflows_is_found_as_in_eager_mode() -> None:
    function = torch.compile(lambda x: (x * 300).sum(), fullgraph=True)
    with ampcheck.watch(fail_on="never") as seen:
        function(torch.full((4,), 300.0, dtype=torch.float16)).item()
    (finding,) = seen.run.of(Verdict.FAIL)
    assert finding.check == "overflow"


def test_a_run_of_compiled_functions_is_no_full_pass() -> None:
    function = Counted(fullgraph=True)

    def compute() -> torch.Tensor:
        return function.function(torch.ones(4, dtype=torch.bfloat16)).sum()

    with ampcheck.watch(fail_on="never") as seen:
        compute().item()
    for run in (seen.run, ampcheck.audit(compute)):
        assert not run.failed
        assert coverage(run).verdict is Verdict.WARN
        assert "calls of compiled functions, which ran in eager mode (1x)" in coverage(run).message
    eager = ampcheck.audit(lambda: (torch.ones(4, dtype=torch.bfloat16) * 3).sin().sum())
    assert coverage(eager).verdict is Verdict.PASS


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_loop_says_that_its_compiled_step_was_judged_in_eager_mode(compiled: bool) -> None:
    model = nn.Linear(4, 4)
    network = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = network(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    run = ampcheck.audit({"model": model, "optimizer": optimizer, "step": step}, steps=2)
    finding = next(finding for finding in run.findings if finding.check == "coverage")
    assert not run.failed
    assert finding.verdict is (Verdict.WARN if compiled else Verdict.PASS)
    assert ("calls of compiled functions, which ran in eager mode" in run.coverage.unseen) is compiled
    step(2)
    assert ("values inside compiled code were not judged" in finding.message) is compiled


@pytest.mark.needs_torch("2.9", "associative_scan in eager mode; 2.6 compiles it until the recursion limit")
def test_operators_that_compile_themselves_are_no_compiled_functions() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    with Shadow() as shadow:
        sums = associative_scan(torch.add, torch.ones(4, 3), 0, combine_mode="generic")
    assert sums[-1].tolist() == [4.0, 4.0, 4.0]
    assert shadow.compiled == 0


def test_a_loop_that_compiles_itself_is_no_compiled_function_and_leaves_others_compiled() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    function = Counted()
    with Shadow() as shadow:
        _, powers = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), torch.ones(2)))
    assert powers.tolist() == [8.0, 8.0]
    assert (shadow.compiled, dict(shadow.unruled)) == (0, {})
    assert function() == 1
