"""Graphs of running models: every break, recompilation and eager fallback is found where it is planted."""

from __future__ import annotations

import pytest
import torch
from graph_cases import (
    EAGER,
    Branching,
    Indexed,
    Net,
    X,
    assert_graphs,
    broken_backend,
    double,
    failures,
    judge,
    line_of,
    only,
    verdicts,
)
from torch import nn
from torch._dynamo.testing import CompileCounter

from ampcheck.compiled.graph.judge import measure_graph
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Verdict, collect
from ampcheck.core.subject import Subject

# Clean -----------------------------------------------------------------------------------------------------------


def test_a_model_in_one_graph_passes_with_its_counts() -> None:
    run = assert_graphs(Net(), (X,))
    assert verdicts(run) == {"graph-break": "pass", "recompile": "pass", "eager-fallback": "pass"}
    assert run.coverage.seen == {"graphs": 1, "compiled runs": 1, "calls": 2}
    assert run.coverage.unseen == {}


def test_under_inductor_the_caches_are_counted() -> None:
    run = assert_graphs(Net(), (X,), options=CompileOptions())
    (caches,) = [table for table in run.tables if table.title.startswith("Compiler caches")]
    counts = {str(row[0]): row[1] for row in caches.rows}
    whole = torch._functorch.config.enable_autograd_cache  # off by default in 2.6
    assert sum(count for name, count in counts.items() if name.startswith("AOTAutograd cache")) == whole
    assert any(name.startswith("FX graph cache") for name in counts) or counts == {"AOTAutograd cache hits": 1}
    (graphs,) = [table for table in run.tables if table.title.startswith("Graphs")]
    assert graphs.rows[0][2] > 0


def test_the_users_model_and_inputs_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = X.clone()
    assert_graphs(model, (x,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(x, X)


def test_the_run_is_emitted() -> None:
    with collect() as runs:
        run = assert_graphs(double, [(X,)])
    assert runs == [run]


# Breaks ----------------------------------------------------------------------------------------------------------


def test_a_break_is_found_at_its_line_with_reason_and_advice() -> None:
    run = judge((Branching(), (X,)))
    found = only(run, "graph-break")
    assert found.where.file.endswith("graph_cases.py")
    assert found.where.line == line_of("# PLANTED: a branch on data")
    assert "Data-dependent branching" in found.message
    assert "\n" not in found.message
    assert "torch.cond" in found.hint


@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_a_break_counts_as_often_as_a_call_runs_into_it(blocks: int) -> None:
    run = judge((nn.Sequential(*(Branching() for _ in range(blocks))), (X,)))
    assert only(run, "graph-break").observed == blocks


def test_breaks_up_to_the_limit_pass_and_are_named() -> None:
    model = nn.Sequential(Branching(), Branching())
    run = judge((model, (X,)), max_breaks=2)
    (passed,) = [f for f in run.findings if f.check == "graph-break"]
    assert passed.verdict is Verdict.PASS
    assert f"graph_cases.py:{line_of('# PLANTED: a branch on data')}" in passed.message
    assert failures(run) == []
    assert failures(judge((model, (X,)), max_breaks=1)) == ["graph-break"]


def test_a_break_in_a_loop_leaves_the_function_eager_and_is_told_as_a_break() -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + 1
            print(end="")
        return x

    run = judge((loop, [(X,)]))
    assert failures(run) == ["graph-break"]
    assert "eager because of breaks: loop" in only(run, "graph-break").message
    assert verdicts(run)["coverage"] == "skip"


def test_a_disabled_function_is_a_break_at_its_call_and_nothing_more() -> None:
    class Disabling(Net):
        @torch.compiler.disable
        def aside(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.aside(self.up(x)) + 1

    assert failures(judge((Disabling(), (X,)))) == ["graph-break"]
    assert failures(judge((Disabling(), (X,)), max_breaks=1)) == []


def test_with_fullgraph_the_break_is_a_failure_whatever_the_limit() -> None:
    run = judge((Branching(), (X,)), fullgraph=True, max_breaks=9)
    assert failures(run) == ["graph-break"]
    assert only(run, "graph-break").where.line == line_of("# PLANTED: a branch on data")


# Recompilations --------------------------------------------------------------------------------------------------


def clamped(x: torch.Tensor) -> torch.Tensor:
    """Code with a graph for small sizes and others for large ones."""
    return x * 2 if x.shape[0] < 32 else x[: x.shape[0] // 4 * 4] + x.shape[0] // 40


def sizes(*given: int) -> list[tuple[torch.Tensor]]:
    return [(torch.ones(n, 3),) for n in given]


def test_the_one_recompilation_that_makes_a_size_dynamic_is_free() -> None:
    run = judge((double, sizes(4, 5, 6, 7)))
    assert failures(run) == []
    (passed,) = [f for f in run.findings if f.check == "recompile"]
    assert "1 recompilation to learn what varies (shape)" in passed.message


@pytest.mark.parametrize(("given", "dynamic"), [((4, 5, 1), None), ((4, 5, 6, 1), None), ((4, 5, 1), True)])
def test_a_last_batch_of_one_has_a_graph_of_its_own(given: tuple[int, ...], dynamic: bool | None) -> None:
    run = judge((double, sizes(*given)), dynamic=dynamic)
    assert failures(run) == []


@pytest.mark.parametrize(("given", "dynamic", "count"), [((4, 5, 6, 7), False, 2), ((4, 5, 1, 0), None, 1)])
def test_a_size_that_is_specialised_again_and_again_is_found(
    given: tuple[int, ...], dynamic: bool | None, count: int
) -> None:
    found = only(judge((double, sizes(*given)), dynamic=dynamic), "recompile")
    assert found.observed == count
    assert "its guard on shape" in found.message
    assert "mark_dynamic" in found.hint
    assert found.where.line == double.__code__.co_firstlineno or found.where.line == double.__code__.co_firstlineno + 1


def test_a_size_beyond_the_limit_that_the_code_has_is_no_graph_of_one() -> None:
    found = only(judge((clamped, sizes(4, 5, 40, 6, 41))), "recompile")
    assert found.observed >= 1


def test_marking_the_dimension_as_the_hint_says_mends_it() -> None:
    calls = sizes(4, 5, 6)
    for (x,) in calls:
        torch._dynamo.mark_dynamic(x, 0)
    stats = measure_graph(Subject((double, calls)), options=EAGER)
    assert len(stats.graphs) == 1


def test_recompilations_up_to_the_limit_pass() -> None:
    assert failures(judge((double, sizes(4, 5, 6, 7)), dynamic=False, max_recompiles=2)) == []


def test_a_number_that_changes_at_each_call_is_found_after_the_warm_up() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls if self.calls % 2 else x - self.calls

    run = judge((Counting(), (X,)), warmup=1)
    found = only(run, "recompile")
    assert "after the warm-up" in found.message
    assert "self.calls" in found.message
    assert "constant attribute" in found.message
    assert "buffer" in found.hint


def test_one_call_that_needs_a_function_in_several_sizes_is_no_failure() -> None:
    class Narrowing(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.linear = nn.Linear(size, size // 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    blocks = [Narrowing(size) for size in (32, 16, 8, 4)]
    assert failures(judge((blocks, [(torch.randn(2, 32),)]))) == []


def test_compilations_by_mode_are_told_when_asked_for_and_no_alarm() -> None:
    run = assert_graphs(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), (X,), graphs=GraphLimits(modes=True))
    (table,) = [table for table in run.tables if table.title.startswith("Graphs of each mode")]
    assert [row[0] for row in table.rows] == ["train", "eval", "no_grad", "autocast", "inference_mode"]
    assert [row[1] for row in table.rows] == [1] * 5


# What runs eager -------------------------------------------------------------------------------------------------


@torch._dynamo.config.patch(specialize_int=True)  # as releases after 2.6 do for integer attributes of modules
def test_blocks_beyond_the_limit_are_each_found_eager() -> None:
    stats = measure_graph(Subject(([Indexed(i, False) for i in range(12)], [(X,)])), options=EAGER)
    (found,) = stats.fallbacks
    assert found.cause == "recompile limit"
    assert list(found.names) == [str(i) for i in range(8, 12)]
    run = judge(([Indexed(i, False) for i in range(12)], [(X,)]))
    assert failures(run) == ["recompile", "eager-fallback"]
    assert only(run, "eager-fallback").observed == 4
    assert "self.place == 7" in only(run, "eager-fallback").message


def test_blocks_with_the_index_in_a_buffer_share_their_graphs() -> None:
    run = judge(([Indexed(i, True) for i in range(12)], [(X,)]))
    assert failures(run) == []
    assert run.coverage.seen["graphs"] == 2


@pytest.mark.parametrize("shape", [(Net(), (X,)), (double, [(X,)])], ids=["module", "function"])
def test_a_backend_error_that_is_swallowed_is_found(shape: object) -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        run = judge(shape, backend=broken_backend)
    assert failures(run) == ["eager-fallback"]
    assert "RuntimeError: planted" in only(run, "eager-fallback").message
    assert only(run, "eager-fallback").where.file.endswith("graph_cases.py")


def test_a_backend_error_that_is_raised_is_an_exception_and_no_fallback() -> None:
    run = judge((Net(), (X,)), backend=broken_backend)
    assert failures(run) == ["compiled-exception"]


def test_a_module_that_dynamo_leaves_out_because_of_another_is_found() -> None:
    """Compiling nn.Identity makes PyTorch 2.13 leave out the function that wraps all of its own modules."""
    stack = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    counter = CompileCounter()
    torch._dynamo.reset()
    for block in (nn.Identity(), stack):
        torch.compile(block, backend=counter)(X)  # type: ignore[arg-type]
    left_out = [] if counter.frame_count else ["1"]
    run = judge(([nn.Identity(), stack, Net()], [(X,)]))
    assert [f.where.module for f in run.of(Verdict.FAIL)] == left_out


def test_a_module_without_tensor_operations_is_no_fallback() -> None:
    assert failures(judge(([nn.Identity(), Net()], [(X,)]))) == []
