"""`ampcheck.watch` in a user's own loop."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampcheck
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Run, Verdict, collect
from ampcheck.torchtools import interception


class Loud(nn.Module):
    """Its second layer overflows float16 from inputs of size 100 on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.first.weight, 1.0)
        nn.init.constant_(self.second.weight, 100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


@pytest.fixture(scope="module")
def loop() -> tuple[Run, list[torch.Tensor]]:
    """Six calls, every third watched; the fourth, which is one of them, overflows."""
    model = Loud()
    compiled = torch.compile(model)
    losses: list[torch.Tensor] = []
    with ampcheck.watch(compiled, every=3, name="loud", fail_on="never") as seen:
        for number in range(6):
            with torch.autocast("cpu", torch.float16):
                out = compiled(torch.full((2, 4), 100.0 if number == 3 else 0.1))
            losses.append(out.detach().float().mean())
    return seen.run, losses


def test_what_overflows_in_a_users_loop_is_found_at_its_call_module_and_line(
    loop: tuple[Run, list[torch.Tensor]],
) -> None:
    run, losses = loop

    assert [bool(loss.isfinite()) for loss in losses] == [True, True, True, False, True, True]
    (finding,) = run.of(Verdict.FAIL)
    assert finding.check == "overflow"
    assert (finding.where.module, finding.where.phase, finding.where.step) == ("second", "forward", 3)
    assert finding.where.file.endswith("test_watch.py")
    assert finding.subject == "loud"


def test_the_run_says_how_much_was_looked_at(loop: tuple[Run, list[torch.Tensor]]) -> None:
    run, _ = loop

    assert (run.coverage.seen["graphs"], run.coverage.seen["measured calls"]) == (1, 2)
    assert run.tables
    assert "loud" in run.title


def test_leaving_the_block_raises_what_failed() -> None:
    compiled = torch.compile(lambda x: (x * 7).to(torch.float16))
    with pytest.raises(AssertionError, match="finite values must stay finite"), ampcheck.watch(compiled):
        compiled(torch.tensor([1e5]))


def test_the_statistics_can_be_asked_for_inside_the_block() -> None:
    compiled = torch.compile(lambda x: (x * 7).to(torch.float16))
    with ampcheck.watch(compiled) as seen:
        compiled(torch.tensor([1.0]))
        assert seen.stats.values.measured == 1
        compiled(torch.tensor([2.0]))
        assert seen.stats.values.measured == 2
    assert seen.stats.values.sites[0].amax == 14.0


def test_a_model_that_was_compiled_and_called_before_is_watched_all_the_same() -> None:
    compiled = torch.compile(lambda x: (x * 9).to(torch.float16))
    compiled(torch.tensor([1.0]))

    with ampcheck.watch(compiled) as seen:
        compiled(torch.tensor([2.0]))

    assert seen.stats.values.measured == 1


def test_an_eager_model_is_watched_op_by_op_with_its_modules() -> None:
    model = Loud()
    with ampcheck.watch(model, fail_on="never") as seen, torch.autocast("cpu", torch.float16):
        model(torch.full((2, 4), 100.0))

    overflow = next(finding for finding in seen.run.of(Verdict.FAIL) if finding.check == "overflow")
    assert overflow.where.module == "second"
    assert seen.stats.ops is not None
    assert seen.stats.values is None


def test_a_compiled_model_that_rounds_nothing_to_16_bits_is_no_pass() -> None:
    torch.compiler.reset()
    compiled = torch.compile(torch.nn.Linear(4, 4))
    with ampcheck.watch(compiled, fail_on="never") as seen:
        compiled(torch.ones(2, 4))

    (finding,) = seen.run.findings
    assert (finding.check, finding.verdict) == ("coverage", Verdict.FAIL)
    assert "level='all'" in finding.hint


def test_without_objects_ops_and_the_use_of_autocast_are_watched() -> None:
    with pytest.raises(AssertionError, match="overflow"), ampcheck.watch():
        squared = torch.full((4,), 300.0, dtype=torch.float16).square()
    assert squared.isinf().all()
    weight = torch.ones(4, 4, requires_grad=True)
    region = torch.autocast("cpu", torch.bfloat16)
    with pytest.raises(AssertionError, match="autocast-scope"), ampcheck.watch(), region:
        torch.mm(weight, weight).float().sum().backward()


def test_named_checks_select_what_is_watched_and_reported() -> None:
    with ampcheck.watch(checks=["autocast-scope"], fail_on="never") as seen:
        torch.full((4,), 300.0, dtype=torch.float16).square()
    assert seen.stats.ops is None
    assert {finding.check for finding in seen.run.findings} <= {"autocast-scope", "coverage"}


def test_graph_checks_are_watched_where_they_are_named() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compiler.reset()
    compiled = torch.compile(broken)
    with pytest.raises(AssertionError, match="graph-break"), ampcheck.watch(checks="graph-break"):
        compiled(torch.ones(3))


def test_a_block_in_which_nothing_runs_is_no_pass() -> None:
    with pytest.raises(AssertionError, match="coverage"), ampcheck.watch():
        pass


@pytest.mark.parametrize("fail_on", ["fail", "never"])
def test_the_run_is_emitted_once_also_when_the_block_raises(fail_on: str) -> None:
    def body() -> None:
        with ampcheck.watch(fail_on=fail_on):
            torch.ones(2).add(1)
            raise ZeroDivisionError

    with collect() as runs, pytest.raises(ZeroDivisionError):
        body()
    assert len(runs) == 1


def test_a_watch_ends_with_one_line_and_the_findings_that_do_not_raise(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with ampcheck.watch():
        torch.ones(2).add(1)
    assert capsys.readouterr().out == "ampcheck: 2 ops, nothing found\n"
    with ampcheck.watch(fail_on="never"):
        torch.ones(2, dtype=torch.float16).mul(7e4).sum().item()
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert (first.endswith(", 1 finding"), second) == (True, f"FAIL overflow: {request.node.nodeid}")
    with pytest.raises(AssertionError, match="overflow"), ampcheck.watch(fail_on="warn"):
        torch.ones(2, dtype=torch.float16).mul(7e4).sum().item()
    (line,) = capsys.readouterr().out.splitlines()  # the error has the findings
    assert line == first


def test_under_pytest_the_subject_of_a_block_is_its_test_and_the_watched_model(request: pytest.FixtureRequest) -> None:
    with ampcheck.watch() as block, ampcheck.watch(Loud()) as model:
        Loud()(torch.ones(1, 4))
    assert {finding.subject for finding in block.run.findings} == {request.node.nodeid}
    assert {finding.subject for finding in model.run.findings} == {f"{request.node.nodeid} [Loud]"}


def test_outside_of_pytest_a_block_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with ampcheck.watch() as block:
        torch.ones(2).add(1)
    assert {finding.subject for finding in block.run.findings} == {"this block"}


def test_warnings_raise_where_asked_for() -> None:
    def body(fail_on: str) -> None:
        with ampcheck.watch(checks=["autocast-bypass"], fail_on=fail_on), torch.autocast("cpu", torch.bfloat16):
            torch.zeros(8, 8).addmm_(torch.ones(8, 8), torch.ones(8, 8))

    body("fail")
    for fail_on in ("warn", "incomplete"):
        with pytest.raises(AssertionError, match=r"\[autocast-bypass\] warn"):
            body(fail_on)


def test_the_loss_of_a_step_needs_an_optimizer() -> None:
    with ampcheck.watch(Loud(), fail_on="never") as seen, pytest.raises(UsageError, match="needs a watched optimizer"):
        seen.step(1.0)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ((Loud(), Loud()), "found 2 models"),
        ((Loud(), torch.amp.GradScaler("cpu")), "pass the optimizer"),
        ((3,), "found int"),
    ],
    ids=["two models", "scaler alone", "number"],
)
def test_objects_that_cannot_be_watched_are_refused(objects: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ampcheck.watch(*objects)


def test_an_exception_of_the_loop_comes_through() -> None:
    with pytest.raises(ZeroDivisionError), ampcheck.watch(torch.compile(Loud())):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "bits"}, "casts, ops, all"),
        ({"every": 0}, "1 or more"),
        ({"every": 2.5}, "1 or more"),
        ({"every": True}, "1 or more"),
        ({"fail_on": "error"}, "fail_on must be one of fail, warn, incomplete, never; found 'error'"),
        ({"fail_on": True}, "fail_on must be one of"),
        ({"checks": ["tf32"]}, "checks must be one of"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_the_valid_ones(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ampcheck.watch(Loud(), **settings)


def test_watching_leaves_no_trace_in_the_compiler() -> None:
    from torch._inductor import compile_fx

    entry = compile_fx.compile_fx
    with ampcheck.watch(torch.compile(Loud()), fail_on="never"):
        assert compile_fx.compile_fx is not entry
    assert compile_fx.compile_fx is entry
    assert interception.unsupported() == ""


@pytest.mark.parametrize("checks", [None, ("autocast-bypass",), ("autocast-bypass", "overflow")], ids=str)
def test_an_op_that_bypasses_autocast_is_reported_whatever_else_is_watched(checks: tuple[str, ...] | None) -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    with ampcheck.watch(checks=checks, fail_on="never") as seen, torch.autocast("cpu", torch.bfloat16):
        torch.zeros(8, 8).addmm_(a, b)
    assert "autocast-bypass" in {finding.check for finding in seen.run.of(Verdict.WARN)}


def test_limits_of_another_type_are_refused() -> None:
    with pytest.raises(UsageError, match=r"limits must be ampcheck.Limits\(...\); found a dict"):
        ampcheck.watch(limits={"headroom": 2.0})  # type: ignore[arg-type]


def coverage_of(run: Run) -> Any:
    (finding,) = (finding for finding in run.findings if finding.check == "coverage")
    return finding


@pytest.mark.parametrize("whole", [False, True])
def test_a_partly_compiled_model_is_no_full_pass(whole: bool) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8) if whole else torch.compile(nn.Linear(8, 8))
            self.second = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    model = torch.compile(Partly()) if whole else Partly()
    with ampcheck.watch(model, fail_on="never") as seen, torch.autocast("cpu", torch.float16):
        model(torch.ones(4, 8))
    coverage = coverage_of(seen.run)
    assert coverage.verdict is (Verdict.PASS if whole else Verdict.WARN)
    assert ("modules that are not compiled (2x)" in coverage.message) is not whole
    assert dict(seen.run.coverage.unseen) == ({} if whole else {"modules that are not compiled": 2})


def test_a_block_that_raises_passes_no_check() -> None:
    def stopping(scale: float) -> Run:
        def stop() -> None:
            raise ValueError("stop")

        with collect() as runs, contextlib.suppress(ValueError), ampcheck.watch():
            (torch.full((4,), scale).half() * scale).sum().item()
            stop()
        (run,) = runs
        return run

    run = stopping(2.0)
    assert {f.check for f in run.of(Verdict.PASS)} <= {"autocast-state"}
    assert "low-precision-error" not in {finding.check for finding in run.findings}
    (overflow,) = (finding for finding in run.findings if finding.check == "overflow")
    assert overflow.message.startswith("not judged: the block raised ValueError: stop before it came to its end")
    assert [finding.check for finding in stopping(300.0).of(Verdict.FAIL)] == ["overflow"]


def test_ops_are_counted_once_however_often_the_run_is_read() -> None:
    with ampcheck.watch() as seen:
        total = torch.ones(3).half().sum()
        for _ in range(3):
            assert seen.run.coverage.seen["ops"] == 3
            assert seen.stats.ops.ops == 3
    assert seen.run.coverage.seen["ops"] == 3
    assert total.item() == 3.0


def test_a_watch_is_of_one_block_and_decorates_each_call() -> None:
    block = ampcheck.watch(fail_on="never")
    with block:
        torch.ones(2).sum()
    with pytest.raises(UsageError, match="of one block"):
        block.__enter__()

    @ampcheck.watch(checks=["overflow"])
    def compute(scale: float) -> float:
        return (torch.full((4,), scale).half() * scale).sum().item()

    assert compute(2.0) == 16.0
    with pytest.raises(AssertionError, match="overflow"):
        compute(300.0)
    assert compute(3.0) == 36.0


def test_graphs_are_watched_without_the_ops_that_would_hide_them() -> None:
    function = torch.compile(lambda x: (x * 3).sin(), backend="eager")
    with ampcheck.watch(graphs=GraphLimits()) as seen:
        function(torch.ones(4))
    assert not seen.run.failed
    assert seen.stats.ops is None
    with pytest.raises(UsageError, match="in a block of their own"):
        ampcheck.watch(checks=["overflow", "graph-break"])
    with pytest.raises(UsageError, match="graphs must be a GraphLimits; found 3"):
        ampcheck.watch(graphs=3)


def test_a_failing_test_of_graphs_logs_no_empty_lines(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        x = x * 3
        torch._dynamo.graph_break()
        return x.sin()

    function = torch.compile(breaks, backend="eager")
    with caplog.at_level("DEBUG"), ampcheck.watch(checks=["graph-break"], fail_on="never") as seen:
        function(torch.ones(4))
    assert seen.run.failed
    assert [record.name for record in caplog.records if record.name == "torch.__trace"] == []
