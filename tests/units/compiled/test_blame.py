"""What is blamed for a failure: the stage, the op, the modules to keep in float32, and the code that does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ampcheck import Finding, Run, Subject, UsageError, Verdict, audit, blame
from ampcheck.causes.bisect import BisectBackend, first_failing_node
from ampcheck.causes.blame import cost_of
from ampcheck.causes.minimise import Minimised
from ampcheck.causes.tables import is_code, tables
from ampcheck.checks import findings
from ampcheck.compiled.options import BlameOptions
from ampcheck.core.limits import Limits
from ampcheck.core.subject import as_subject
from ampcheck.records.accuracy import EAGER
from ampcheck.records.blame import BlameStats, StageResult

UNTIMED = BlameOptions(time=False)


def quick(subject: Any, **options: Any) -> Run:
    """Blame without the compiler and without the timing."""
    runs, time = options.pop("runs", 60), options.pop("time", False)
    search = BlameOptions(runs=runs, time=time)
    return blame(subject, **{"compile": False, "search": search, "dtype": "float16", **options})


def only(run: Run) -> Finding:
    (finding,) = (f for f in run.findings if f.check == "blame")
    return finding


def rows(run: Run, title: str) -> Sequence[Sequence[Any]]:
    return next(table.rows for table in run.tables if table.title.startswith(title))


def pasted(run: Run) -> Callable[[nn.Module], nn.Module]:
    """What the printed code defines."""
    code = "\n".join(str(row[0]) for table in run.tables if is_code(table) for row in table.rows)
    space: dict[str, Any] = {}
    exec(code, space)
    made: Callable[[nn.Module], nn.Module] = space["keep_in_float32"]
    return made


def failures(run: Run) -> list[str]:
    return [f.check for f in run.of(Verdict.FAIL)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        nn.init.eye_(self.up.weight)
        nn.init.constant_(self.down.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Three blocks; what is summed in the projection of the hot one is too large for float16, its weights are not."""

    def __init__(self, hot: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(16)
        if hot is not None:
            self.blocks[hot].down = nn.Linear(16, 16, bias=False)
            with torch.no_grad():
                self.blocks[hot].down.weight.mul_(200000.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def stack(hot: int | None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Stack(hot), (torch.randn(2, 16, generator=torch.Generator().manual_seed(1)),)


# Eager low precision -----------------------------------------------------------------------------------------------


def test_a_projection_that_overflows_is_named_with_its_op_and_line_and_subject_in_float32() -> None:
    model, args = stack(hot=1)
    run = quick((model, args))
    found = only(run)
    assert found.verdict is Verdict.FAIL
    assert (found.where.module, found.where.op, found.where.phase) == ("blocks.1.down", "aten::mm", "forward")
    assert found.where.file.endswith("test_blame.py")
    assert "eager low precision" in found.message
    assert "return x + self.down(F.relu(self.up(self.norm(x))))" in found.message
    assert rows(run, "Kept in float32") == [("blocks.1.down",)]
    assert rows(run, "First ops at fault")[0][0] == "mm"


def test_the_printed_code_makes_the_model_pass() -> None:
    model, args = stack(hot=1)
    assert "overflow" in failures(audit((model, args), dtype="float16", compile=False))
    kept = pasted(quick((model, args)))(model)
    assert failures(audit((kept, args), dtype="float16", compile=False)) == []


def test_the_printed_code_makes_a_16_bit_model_pass_and_keeps_what_carries_the_values_on() -> None:
    """The sum that overflows float16 goes on in float32 to the norm, which must stand it."""
    model, (x,) = stack(hot=2)
    model.half()
    run = blame((model, (x.half(),)), compile=False, search=UNTIMED)
    assert only(run).where.module == "blocks.2.down"
    assert rows(run, "Kept in float32") == [("blocks.2.down",), ("norm",)]
    kept = pasted(run)(model)
    assert failures(audit((kept, (x.half(),)), compile=False)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, which is used then")
def test_a_machine_without_cuda_blames_what_overflows_on_cuda_and_tells_no_step_time() -> None:
    model, args = stack(hot=2)
    run = quick((model, args), device="cuda", time=True)
    assert only(run).where.module == "blocks.2.down"
    assert "cuda emulated" in only(run).subject
    assert any("is emulated, and its time cannot be measured" in table.note for table in run.tables)
    kept = pasted(run)(model)
    assert failures(audit((kept, args), device="cuda", dtype="float16", compile=False)) == []


def test_a_backward_op_that_overflows_is_named_in_backward() -> None:
    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2**-8 * 2**-8 * 2**8 * 2**8

    model = nn.Sequential(nn.Linear(8, 8), Steep())
    nn.init.constant_(model[0].weight, 1.0)
    subject = Subject((model, (torch.ones(2, 8),)), loss=lambda out: 4 * out.float().sum())
    found = only(quick(subject))
    assert found.verdict is Verdict.FAIL
    assert (found.where.phase, found.where.module, found.where.op) == ("backward", "1", "aten::mul.Tensor")


def test_a_model_that_passes_has_nothing_to_blame_and_the_verdict_says_what_ran() -> None:
    run = quick(stack(None), dtype=("float16", "bfloat16"))
    assert failures(run) == []
    assert [f.verdict for f in run.findings] == [Verdict.PASS, Verdict.PASS]
    assert all("nothing to blame: eager within" in f.message for f in run.findings)
    assert run.coverage.seen["eager runs"] == 2
    assert not any(is_code(table) for table in run.tables)


def test_where_no_set_of_modules_mends_it_the_verdict_says_so_and_names_the_op() -> None:
    def gram(out: Tensor) -> Tensor:
        return (out @ out.T).float().mean().sqrt()  # autocast computes it in float16 whatever out is

    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 50.0)
    found = only(quick(Subject((model, (torch.ones(2, 4),)), loss=gram)))
    assert found.verdict is Verdict.FAIL
    assert (
        "with no set of modules kept in float32 it passes; with everything in float32 overflow fails still"
        in found.message
    )
    assert (found.where.op, found.where.module) == ("aten::mm", "")
    assert "(`return (out @ out.T).float().mean().sqrt()" in found.message
    assert "compute this op in float32 where it stands" in found.hint


def test_a_function_without_modules_is_blamed_by_its_op() -> None:
    def square(x: Tensor) -> Tensor:
        return (x * x).sqrt()

    run = blame((square, [(torch.full((4,), 300.0, dtype=torch.float16),)]), compile=False, search=UNTIMED)
    assert only(run).where.op == "aten::mul.Tensor"
    assert "a function without modules" in only(run).message


def test_an_exception_of_low_precision_is_blamed_on_the_op_that_raised() -> None:
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x > 0, -1e9)

    model = nn.Sequential(nn.Linear(4, 4), Mask())
    run = quick((model, (torch.ones(2, 4),)))
    assert (only(run).where.op, only(run).where.module) == ("aten::masked_fill.Scalar", "1")
    assert rows(run, "Kept in float32") in ([("0",)], [("1",)])


def test_a_graph_that_must_be_whole_and_is_not_is_no_matter_of_precision() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return y * 2 if y.sum() > 0 else y

    compiled = torch.compile(Branch(), fullgraph=True, backend="aot_eager")
    run = blame((compiled, [(torch.ones(2, 4),)]), dtype="bfloat16", search=UNTIMED)
    message = only(run).message
    assert "raised" in message
    assert "eager mode does not" in message
    assert "computes something else" not in message
    assert "no modules to keep in float32 were searched" in message
    assert not any(table.title.startswith("Kept in float32") for table in run.tables)


def test_the_budget_of_runs_is_kept_and_told() -> None:
    model, args = stack(None)
    with torch.no_grad():
        for block in model.blocks:
            block.down.weight.mul_(200000)
    run = quick((model, args), runs=2)
    assert run.coverage.seen["sets of modules tried"] <= 2


@pytest.mark.parametrize(
    ("subject", "options", "said"),
    [
        ({"step": lambda i: 0.0}, {}, r"takes \(module, args\), .*\[args\]\); subject is a training subject"),
        (lambda: None, {}, "a call subject"),
        ((nn.Linear(2, 2), (torch.ones(1, 2),)), {"dtype": "float8_e4m3fn"}, "float16, bfloat16, float32"),
    ],
)
def test_what_cannot_be_blamed_is_refused_in_one_sentence(subject: Any, options: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        blame(subject, **options)


@pytest.mark.parametrize("option", [{"runs": 0}, {"steps": True}])
def test_options_of_the_search_are_positive_whole_numbers(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be a whole number, 1 or more"):
        BlameOptions(**option)


class HugeWeights(nn.Module):
    """Its projection overflows as soon as its weights are float16, in forward and in a backward under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        with torch.no_grad():
            self.down.weight.mul_(1e6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.down(F.gelu(self.up(self.norm(x))))))


def test_a_set_that_mends_eager_mode_alone_is_said_to_and_the_setting_for_the_compiler_is_named() -> None:
    run = blame((HugeWeights(), (torch.randn(8, 16),)), dtype="float16", search=UNTIMED)
    found, setting = only(run), 'torch._functorch.config.backward_pass_autocast = "off"'
    assert "set of modules in float32 with which eager mode passes is down." in found.message
    assert "Compiled it still fails with them in float32" in found.message
    assert f"under torch.compile also set {setting}" in found.hint
    code = [str(row[0]) for table in run.tables if is_code(table) for row in table.rows]
    assert f"# {setting}" in code
    assert pasted(run)


FAILED = (StageResult(EAGER, 1.0, 1.0, True, "beyond"),)
MENDED = BlameStats("m", stages=FAILED, minimised=Minimised(("a",), 1, True), code="import torch")


@pytest.mark.parametrize("ratios", [(0.9, 1.1) * 10 + (1.0,), (1.2, 1.3) * 10 + (1.25,)])
def test_the_step_time_is_told_once_and_in_the_verdict_only_where_it_is_decided(ratios: tuple[float, ...]) -> None:
    stats = replace(MENDED, cost=cost_of(0.01, ratios, "eager step"))
    (found,) = findings(stats, Limits())
    note = next(table.note for table in tables(stats) if table.title.startswith("Kept"))
    assert stats.cost is not None
    assert (str(stats.cost) in found.message) == stats.cost.decided
    assert (str(stats.cost) in note) != stats.cost.decided


# The graphs --------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Twelve nodes in three modules."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(number == 1 and broken) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
            if part.graph_break:
                torch._dynamo.graph_break()
        return x


class Part(nn.Module):
    graph_break = False

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.scale).sin() + 1
        return y.tanh() if self.odd else y.cos()


def wrong_tanh(graph: fx.GraphModule, examples: Any) -> Callable[..., Any]:
    """A compiler with one defect: it takes sigmoid for tanh."""
    for node in graph.graph.nodes:
        if node.target == "tanh":
            node.target = "sigmoid"
    graph.recompile()
    return graph.forward


@pytest.mark.parametrize("breaks", [False, True])
def test_the_node_that_a_compiler_gets_wrong_is_found_across_all_graphs(breaks: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(Part, "graph_break", breaks)
    model, x = Chain(broken=True), torch.linspace(-1, 1, 5)
    wanted = model(x)
    runs = 0

    def fails(backend: Any) -> bool:
        nonlocal runs
        runs += 1
        torch.compiler.reset()
        with torch.no_grad():
            return not torch.allclose(torch.compile(model, backend=backend)(x), wanted)

    found = first_failing_node(fails, wrong_tanh, {id(m): name for name, m in model.named_modules()})
    torch.compiler.reset()
    assert found.node is not None
    assert (found.node.where.op, found.node.where.module) == ("Tensor.tanh", "parts.1")
    assert found.node.code == "return y.tanh() if self.odd else y.cos()"
    assert found.nodes == (8 if breaks else 12)  # equal modules share one graph
    assert found.runs == runs <= 7


def test_a_failure_that_does_not_come_back_blames_no_node() -> None:
    found = first_failing_node(lambda backend: False, wrong_tanh, {})
    assert (found.node, found.runs) == (None, 1)


def test_a_failure_that_comes_with_nothing_compiled_blames_no_node() -> None:
    found = first_failing_node(lambda backend: True, wrong_tanh, {})
    assert (found.node, found.runs) == (None, 2)


@pytest.mark.needs_torch("2.10", "AOTAutograd takes a part of a graph; before, the result counts it as whole")
def test_gradients_flow_through_a_cut_graph() -> None:
    model, x = Chain(broken=False), torch.linspace(-1, 1, 5)
    model(x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    from ampcheck.torchtools.dynamo import backend

    for limit in (0, 4, 7, 12):
        model.zero_grad()
        torch.compiler.reset()
        cut = BisectBackend(backend("aot_eager"), limit)
        torch.compile(model, backend=cut)(x).sum().backward()
        for parameter, grad in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        assert cut.whole == 0
    torch.compiler.reset()


# The compiler ------------------------------------------------------------------------------------------------------


class Rounds(nn.Module):
    """Rounds to bfloat16 on purpose, which Inductor leaves out (pytorch/pytorch#179561)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()


def test_a_rounding_that_inductor_leaves_out_is_blamed_on_the_fusion_and_on_its_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Sigmoid(), Rounds(), nn.Tanh()), nn.Linear(8, 8))
    run = blame((model, (torch.randn(4, 8),)), dtype="float32", search=UNTIMED)
    found = only(run)
    assert found.verdict is Verdict.FAIL
    assert "inductor, while with its casts emulated it passes" in found.message
    assert (found.where.module, found.where.op) == ("1.1", "Tensor.float")
    assert "emulate_precision_casts = True" in found.hint
    ladder = {row[0]: row[3] for row in rows(run, "Stages")}
    assert list(ladder) == ["eager", "aot_eager", "inductor + emulate_precision_casts", "inductor"]
    assert [said.startswith("beyond") for said in list(ladder.values())[1:]] == [False, False, True]


class OwnFloat32(nn.Module):
    """Leaves autocast on purpose, which the compiled backward does not heed (pytorch/pytorch#179804)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight


def test_a_backward_that_is_traced_under_autocast_is_blamed_on_the_tracing_with_the_setting_that_mends_it() -> None:
    torch.manual_seed(0)
    run = blame((nn.Sequential(OwnFloat32(), nn.Softplus()), (torch.randn(8, 16),)), dtype="bfloat16", search=UNTIMED)
    found = only(run)
    assert found.verdict is Verdict.FAIL
    assert "the first that fails is aot_eager" in found.message
    assert (found.where.phase, found.where.module, found.where.op) == ("backward", "0", "matmul")
    assert 'torch._functorch.config.backward_pass_autocast = "off"' in found.hint


def test_what_passes_compiled_has_nothing_to_blame() -> None:
    run = blame(stack(None), dtype="bfloat16")
    assert only(run).verdict is Verdict.PASS
    assert "inductor within" in only(run).message
    assert as_subject(stack(None)).kind.value == "forward"
