"""observe_graphs around a user's own code: recompilations by kind, cache artifacts here and in child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_cases import Branching
from graph_watch import Observed, observe_graphs
from torch import nn

from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.compiled.graph.recorder import recorded_children
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict, collect
from ampcheck.core.subject import Subject
from ampcheck.outcome.raising import with_test

X = torch.randn(2, 4)


@pytest.fixture(autouse=True)
def _cold() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def failures(run: Run | None) -> list[str]:
    assert run is not None
    return [finding.check for finding in run.of(Verdict.FAIL)]


def observed(act: Callable[[], object], **settings: Any) -> Observed:
    with observe_graphs(raises=False, **settings) as seen:
        act()
    return seen


def toggling() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    model.eval()
    compiled(X)
    with torch.no_grad():
        compiled(X)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(X)
    with torch.inference_mode():
        compiled(X)


def test_recompilations_are_told_by_the_kind_of_guard_and_by_the_calling_line() -> None:
    seen = observed(toggling)
    assert seen.stats is not None
    assert len(seen.stats.graphs) == 5
    assert [one.kind for one in seen.stats.recompiles] == ["training flag", "grad mode", "autocast", "inference mode"]
    first = toggling.__code__.co_firstlineno
    assert [(one.where.line or 0) - first for one in seen.stats.recompiles] == [5, 7, 9, 11]
    assert failures(seen.run) == ["recompile"] * 4
    assert failures(observed(toggling, max_recompiles=4).run) == []


def test_modes_in_another_order_have_the_same_kinds() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")

    def act() -> None:
        with torch.inference_mode():
            compiled(X)
        with torch.autocast("cpu", torch.bfloat16):
            compiled(X)
        with torch.no_grad():
            compiled(X)

    seen = observed(act)
    assert seen.stats is not None
    assert len(seen.stats.graphs) == 3
    older = ("grad mode",) if torch.__version__ < (2, 7) else ()  # which has autocast in the guard of a tensor
    assert seen.stats.recompiles[0].kind in ("grad mode and autocast", "autocast", "inference mode", *older)


def test_a_block_that_is_warm_already_passes_on_what_it_ran() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    compiled(X)
    seen = observed(lambda: [compiled(X) for _ in range(3)])
    assert failures(seen.run) == []
    assert seen.run is not None
    assert seen.run.coverage.seen == {"graphs": 0, "compiled runs": 3}
    (told,) = (finding for finding in seen.run.findings if finding.check == "graph-break")
    assert told.verdict is Verdict.SKIP, "a break of which nobody was told is no pass"
    assert "torch.compiler.reset() before the block" in told.hint


def test_a_break_that_was_compiled_before_the_block_is_found_by_what_runs_behind_it() -> None:
    compiled = torch.compile(Branching(), backend="eager")
    with torch.no_grad():
        compiled(X)
        seen = observed(lambda: compiled(X))
        allowed = observed(lambda: compiled(X), max_breaks=1)
    assert failures(allowed.run) == []
    assert seen.run is not None
    assert failures(seen.run) == ["graph-break"]
    (found,) = seen.run.of(Verdict.FAIL)
    line = Branching.forward.__code__.co_firstlineno + 2
    assert (Path(found.where.file).name, found.where.line) == ("graph_cases.py", line)
    assert "compiled before the block" in found.message
    assert "warm up inside" in found.hint


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branching()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        x = x + 1
        x = self.inner(x)
        return x * 2


def test_a_break_in_what_is_called_counts_once_when_it_was_compiled_before_the_block_too() -> None:
    compiled = torch.compile(Outer(), backend="eager")
    with torch.no_grad():
        cold = observed(lambda: compiled(X))
        warm = observed(lambda: compiled(X))
    assert cold.stats is not None
    assert warm.stats is not None
    places = [{(one.where.file, one.where.line) for one in seen.stats.breaks} for seen in (cold, warm) if seen.stats]
    assert places[0] == places[1]
    assert len(places[0]) == 2


def test_a_break_that_is_compiled_inside_the_block_is_told_once_with_its_reason() -> None:
    compiled = torch.compile(Branching(), backend="eager")
    with torch.no_grad():
        seen = observed(lambda: [compiled(X) for _ in range(2)], max_breaks=2)
    assert seen.stats is not None
    assert [(one.times, "compiled before" in one.reason) for one in seen.stats.breaks] == [(2, False)]
    assert seen.stats.compiled_before == 0
    assert {f.verdict for f in seen.run.findings} == {Verdict.PASS} if seen.run else False


def test_what_ran_eager_since_before_the_block_is_not_said_to_be_left_out() -> None:
    def raises(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise ValueError("no such op")

    compiled, warm = torch.compile(Branching(), backend=raises), torch.compile(lambda x: x * 2, backend="eager")
    with torch._dynamo.config.patch(suppress_errors=True):
        for part in (compiled, warm):
            part(X)
        seen = observed(lambda: (compiled(X), warm(X)))
    assert seen.run is not None
    found = next(f for f in seen.run.of(Verdict.FAIL) if f.check == "eager-fallback")
    assert "before the block" in found.message
    assert "warm up inside" in found.hint


def test_a_block_without_compiled_code_fails() -> None:
    assert failures(observed(lambda: nn.Linear(4, 4)(X)).run) == ["coverage"]


def test_eager_modules_beside_compiled_code_are_no_fallback() -> None:
    compiled, beside = torch.compile(lambda x: x * 2, backend="eager"), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert failures(observed(lambda: compiled(beside(X).detach())).run) == []


def test_the_block_raises_for_its_failures_and_is_emitted() -> None:
    with collect() as runs, pytest.raises(AssertionError, match="recompile"), observe_graphs():
        toggling()
    assert len(runs) == 1
    assert runs[0].failed


def test_an_exception_of_the_block_goes_on_and_the_run_is_kept() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    with collect() as runs, pytest.raises(RuntimeError), observe_graphs() as seen:
        compiled(X).reshape(7)
    assert runs == [with_test(seen.run)]
    assert runs[0].coverage.unseen == {"code after the RuntimeError": 1}


@pytest.mark.parametrize("wrong", [-1, "a", True, 0.5])
def test_a_limit_that_is_no_number_of_times_is_refused_before_the_block_runs(wrong: Any) -> None:
    for limit in ("max_breaks", "max_recompiles"):
        required = f"{limit} must be a whole number, 0 or more"
        with pytest.raises(UsageError, match=required), observe_graphs(**{limit: wrong}):
            pytest.fail("the block ran")


def test_another_profiler_keeps_its_place() -> None:
    calls = []
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    profiler = lambda frame, event, value: calls.append(event)  # noqa: E731
    sys.setprofile(profiler)
    try:
        seen = observed(lambda: compiled(X))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert failures(seen.run) == []
    assert seen.run is not None
    assert "calls that could not be counted" in seen.run.coverage.unseen
    assert calls


def test_afterwards_nothing_is_left_behind() -> None:
    before = dict(os.environ), sys.getprofile()
    observed(toggling)
    assert (dict(os.environ), sys.getprofile()) == before


# Cache artifacts -------------------------------------------------------------------------------------------------


def fresh(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def artifacts(act: Callable[[], object]) -> list[tuple[str, int | None, str]]:
    run = judge_graph(Subject(act, name="planted"))
    return [(f.verdict.value, f.where.line, f.message) for f in run.findings if f.check == "cache-artifacts"]


def saves_cold() -> None:
    torch.compiler.save_cache_artifacts()
    torch.compile(fresh)(X)


def saves_and_loads() -> None:
    torch.compile(fresh)(X)
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    torch._dynamo.reset()
    torch.compiler.load_cache_artifacts(saved[0])
    torch.compile(fresh)(X)


def loads_for_another() -> None:
    torch.compile(fresh)(X)
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    torch._dynamo.reset()
    torch.compiler.load_cache_artifacts(saved[0])
    torch.compile(lambda x: x.sin().cos())(X)


@pytest.fixture
def no_artifacts() -> Iterator[None]:
    """Artifacts pile up in a process; a test begins without those of the others."""
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        yield


@pytest.mark.needs_torch("2.7", "torch.compiler.save_cache_artifacts")
@pytest.mark.usefixtures("no_artifacts")
def test_artifacts_saved_before_anything_was_compiled_are_found_at_the_line() -> None:
    (found,) = artifacts(saves_cold)
    assert found[0] == "fail"
    assert found[1] == saves_cold.__code__.co_firstlineno + 1
    assert "returned None and saved nothing, with no graphs compiled before it" in found[2]


@pytest.mark.needs_torch("2.7", "torch.compiler.save_cache_artifacts")
@pytest.mark.usefixtures("no_artifacts")
def test_artifacts_that_are_saved_loaded_and_used_pass() -> None:
    assert [verdict for verdict, _, _ in artifacts(saves_and_loads)] == ["pass", "pass"]


@pytest.mark.needs_torch("2.7", "torch.compiler.save_cache_artifacts")
@pytest.mark.usefixtures("no_artifacts")
def test_artifacts_that_are_loaded_and_not_used_are_found() -> None:
    saved, loaded = artifacts(loads_for_another)
    assert saved[0] == "pass"
    assert loaded[0] == "fail"
    assert "none of" in loaded[2]


# Child processes -------------------------------------------------------------------------------------------------


def python(code: str, *options: str, **environment: str) -> str:
    command = [sys.executable, *options, "-W", "ignore", "-c", code]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def test_a_child_process_that_saves_too_early_is_found() -> None:
    run = judge_graph(Subject(lambda: python("import torch; torch.compiler.save_cache_artifacts()"), name="planted"))
    (found,) = run.of(Verdict.FAIL)
    assert found.check == "cache-artifacts"
    assert "a child process" in found.message
    assert run.coverage.seen["child Pythons"] == 1
    assert run.of(Verdict.PASS) == (), "nothing else was looked at"


def test_a_child_process_tells_what_it_compiled() -> None:
    code = "import torch; torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))"
    with recorded_children() as children:
        python(code)
        python("print(1)")
    assert (children.processes, children.graphs) == (1, 1)


def test_a_child_keeps_its_own_start_and_path(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.own = 'started'\n")
    with recorded_children():
        code = f"import sys; print(own, {os.environ['PYTHONPATH'].split(os.pathsep)[0]!r} in sys.path)"
        path = os.pathsep.join((os.environ["PYTHONPATH"], str(tmp_path)))
        assert python(code, PYTHONPATH=path).split() == ["started", "False"]


def test_a_child_that_takes_no_notice_of_the_environment_runs_as_ever() -> None:
    with recorded_children() as children:
        assert python("print('ran')", "-E") == "ran\n"
    assert children.processes == 0
