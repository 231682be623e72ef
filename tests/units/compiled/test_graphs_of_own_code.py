"""An audit of a training loop or a callable that compiles judges its graphs as it runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ampcheck.audit import audit
from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject

BACKEND = "aot_eager"

GRAPHS = ["graph-break", "recompile", "eager-fallback", "compiled-exception", "cudagraph"]
GRAPHS += ["compiled-error", "compiled-gradient", "compiled-dtype"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """Two layers, with methods besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sigmoid()


def loop(
    net: nn.Module,
    call: Callable[..., torch.Tensor],
    *,
    batches: Callable[[int], int] = lambda i: 32,
    after: Callable[[int], None] = lambda i: None,
    **parts: Any,
) -> dict[str, Any]:
    """A training loop over a regression, which calls the model by `call`."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True).tanh()

    def step(i: int) -> float:
        rows = batches(i)
        loss = (call(x[:rows]) - y[:rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(i)
        return loss.item()

    return {"model": net, "optimizer": optimizer, "step": step, **parts}


def graphs(run: Run, verdict: Verdict = Verdict.FAIL) -> list[Finding]:
    """The findings about graphs with a verdict."""
    return [f for f in run.of(verdict) if f.check in GRAPHS]


def source_line(finding: Finding) -> str:
    return Path(__file__).read_text(encoding="utf-8").splitlines()[(finding.where.line or 1) - 1]


def checks(run: Run, verdict: Verdict = Verdict.FAIL) -> list[str]:
    return [f.check for f in graphs(run, verdict)]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


# Healthy ---------------------------------------------------------------------------------------------------------


def plain() -> dict[str, Any]:
    model = net()
    return loop(model, torch.compile(model, backend=BACKEND))


def in_place() -> dict[str, Any]:
    model = net()
    model.compile(backend=BACKEND)
    return loop(model, model)


def evaluates() -> dict[str, Any]:
    """Evaluates every tenth step, without gradients, and ends each epoch with a smaller batch."""
    model = net()
    compiled = torch.compile(model, backend=BACKEND)
    held_out = torch.randn(20, 8)

    def evaluate(i: int) -> None:
        if i % 10 == 9:
            model.eval()
            with torch.no_grad():
                compiled(held_out)
            model.train()

    return loop(model, compiled, batches=lambda i: 32 if i % 7 != 6 else 5, after=evaluate)


def any_length() -> dict[str, Any]:
    model = net()
    return loop(model, torch.compile(model, backend=BACKEND), batches=lambda i: 2 + (i * 7) % 30)


def counts_steps() -> dict[str, Any]:
    """The number of the step is an argument: 0 and 1 are compiled as constants, the others not."""
    model = net()
    scaled = torch.compile(lambda x, i: model(x) * (1 + i * 0.0), backend=BACKEND)
    numbers: list[int] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        numbers.append(0)
        return scaled(x, len(numbers))

    return loop(model, call)


def regional() -> dict[str, Any]:
    """Blocks of several widths, each compiled, share their code."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width * 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(8 * 2**i) for i in range(4)), nn.Linear(128, 1))
    for block in model[:4]:
        block.compile(backend=BACKEND)
    return loop(model, model)


def compiled_optimizer() -> dict[str, Any]:
    model = net()
    training = loop(model, torch.compile(model, backend=BACKEND))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    x = torch.randn(32, 8)

    @torch.compile(backend=BACKEND)
    def update() -> None:
        optimizer.step()

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        update()
        return loss.item()

    return {**training, "optimizer": optimizer, "step": step}


def scaled() -> dict[str, Any]:
    model = net()
    compiled = torch.compile(model, backend=BACKEND)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    x = torch.randn(32, 8)

    def step(i: int) -> float:
        with torch.autocast("cpu", torch.float16):
            loss = compiled(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


HEALTHY = [plain, in_place, evaluates, any_length, counts_steps, regional, compiled_optimizer, scaled]


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_a_loop_that_stays_in_its_graphs_passes_with_the_graphs_as_evidence(make: Callable[[], Any]) -> None:
    run = audit(make(), checks=[*GRAPHS, "coverage"])
    assert graphs(run) == []
    assert graphs(run, Verdict.WARN) == []
    assert {"graph-break", "recompile", "eager-fallback"} <= set(checks(run, Verdict.PASS))
    assert run.coverage.seen["graphs"] >= 1
    assert run.coverage.seen["compiled runs"] >= 1


def test_a_loop_without_compiled_code_has_no_findings_about_graphs() -> None:
    model = net()
    run = audit(loop(model, model))
    assert not {f.check for f in run.findings} & set(GRAPHS)
    assert "graphs" not in run.coverage.seen


def test_compile_false_leaves_graphs_out() -> None:
    run = audit(broken(), compile=False)
    assert not {f.check for f in run.findings} & set(GRAPHS)
    skipped = audit(broken(), compile=False, checks=["graph-break", "overflow"])
    assert [f.message for f in skipped.findings if f.check == "graph-break"] == [
        "selected and not judged: compile=False leaves compiled runs out"
    ]


def test_everything_is_restored_after_the_run_with_compiled_code() -> None:
    training = plain()
    before = copy.deepcopy(training["model"].state_dict())
    audit(training, checks=["graph-break"])
    for name, value in training["model"].state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_loop_over_an_iterator_that_ends_is_not_judged_a_second_time() -> None:
    model = net()
    compiled, rest = torch.compile(model, backend=BACKEND), iter(range(24))

    def after(i: int) -> None:
        next(rest)

    run = audit(loop(model, compiled, after=after), checks=["graph-break"])
    assert graphs(run) == []
    assert "second run in eager mode raised" in next(f.message for f in run.of(Verdict.SKIP) if f.check == "coverage")


def test_data_are_read_once() -> None:
    model = net()
    compiled = torch.compile(model, backend=BACKEND)
    training = loop(model, compiled)
    drawn: list[int] = []

    def data() -> Iterator[int]:
        for number in range(30):
            drawn.append(number)
            yield number

    run = audit({**training, "data": data()}, checks=["graph-break"])
    assert checks(run, Verdict.PASS) == ["graph-break"]
    assert drawn == list(range(24))


def test_code_that_is_compiled_and_called_in_steps_that_did_not_run_is_at_most_a_warning() -> None:
    model = net()
    compiled = torch.compile(model, backend=BACKEND)

    def after(i: int) -> None:
        if i == 1000:
            compiled(torch.ones(2, 8))

    run = audit(loop(model, model, after=after))
    assert graphs(run) == []
    assert checks(run, Verdict.WARN) == ["eager-fallback"]


# Planted ---------------------------------------------------------------------------------------------------------


def broken() -> dict[str, Any]:
    """Backward runs inside of the compiled function."""
    model = net()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.05), torch.randn(32, 8)

    @torch.compile(backend=BACKEND)
    def whole(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = whole(x)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}


def without_wrapper() -> dict[str, Any]:
    model = net()
    model.compile(backend=BACKEND)
    return loop(model, model.forward)


def another_method() -> dict[str, Any]:
    model = net()
    compiled = torch.compile(model, backend=BACKEND)
    return loop(model, compiled.predict) | {"model": compiled}


def of_torchs_own() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model.compile(backend=BACKEND)
    return loop(model, model)


def number_of_the_step() -> dict[str, Any]:
    """An attribute that changes with each step is compiled as a constant."""
    model = net()
    model.scale = 0
    compiled = torch.compile(model, backend=BACKEND)

    class Scaled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model.__class__ = Scaled

    def after(i: int) -> None:
        model.scale = i + 1

    return loop(model, compiled, after=after)


def one_more_layer_each_step() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)), nn.Linear(8, 1))
    model[:-1].requires_grad_(False)

    def after(i: int) -> None:
        model[max(9 - i, 0)].requires_grad_(True)

    return loop(model, torch.compile(model, backend=BACKEND), after=after)


PLANTED = {
    broken: "graph-break",
    without_wrapper: "eager-fallback",
    another_method: "eager-fallback",
    of_torchs_own: "eager-fallback",
    number_of_the_step: "recompile",
    one_more_layer_each_step: "eager-fallback",
}


LEFT_EAGER = pytest.mark.until_torch("2.14", "compile() of a module of PyTorch's own compiles nothing")


@pytest.mark.parametrize(
    ("make", "check"),
    [pytest.param(*case, marks=[LEFT_EAGER] if case[0] is of_torchs_own else []) for case in PLANTED.items()],
    ids=lambda value: getattr(value, "__name__", value),
)
@torch._dynamo.config.patch(specialize_int=True)  # as releases after 2.6 do for integer attributes of modules
def test_a_loop_whose_code_does_not_run_compiled_fails(make: Callable[[], Any], check: str) -> None:
    run = audit(make(), checks=[*GRAPHS, "coverage"])
    if make is one_more_layer_each_step and not guards_what_requires_gradients():
        assert any("give no gradient to 20 weights" in finding.message for finding in graphs(run))
        return
    assert check in checks(run)


def guards_what_requires_gradients() -> bool:
    """Whether this PyTorch compiles again where a weight requires a gradient that it did not before; 2.9 does not."""
    compiled, model = [], nn.Linear(2, 2).requires_grad_(False)
    function = torch.compile(model, backend=lambda graph, examples: compiled.append(graph) or graph.forward)
    for requires in (False, True):
        model.requires_grad_(requires)
        function(torch.ones(1, 2))
    return len(compiled) == 2


def test_a_layer_that_is_trained_after_it_was_compiled_passes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    compiled = torch.compile(model, backend=BACKEND)

    def after(i: int) -> None:
        if not i:
            model[0].requires_grad_(True)
            torch.compiler.reset()

    assert not graphs(audit(loop(model, compiled, after=after)))


def test_a_break_that_the_users_code_asks_for_counts_and_that_of_optimizers_does_not() -> None:
    def step(ask: bool) -> None:
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1))

        @torch.compile(backend=BACKEND)
        def update() -> None:
            if ask:
                torch._dynamo.graph_break()
            optimizer.step()

        update()

    assert [f.check for f in judge_graph(Subject(lambda: step(True))).of(Verdict.FAIL)] == ["graph-break"]
    run = judge_graph(Subject(lambda: step(False)))
    assert not run.failed
    assert run.coverage.seen["graphs"] >= 1


def test_the_line_that_passes_the_compiled_module_by_is_named() -> None:
    (found,) = graphs(audit(without_wrapper()))
    assert found.where.file.endswith("test_graphs_of_own_code.py")
    assert "model.forward(x) is not compiled" in found.hint
    (found,) = graphs(audit(another_method()))
    assert found.where.line == Net.predict.__code__.co_firstlineno + 1
    assert "model.compile()" in found.hint


def test_weights_that_only_compiled_code_makes_nan_fail() -> None:
    def wrong(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *args: tuple(value * math.nan for value in graph(*args))

    def compiled(backend: Any) -> dict[str, Any]:
        model = net()
        return loop(model, torch.compile(model, backend=backend))

    assert graphs(audit(compiled(BACKEND))) == []
    failures = graphs(audit(compiled(wrong)))
    assert {f.check for f in failures} == {"compiled-error", "compiled-gradient"}
    assert "first.weight" in failures[0].message


def test_weights_that_eager_mode_makes_nan_too_are_no_matter_of_compilation() -> None:
    model = net()
    compiled = torch.compile(lambda x: model(x) * math.inf, backend=BACKEND)
    assert graphs(audit(loop(model, compiled))) == []


def test_numbers_of_a_compiled_function_that_differ_from_eager_mode_fail() -> None:
    """As a weight that is swapped for its backup inside of a compiled function, and keeps the new value."""

    def doubled(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *args: tuple(value * 2 for value in graph(*args))

    def smoothed(backend: Any) -> dict[str, Any]:
        model = net()
        average = torch.zeros_like(model.first.weight)

        @torch.compile(backend=backend)
        def update(weight: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
            return average * 0.9 + weight * 0.1

        def after(i: int) -> None:
            average.copy_(update(model.first.weight.detach(), average))

        return loop(model, model, after=after)

    sound = audit(smoothed("eager"))
    assert graphs(sound) == []
    assert "compiled-error" in checks(sound, Verdict.PASS)
    failures = graphs(audit(smoothed(doubled)))
    assert [f.check for f in failures] == ["compiled-error", "compiled-gradient"]
    assert all(f.subject.startswith("subject, update") for f in failures)


def test_a_function_that_steps_an_optimizer_is_not_called_on_a_copy() -> None:
    training = compiled_optimizer()
    before = copy.deepcopy(training["model"].state_dict())
    run = audit(training)
    assert graphs(run) == []
    assert not [f for f in run.findings if f.check == "compiled-error"]
    assert all(torch.equal(value, before[name]) for name, value in training["model"].state_dict().items())


def test_an_exception_of_compiled_code_alone_fails() -> None:
    def refuses(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        raise ValueError("planted")

    model = net()
    assert checks(audit(loop(model, torch.compile(model, backend=refuses)))) == ["compiled-exception"]


# Callables -------------------------------------------------------------------------------------------------------


def test_a_callable_that_compiles_is_judged_as_it_runs() -> None:
    def decode(grow: bool) -> torch.Tensor:
        model = torch.compile(nn.Embedding(8, 8), backend=BACKEND, dynamic=False)
        ids = torch.zeros(1, 2 if grow else 16, dtype=torch.long)
        for _ in range(12):
            out = model(ids)
            if grow:
                ids = torch.cat((ids, ids[:, :1]), 1)
        return out.sum()

    assert checks(audit(lambda: decode(True))) == ["eager-fallback"]
    run = audit(lambda: decode(False))
    assert graphs(run) == []
    assert "graph-break" in checks(run, Verdict.PASS)


@pytest.mark.parametrize("how", ["hook", "attribute", "before", "assigned"])
def test_graphs_that_do_not_see_that_the_model_changed_fail(how: str) -> None:
    def change(model: Net) -> None:
        if how == "attribute":
            object.__setattr__(model, "first", nn.Sequential(model.first, nn.Linear(16, 16)))
        elif how == "assigned":
            model.first = nn.Sequential(model.first, nn.Linear(16, 16))
        else:
            model.second.register_forward_hook(lambda module, args, out: out.clamp(-0.01, 0.01))

    def adapt() -> torch.Tensor:
        model, x = net(), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        compiled = torch.compile(model, backend=BACKEND)
        if how == "before":
            change(model)
        compiled(x)
        if how != "before":
            change(model)
        return compiled(x).sum()

    failures = graphs(audit(adapt))
    assert [f.check for f in failures] == (["compiled-error"] if how in ("hook", "attribute") else [])
    assert all("changed after it was compiled" in f.message for f in failures)


class UnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.context = nn.Linear(8, 8), torch.autocast("cpu", torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context:
            return self.layer(x).float()


@pytest.mark.parametrize("how", ["dtype", "attribute", "another", "unchanged"])
def test_graphs_that_keep_the_dtype_of_an_autocast_object_that_was_changed_fail(how: str) -> None:
    context = torch.autocast("cpu", torch.bfloat16)
    model, x = UnderAutocast(), torch.randn(16, 8, generator=torch.Generator().manual_seed(0))

    def product(x: torch.Tensor) -> torch.Tensor:
        with context:
            return x @ x.T

    def evaluate() -> None:
        compiled = torch.compile(model if how == "attribute" else product, backend="aot_eager")
        compiled(x)
        if how == "dtype":
            context.fast_dtype = torch.float16
        if how == "attribute":
            model.context._enabled = False
        if how == "another":
            with torch.autocast("cpu", torch.float16):
                compiled(x)
        compiled(x)

    failures = graphs(audit(evaluate))
    assert [f.check for f in failures] == (["compiled-error"] if how in ("dtype", "attribute") else [])


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def rounded(self: Scaled, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, (self.weight * 8).round() / 8, self.bias)


@pytest.mark.parametrize("how", ["called", "called again", "not called", "compiled in it", "reset in it"])
def test_a_call_by_graphs_from_before_a_patch_fails_though_the_patch_is_gone_by_the_end(how: str) -> None:
    def evaluate() -> None:
        torch.manual_seed(0)
        model, x = nn.Sequential(Scaled(8, 4)), torch.ones(2, 8)
        compiled = torch.compile(model, backend="eager")
        if how != "compiled in it":
            compiled(x)
        with mock.patch.object(Scaled, "forward", rounded):
            if how == "reset in it":
                torch.compiler.reset()
            if how != "not called":
                compiled(x)
        if how == "called again":
            compiled(x)

    failures = graphs(audit(evaluate))
    assert [f.check for f in failures] == ["compiled-error"] * how.startswith("called")
    assert all("changed after it was compiled" in f.message for f in failures)


@pytest.mark.parametrize("how", ["copied", "equal", "in place", "own", "part", "not called"])
def test_a_copy_that_runs_the_compiled_forward_of_its_original_fails(how: str) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.forward = inner.forward

    def average() -> torch.Tensor:
        model = net()
        if how == "in place":
            model.compile(backend="eager")
        else:
            model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
        copied = Outer(model) if how == "part" else copy.deepcopy(model)
        if how == "own":
            copied.forward = torch.compile(Net.forward.__get__(copied), backend="eager")
        if how not in ("equal", "part"):
            with torch.no_grad():
                for weight in copied.parameters():
                    weight *= 0.5
        return model(torch.ones(2, 8)).sum() if how == "not called" else copied(torch.ones(2, 8)).sum()

    failures = graphs(audit(average))
    assert [f.check for f in failures] == ["compiled-error"] * (how == "copied")
    assert all("runs those of another Net" in f.message for f in failures)


def test_hooks_of_a_module_of_which_only_forward_is_compiled_are_called_in_any_case() -> None:
    def evaluate() -> torch.Tensor:
        model = net()
        model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
        model(torch.ones(2, 8))
        model.register_forward_hook(lambda module, args, out: out * 2)
        return model(torch.ones(2, 8)).sum()

    assert not audit(evaluate).failed


@pytest.mark.parametrize("late", [True, False])
def test_what_an_added_hook_keeps_is_the_users_and_a_hook_that_nothing_calls_is_no_defect(late: bool) -> None:
    def evaluate() -> int:
        model, seen = net(), list[torch.Tensor]()
        compiled = torch.compile(model, backend="eager")
        compiled(torch.ones(2, 8))
        if late:
            model.register_forward_hook(lambda module, args, out: out * 2)
            return 0
        model.register_forward_hook(lambda module, args, out: seen.append(out))
        compiled(torch.ones(2, 8))
        assert len(seen) <= 1
        return len(seen)

    assert not audit(evaluate).failed


@pytest.mark.parametrize("called", [True, False])
def test_graphs_that_drop_elements_where_eager_mode_no_longer_does_fail_if_called(called: bool) -> None:
    def evaluate() -> torch.Tensor:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.ones(2, 8)
        unsafe = {"guard_filter_fn": lambda guards: [False for _ in guards]}
        compiled = torch.compile(model, backend="eager", options=unsafe)
        compiled(x)
        model.eval()
        return (compiled if called else model)(x).sum()

    failures = graphs(audit(evaluate))
    assert [f.check for f in failures] == ["compiled-error"] * called
    assert all("draw random numbers where eager mode draws none" in f.message for f in failures)


def test_a_lazy_module_that_never_ran_leaves_the_rest_of_the_audit() -> None:
    lazy, compiled = nn.LazyLinear(4), torch.compile(net(), backend=BACKEND)

    def call() -> torch.Tensor:
        return compiled(torch.ones(2, 8)) if lazy is not None else torch.ones(1)

    run = audit(call)
    assert not run.failed
    assert "a lazy module" in next(f.message for f in run.of(Verdict.SKIP) if f.check == "coverage")


def test_one_recompilation_after_the_model_was_changed_is_intended() -> None:
    def adapt() -> torch.Tensor:
        model = net()
        compiled = torch.compile(model, backend=BACKEND)
        compiled(torch.ones(4, 8))
        model.first = nn.Sequential(nn.Linear(8, 8), model.first)
        return compiled(torch.ones(4, 8)).sum()

    assert graphs(audit(adapt)) == []


def test_a_method_of_the_original_module_is_found_in_a_callable() -> None:
    def predict(in_place: bool) -> torch.Tensor:
        model = net()
        if in_place:
            model.compile(backend=BACKEND)
        else:
            model = torch.compile(model, backend=BACKEND)
        return model.predict(torch.ones(4, 8))

    assert checks(audit(lambda: predict(False))) == ["eager-fallback"]
    assert graphs(audit(lambda: predict(True))) == []


def test_a_callable_that_cannot_be_called_twice_is_not_judged_a_second_time() -> None:
    calls: list[torch.Tensor] = []
    numbers = iter([1])

    def once() -> torch.Tensor:
        calls.append(torch.compile(net(), backend=BACKEND)(torch.ones(4, 8) * next(numbers)))
        return calls[-1].sum()

    run = audit(once)
    assert not run.failed
    assert "second run in eager mode raised" in next(f.message for f in run.of(Verdict.SKIP) if f.check == "coverage")
    assert len(calls) == 1


def test_a_callable_that_trains_is_ended_after_the_observed_steps_again() -> None:
    taken: list[int] = []

    def train() -> None:
        training = plain()
        for number in range(1000):
            taken.append(number)
            training["step"](number)

    run = audit(train, steps=4)
    assert checks(run, Verdict.PASS)
    assert graphs(run) == []
    assert len(taken) < 12


def test_compiled_code_that_is_not_compared_is_counted() -> None:
    functions = [eval(f"lambda x: x * {n}") for n in range(2, 8)]

    def call() -> None:
        for function in functions:
            torch.compile(function, backend="aot_eager")(torch.ones(4))

    run = audit(call)
    assert run.coverage.unseen["compiled code beyond the first 4 callables"] == 2


def updating(body: Callable[[torch.optim.Optimizer, Any], Callable[[], object]]) -> dict[str, Any]:
    """A loop whose update is compiled, beside a scheduler that wraps the step of its optimizer."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.001))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    update = torch.compile(body(optimizer, scheduler), backend=BACKEND)
    x, y = torch.randn(32, 8), torch.randn(32, 1)

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        update()
        return loss.item()

    return {"model": net, "optimizer": optimizer, "scheduler": scheduler, "step": step}


def both(optimizer: torch.optim.Optimizer, scheduler: Any) -> Callable[[], object]:
    def update() -> None:
        optimizer.step()
        scheduler.step()

    return update


def alone(optimizer: torch.optim.Optimizer, scheduler: Any) -> Callable[[], object]:
    return lambda: optimizer.step()


def deciding(optimizer: torch.optim.Optimizer, scheduler: Any) -> Callable[[], object]:
    def update() -> None:
        if optimizer.param_groups[0]["params"][0].norm() > 0:  # it depends on values
            optimizer.step()

    return update


@pytest.mark.parametrize("body", [alone, both])
def test_an_optimizer_that_steps_beside_a_scheduler_breaks_no_graph_of_the_user(body):
    run = audit(updating(body), checks=GRAPHS)
    assert checks(run) == []
    assert run.coverage.seen["graphs"] >= 1


def test_a_break_beside_a_scheduler_is_found():
    run = audit(updating(deciding), checks=GRAPHS)
    (found,) = [f for f in graphs(run) if f.check == "graph-break"]
    assert "depends on values" in source_line(found)
