"""Graphs of every kind of subject: compiled already, raising, training, with bad settings, with nothing seen."""

from __future__ import annotations

import logging
import logging.handlers
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import (
    EAGER,
    Net,
    X,
    assert_graphs,
    double,
    failures,
    judge,
    judge_compiled,
    only,
)
from graph_watch import observe_graphs
from torch import nn

from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.graph.judge import judge_graph, measure_graph
from ampcheck.compiled.graph.run import own_device
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import GraphLimits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject
from ampcheck.torchtools.dynamo import configured, recompile_limit

# Nothing, exceptions, state --------------------------------------------------------------------------------------


def test_a_run_in_which_nothing_compiles_fails() -> None:
    with torch._dynamo.config.patch(disable=True):
        run = judge((lambda x: x * 2, [(X,)]))  # which Dynamo of 2.6 leaves out for good then
    assert run.failed
    assert run.of(Verdict.PASS) == ()


def test_a_subject_that_raises_in_eager_mode_too_fails_under_coverage() -> None:
    run = judge((lambda x: x.reshape(7), [(X,)]))
    assert failures(run) == ["coverage"]
    assert "in eager mode too" in only(run, "coverage").message


def test_autocast_that_a_compiled_call_leaves_on_is_found_and_put_back() -> None:
    def indexing(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x.index_select(0, index)

    run = judge((indexing, [(X, torch.tensor([99]))]))
    assert failures(run) == ["autocast-state"]
    assert "nesting depth 0 before and 1 after" in only(run, "autocast-state").message
    assert not torch.is_autocast_enabled("cpu")
    assert failures(judge((indexing, [(X, torch.tensor([1]))]))) == []


def test_a_backward_that_raises_leaves_the_forward_judged() -> None:
    class Refusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_full_backward_hook(_raise)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    run = judge((Refusing(), (X,)))
    assert failures(run) == []
    assert run.coverage.unseen == {"backward, which raised RuntimeError: planted": 1}


def _raise(module: object, inputs: object, outputs: object) -> None:
    raise RuntimeError("planted")


# Compiled already, modes, bad input ------------------------------------------------------------------------------


def submodule_compiled() -> nn.Module:
    model = Net()
    model.up = torch.compile(model.up, backend="eager")
    return model


def compiled_in_place() -> nn.Module:
    model = Net()
    model.compile(backend="eager")
    return model


def function_of_a_compiled_module() -> Callable[..., object]:
    model = compiled_in_place()
    return lambda x: model(x) * 2


@pytest.mark.parametrize(
    "model",
    [
        torch.compile(Net(), backend="eager"),
        compiled_in_place(),
        submodule_compiled(),
        torch.compile(double, backend="eager"),
        function_of_a_compiled_module(),
    ],
    ids=["module", "in place", "submodule", "function", "function of one in place"],
)
def test_what_is_compiled_already_runs_with_its_own_settings(model: object) -> None:
    run = judge_compiled((model, [(X,)]))
    assert failures(run) == []
    assert run.coverage.seen["graphs"] == 1
    assert not any(table.title.startswith("Compiler caches") for table in run.tables), "not its own backend"
    with pytest.raises(UsageError, match="compiled already, so mode"):
        judge_graph(Subject((model, [(X,)])), options=CompileOptions(mode="default"))


class OwnNorm(nn.BatchNorm1d):
    """Compiled in place, PyTorch 2.9 leaves modules out whose forward is PyTorch's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def counted(compile: Callable[[nn.Module], object]) -> tuple[object, nn.BatchNorm1d]:
    """A subject made of a norm that counts its calls, and this norm."""
    norm = OwnNorm(4)
    return compile(norm), norm


@pytest.mark.parametrize(
    "compile",
    [
        lambda norm: torch.compile(norm, backend="eager"),
        lambda norm: nn.Sequential(torch.compile(norm, backend="eager"), nn.ReLU()),
        lambda norm: norm.compile(backend="eager") or norm,
        lambda norm: torch.compile(lambda x: norm(x) * 2, backend="eager"),
        lambda norm: norm.compile(backend="eager") or (lambda x: norm(x) * 2),
    ],
    ids=["module", "submodule", "in place", "function", "function of one in place"],
)
def test_of_what_is_compiled_already_a_copy_runs_and_the_users_stays_as_it_was(compile: Any) -> None:
    subject, norm = counted(compile)
    entered = []
    norm.register_forward_pre_hook(lambda module, args: entered.append(module is norm))
    run = judge_compiled((subject, [(X,)]))
    assert not [f for f in run.of(Verdict.FAIL) if f.check == "coverage"]
    assert run.coverage.seen["graphs"] >= 1
    assert int(norm.num_batches_tracked) == 0
    assert not any(entered)


def test_what_is_compiled_already_is_judged_where_its_weights_are_and_inputs_are_not_moved() -> None:
    places = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> object:
        places.extend(str(t.device) for t in inputs if isinstance(t, torch.Tensor))
        return graph.forward

    assert own_device(Subject((torch.compile(nn.Linear(2, 2)), [(X,)])), "cuda") == "cpu"
    assert own_device(Subject((nn.Linear(2, 2), [(X,)])), "cuda") == "cuda"
    judge_graph(Subject((torch.compile(double, backend=backend), [(X,)])), device="meta")
    assert set(places) == {"cpu"}


def test_cuda_graphs_that_compiled_code_asks_for_by_itself_are_judged() -> None:
    model = torch.compile(double, mode="reduce-overhead")
    with observe_graphs(raises=False) as seen:
        model(X)
    torch.compiler.reset()
    for run in (seen.run, judge_compiled((model, [(X,)])), judge_compiled(lambda: model(X))):
        assert run is not None
        (found,) = [f for f in run.findings if f.check == "cudagraph"]
        assert found.verdict is (Verdict.WARN if torch.cuda.is_available() else Verdict.SKIP)


def test_what_the_findings_tell_dynamo_does_not_log_besides() -> None:
    def too_often(act: Callable[[], object]) -> None:
        with configured({recompile_limit(): 1}):
            act()

    log, told, shape = logging.getLogger("torch._dynamo"), logging.handlers.BufferingHandler(99), (X, X.double())
    log.setLevel(logging.NOTSET)  # as a user has it
    log.addHandler(told)
    try:
        for act in (
            lambda: judge((lambda x: x + 1, [(x,) for x in shape])),
            lambda: judge_accuracy(Plan.of((lambda x: x + 1, [(x,) for x in shape])), options=CompileOptions("eager")),
        ):
            too_often(act)
        assert [record.getMessage() for record in told.buffer] == []
        assert log.level == logging.NOTSET
        with observe_graphs(raises=False):
            too_often(lambda: [torch.compile(double, backend="eager")(x) for x in shape])
        assert recompile_limit().removeprefix("torch._dynamo.") in str([r.getMessage() for r in told.buffer])
    finally:
        log.removeHandler(told)
        torch.compiler.reset()


def test_cuda_graphs_are_skipped_with_the_reason_where_there_is_no_device() -> None:
    run = judge((double, [(X,)]), backend="inductor", mode="reduce-overhead")
    (found,) = [f for f in run.findings if f.check == "cudagraph"]
    assert found.verdict is Verdict.SKIP
    assert "need a CUDA device" in found.message


def test_autocast_is_entered_around_each_call() -> None:
    seen = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return x @ x

    measure_graph(Subject((noting, [(X,)])), options=EAGER, dtype=torch.bfloat16)
    assert seen
    assert all(seen)


def test_a_training_loop_is_judged_after_its_first_steps() -> None:
    model, step = Net(), torch.compile(double, backend="eager")
    run = judge_compiled({"step": lambda i: float(step(model(X)).sum())})
    assert failures(run) == []
    assert run.coverage.seen["calls"] == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CompileOptions(mode="fast"), "default, reduce-overhead, max-autotune"),
        (lambda: CompileOptions("nope"), "inductor"),
        (lambda: CompileOptions(dynamic="yes"), "True or False"),
        (lambda: CompileOptions(mode="default", options={"x": 1}), "not both"),
        (lambda: GraphLimits(max_breaks=-1), "0 or more"),
        (lambda: GraphLimits(max_recompiles=True), "0 or more"),
        (lambda: GraphLimits(warmup=0), "1 or more"),
        (lambda: assert_graphs(double, [(X,)], dtype="float17"), "float16"),
        (lambda: assert_graphs(double, [(X,)], device="nope"), "device"),
        (lambda: assert_graphs(double, [(X,)], dtype="float64"), "float16, bfloat16, float32; found float64"),
        (lambda: assert_graphs(double, [(X,)], dtype="float8_e4m3fn"), "float16, bfloat16"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_ones(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_subject_brings_its_own_calls_and_name() -> None:
    subject = Subject((double, [(X,)]), name="mine")
    assert assert_graphs(subject).findings[0].subject == "mine"
    for settings in ({"calls": [(X,)]}, {"name": "other"}):
        with pytest.raises(UsageError):
            assert_graphs(subject, **settings)  # type: ignore[arg-type]


def test_warnings_of_the_model_are_not_raised_as_errors() -> None:
    def warning(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("planted", stacklevel=1)
        return x + 1

    assert failures(judge((warning, [(X,)]), max_breaks=1)) == []


# Why nothing was compiled ----------------------------------------------------------------------------------------


def test_a_stance_that_is_left_on_is_named() -> None:
    with torch.compiler.set_stance("force_eager"):
        found = only(judge((double, [(X,)])), "eager-fallback")
    assert "torch.compiler.set_stance('force_eager') is on" in found.message
    assert "set_stance('default')" in found.hint


class _Stack(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        if in_place:
            self.layer.compile(backend="eager")
        else:
            self.layer = torch.compile(self.layer, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.until_torch("2.14", "compile() of a module of PyTorch's own compiles nothing")
def test_a_layer_of_torchs_own_that_is_compiled_in_place_is_named_with_the_way_that_compiles_it() -> None:
    found = only(judge_compiled((_Stack(in_place=True), [(X,)])), "eager-fallback")
    assert "compile() of a module of PyTorch's own compiles nothing" in found.message
    assert found.where.module == "layer"
    assert "torch.compile(layer)" in found.hint
    assert failures(judge_compiled((_Stack(in_place=False), [(X,)]))) == []


def test_a_list_that_grows_is_named_by_its_length() -> None:
    def joined(x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([*past, x]).sum(0)

    found = only(judge((joined, [(X, [X] * n) for n in range(1, 6)])), "recompile")
    assert "the length of a list" in found.message
    assert "identity" not in found.message
    assert "into one tensor" in found.hint
