"""PyTorch tells what it compiles in the words known here; where it does not, graphs are skipped and not guessed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graph_watch import observe_graphs

from ampcheck.compiled.graph.judge import judge_graph, measure_graph
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject
from ampcheck.torchtools import dynamo

X = torch.randn(2, 3)


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x * 2
    return x + 1


def test_this_pytorch_is_known() -> None:
    assert dynamo.trace_unsupported() == ""


def test_every_graph_that_dynamo_counts_is_told() -> None:
    told: list[dynamo.TraceRecord] = []
    torch._dynamo.reset()
    before = dynamo.counters("stats")["unique_graphs"]
    with dynamo.compile_trace(told.append):
        compiled = torch.compile(branching, backend="eager")
        compiled(X.abs())
        compiled(torch.ones(5, 3))
    graphs = [one for one in told if one.name == "compilation_metrics" and one.fields.get("graph_op_count")]
    assert len(graphs) == dynamo.counters("stats")["unique_graphs"] - before > 1
    assert {one.name for one in told} >= {"dynamo_start", "dynamo_graph_break_reason", "recompile_reasons"}
    torch._dynamo.reset()


def test_the_trace_is_left_alone_afterwards() -> None:
    told: list[dynamo.TraceRecord] = []
    with dynamo.compile_trace(told.append):
        pass
    torch.compile(lambda x: x + 3, backend="eager")(X)
    assert told == []


@pytest.mark.parametrize("kind", ["module", "function"])
def test_wrapped_parts_are_known_and_others_are_not(kind: str) -> None:
    part = torch.nn.Linear(3, 3) if kind == "module" else branching
    assert not dynamo.is_compiled(part)
    assert dynamo.is_compiled(torch.compile(part, backend="eager"))
    assert not dynamo.is_compiled(torch.compiler.disable(branching))


def test_an_unknown_pytorch_is_a_clear_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import utils

    fields = {n: f for n, f in utils.CompilationMetrics.__dataclass_fields__.items() if n != "fail_reason"}
    monkeypatch.setattr(utils.CompilationMetrics, "__dataclass_fields__", fields)
    run = judge_graph(Subject((branching, [(X,)])))
    with observe_graphs() as seen:
        torch.compile(branching, backend="eager")(X)
    assert seen.run is not None
    for findings in (run.findings, seen.run.findings):
        (found,) = findings
        assert found.verdict is Verdict.SKIP
        assert "fail_reason" in found.message


def test_a_pytorch_that_compiles_and_tells_nothing_is_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "TRACE_RECORDS", frozenset())
    stats = measure_graph(Subject((branching, [(X,)])), options=CompileOptions("eager"))
    assert "wrote no record" in stats.unsupported


def test_a_pytorch_without_cache_artifacts_and_stances_imports_and_runs() -> None:
    code = (
        "import torch; c = torch.compiler; del c.save_cache_artifacts, c.load_cache_artifacts, c.set_stance\n"
        "from ampcheck.compiled.graph.judge import judge_graph; from ampcheck.core.subject import Subject\n"
        "from graph_cases import Net\n"
        "model = Net(); model.compile(backend='eager')\n"
        "wrong = Subject((model, [(torch.ones(1, 3),)]))\n"
        "assert not judge_graph(Subject((model, [(torch.ones(1, 4),)]))).failed; assert judge_graph(wrong).failed\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
