"""Compiled code beside eager mode, both held against float64: planted defects are found, healthy models pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcheck import Subject, UsageError
from ampcheck.compiled.accuracy.checks import CHECKS
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.assert_compiled import assert_compiled
from ampcheck.compiled.options import AccuracyOptions, CompileOptions, Optimizer
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict, collect

BAD = (Verdict.FAIL, Verdict.WARN)


def troubles(run: Run) -> list[tuple[str, Verdict]]:
    return [(f.check, f.verdict) for f in run.findings if f.verdict in BAD]


def only(run: Run, check: str, verdict: Verdict) -> Finding:
    (found,) = [f for f in run.findings if f.check == check and f.verdict is verdict]
    return found


class Network(nn.Module):
    """A healthy one, with a norm, a dropout and a bias whose gradient is zero but for rounding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.norm(self.up(x))), self.dropout))


class Float32Island(nn.Module):
    """pytorch/pytorch#179804: the forward is float32 by the author's word; its compiled backward is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.weight)


class Float32Head(nn.Module):
    """pytorch/pytorch#153044: a gradient that float32 holds overflows in the float16 of the compiled backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.mix
        with torch.autocast("cpu", enabled=False):
            return self.head(y.float())


class Square(torch.autograd.Function):
    """A custom function whose backward multiplies matrices in the dtype of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class CustomProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x, self.weight)


class CountsItsCalls(nn.Module):
    """pytorch/pytorch#197039: a counter that forward changes and uses; its compiled backward reads the changed one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.inner(x) * self.count


def planted(change: Callable[[int, tuple[Tensor, ...]], tuple[Any, ...]]) -> Callable[..., Any]:
    """A backend that runs the graph and changes what it gives; told the number of the call of that graph, from 0."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        calls = 0

        def run(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return change(calls - 1, graph.forward(*args))

        return run

    return backend


def assert_accurate(model: Any, calls: Any, steps: int = 1, optimizer: Optimizer | None = None, **more: Any) -> Run:
    """The checks on accuracy alone."""
    accuracy = AccuracyOptions(steps=steps, optimizer=optimizer)
    return assert_compiled(model, calls, **{"checks": tuple(CHECKS), "accuracy": accuracy, **more})


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_a_healthy_model_passes_with_outputs_gradients_updates_and_buffers_looked_at(dtype: str | None) -> None:
    run = assert_accurate(Network().train(), torch.randn(24, 16), dtype=dtype, steps=2)
    assert troubles(run) == []
    seen = run.coverage.seen
    assert seen["outputs"] == 2
    assert seen["gradients"] == 10
    assert run.coverage.unseen["gradients of which nothing is known: the data determine no digit of it"] == 2
    assert seen["updates"] >= 5, "that of a bias before a norm is zero"
    assert seen["buffers"] == 3
    assert run.tables


def test_adams_sign_noise_on_a_gradient_that_is_zero_to_rounding_is_no_failure() -> None:
    optimizer = torch.optim.AdamW
    run = assert_accurate(Network().train(), torch.randn(24, 16), dtype="bfloat16", steps=3, optimizer=optimizer)
    assert troubles(run) == []
    assert run.coverage.seen["updates"]


def test_dropout_is_compared_under_equal_streams() -> None:
    run = assert_accurate(Network(dropout=0.3).train(), torch.randn(24, 16), dtype="bfloat16")
    assert {f.verdict for f in run.findings} == {Verdict.PASS}


@pytest.mark.parametrize("model", [Float32Island, CustomProduct])
def test_a_backward_that_is_compiled_under_the_forwards_autocast_is_found_with_its_setting(
    model: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=r"compiled-gradient") as caught:
        assert_accurate(model(), torch.randn(8, 32), dtype="bfloat16")
    assert 'torch._functorch.config.backward_pass_autocast = "off"' in str(caught.value)
    assert "compiled-error" not in str(caught.value), "the forward agrees"


def test_a_gradient_that_overflows_in_compiled_code_alone_is_found_with_its_setting() -> None:
    def loss(y: Tensor) -> Tensor:
        return (y * 16384).sum()

    run = judge_accuracy(Plan.of(Subject((Float32Head(), (torch.ones(1, 8),)), loss=loss)), dtype=torch.float16)
    found = only(run, "compiled-gradient", Verdict.FAIL)
    assert "inf or NaN" in found.message
    assert 'backward_pass_autocast = "off"' in found.hint


def test_a_counter_that_forward_changes_and_uses_gives_gradients_that_fail() -> None:
    run = judge_accuracy(Plan.of((CountsItsCalls(), (torch.randn(4, 8),)), steps=2))
    found = only(run, "compiled-gradient", Verdict.FAIL)
    assert "fails with backend='aot_eager' as well" in found.message


def test_a_truncation_that_inductor_leaves_out_is_found_and_emulated_casts_are_named() -> None:
    def fake_quantised(x: Tensor) -> Tensor:
        return (x * 3.3).half().float().tanh() * 2.0

    run = judge_accuracy(Plan.of((fake_quantised, [(torch.randn(64, 16),)])))
    found = only(run, "compiled-error", Verdict.FAIL)
    assert "emulate_precision_casts = True" in found.hint


def test_fused_roundings_that_bring_compiled_code_nearer_to_float64_are_no_finding() -> None:
    def rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = q.chunk(2, -1)
        return q * cos + torch.cat((-two, one), -1) * sin

    angle = torch.randn(32, 16)
    given = torch.randn(4, 32, 16).bfloat16(), angle.cos().bfloat16(), angle.sin().bfloat16()
    eager, compiled = rotated(*given), torch.compile(rotated)(*given)
    assert not torch.equal(eager, compiled), "the control must differ from eager mode"
    assert troubles(judge_accuracy(Plan.of((rotated, [given])))) == []


def test_a_float32_output_with_float32s_digits_compiled_and_sixteen_bits_in_eager_mode_is_a_warning() -> None:
    def late(x: Tensor) -> Tensor:
        return (300.0 / (x.abs().mean() + 0.1)).float()

    def early(x: Tensor) -> Tensor:
        return 300.0 / (x.float().abs().mean() + 0.1)

    given = [(torch.randn(8, 96).bfloat16(),)]
    assert troubles(judge_accuracy(Plan.of((late, given)))) == [("compiled-error", Verdict.WARN)]
    assert troubles(judge_accuracy(Plan.of((early, given)))) == []


def test_a_float32_loss_of_a_16_bit_model_is_no_warning() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).bfloat16()
    subject = Subject((model, (torch.randn(8, 16).bfloat16(),)), loss=lambda y: y.float().square().mean())
    assert troubles(judge_accuracy(Plan.of(subject))) == []


def test_an_overflow_that_fusion_hides_is_told() -> None:
    def overflowing(x: Tensor) -> Tensor:
        return x * x / x

    run = judge_accuracy(Plan.of((overflowing, [(torch.full((8,), 300.0).half(),)])))
    assert "eager mode overflows" in only(run, "compiled-error", Verdict.WARN).message
    assert not run.failed


def test_what_eager_mode_refuses_and_compiled_code_accepts_fails() -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(y, target)  # a probability of 3: the sigmoid is missing

    run = judge_accuracy(Plan.of((loss, [(torch.full((4,), 3.0), torch.ones(4))])))
    assert "eager mode raised RuntimeError" in only(run, "compiled-exception", Verdict.FAIL).message


def test_what_runs_eager_and_raises_compiled_fails() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        raise ValueError("this backend knows no such op")

    run = judge_accuracy(Plan.of((torch.sin, [(torch.randn(4),)])), options=CompileOptions(backend))
    assert "knows no such op" in only(run, "compiled-exception", Verdict.FAIL).message


def test_a_model_that_raises_everywhere_was_not_judged_and_fails_by_coverage_alone() -> None:
    def raising(x: Tensor) -> Tensor:
        return x.view(3, 5, 7)

    run = judge_accuracy(Plan.of((raising, [(torch.randn(4),)])))
    assert troubles(run) == [("coverage", Verdict.FAIL)]
    assert "must run to its end; eager mode raises RuntimeError" in only(run, "coverage", Verdict.FAIL).message


def test_a_defect_that_begins_at_the_third_call_is_found_and_the_call_is_named() -> None:
    wrong_later = planted(lambda call, out: (out[0] * (1.001 if call >= 2 else 1.0), *out[1:]))
    calls = [(torch.full((8,), float(n)),) for n in range(1, 5)]
    run = judge_accuracy(Plan.of((lambda x: x.sin() + 2, calls)), options=CompileOptions(wrong_later, dynamic=False))
    found = only(run, "compiled-error", Verdict.FAIL)
    assert found.where.step == 2
    assert "up to step 1 they agree" in found.message


def test_another_dtype_compiled_fails() -> None:
    narrow = planted(lambda call, out: (out[0].half(), *out[1:]))
    run = judge_accuracy(Plan.of((lambda x: x * 2, [(torch.ones(4),)])), options=CompileOptions(narrow))
    assert "float32 [4] in eager mode and float16 [4] compiled" in only(run, "compiled-dtype", Verdict.FAIL).message


def test_an_index_that_compiled_code_gets_wrong_without_a_near_tie_fails() -> None:
    scores = torch.arange(12.0).view(3, 4)
    moved = planted(lambda call, out: (out[0] - 1, *out[1:]))
    run = judge_accuracy(Plan.of((lambda x: x.argmax(-1), [(scores,)])), options=CompileOptions(moved))
    assert troubles(run) == [("compiled-error", Verdict.FAIL)]


def test_running_statistics_that_compiled_code_does_not_keep_fail() -> None:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.lerp_(x.mean(0), 0.1)
            return x - self.mean.detach()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Tensor) -> Any:
            held = [a.clone() for a in args]
            out = graph.forward(*args)
            with torch.no_grad():
                for mine, old in zip(args, held, strict=True):
                    mine.copy_(old)
            return out

        return run

    run = judge_accuracy(Plan.of((Statistics(), (torch.randn(16, 4),))), options=CompileOptions(backend))
    assert "buffer mean" in only(run, "compiled-error", Verdict.FAIL).message


def test_random_numbers_that_cannot_be_made_equal_are_a_skip_and_never_a_verdict() -> None:
    def greedy(call: int, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        torch.rand(3)
        return out

    run = judge_accuracy(
        Plan.of((lambda x: x + torch.randn_like(x), [(torch.ones(64),)])), options=CompileOptions(planted(greedy))
    )
    skipped = only(run, "compiled-error", Verdict.SKIP)
    assert "not comparable" in skipped.message
    assert not run.failed


def test_numbers_of_numpy_that_dynamo_draws_from_pytorch_are_named() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.from_numpy(numpy.random.rand(4, 4)).float()

    skipped = only(judge_accuracy(Plan.of((noisy, [(torch.zeros(4, 4),)]))), "compiled-error", Verdict.SKIP)
    assert "np.random.seed has no effect in compiled code" in skipped.message
    assert "use_numpy_random_stream" in skipped.message


class Experts(nn.Module):
    """Each token goes to the better one of two experts; the scores of one token are equal but for a rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2, bias=False), nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        return torch.einsum("nij,nj->ni", self.experts[chosen], x)


def near_a_tie() -> tuple[Experts, Tensor]:
    torch.manual_seed(0)
    model, given = Experts(), torch.randn(4, 8)
    with torch.no_grad():  # the scores of the first token become equal
        weight = model.router.weight
        weight[1] += (weight[0] - weight[1]) @ given[0] / given[0].square().sum() * given[0]
    return model, given


def test_an_expert_that_is_chosen_otherwise_near_a_tie_is_a_warning_at_most() -> None:
    model, given = near_a_tie()
    chosen = torch.stack([model.experts[e] @ given[0] for e in (0, 1)])
    assert not torch.allclose(chosen[0], chosen[1])

    def turned(call: int, out: tuple[Tensor, ...]) -> tuple[Any, ...]:
        far = (chosen - out[0][0].detach()).norm(dim=1).argmax()
        rows = [(chosen[far].detach() if row == 0 else out[0][row]) for row in range(4)]
        return (torch.stack(rows).to(out[0].dtype), *out[1:])

    def wild(call: int, out: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return (out[0] * 100, *out[1:])

    subject = (model.requires_grad_(False), [(given,)])
    run = judge_accuracy(Plan.of(subject), options=CompileOptions(planted(turned)), dtype=torch.bfloat16)
    assert not run.failed
    run = judge_accuracy(Plan.of(subject), options=CompileOptions(planted(wild)), dtype=torch.bfloat16)
    assert ("compiled-error", Verdict.FAIL) in troubles(run)


def test_the_gradient_of_an_input_that_asks_for_one_is_judged() -> None:
    given = torch.randn(8, 16, requires_grad=True)
    run = assert_accurate(nn.Linear(16, 4), given, options=CompileOptions("aot_eager"))
    assert run.coverage.seen["gradients"] == 3
    assert given.grad is None


def test_a_model_that_is_compiled_already_is_held_against_itself_in_eager_mode() -> None:
    wrong = planted(lambda call, out: (out[0] * 1.01, *out[1:]))
    compiled = torch.compile(nn.Linear(16, 4), backend=wrong)
    run = judge_accuracy(Plan.of((compiled, (torch.randn(8, 16),))))
    assert only(run, "compiled-error", Verdict.FAIL)
    inner = nn.Sequential(nn.Linear(16, 4), nn.GELU())
    inner[0] = torch.compile(inner[0], backend=wrong)
    assert only(judge_accuracy(Plan.of((inner, (torch.randn(8, 16),)))), "compiled-error", Verdict.FAIL)


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_of_which_nothing_is_compiled_is_no_pass(trained: bool) -> None:
    model = torch.compiler.disable(nn.Linear(4, 4).requires_grad_(trained))
    run = judge_accuracy(Plan.of((model, (torch.randn(2, 4),))))
    if torch.__version__ < (2, 7):  # Dynamo does not say that it leaves the model out
        assert "torch._dynamo.disable" in only(run, "coverage", Verdict.FAIL).hint
    else:
        assert "nothing was compiled" in only(run, "coverage", Verdict.SKIP).message
    assert not [f for f in run.findings if f.verdict is Verdict.PASS]


def test_a_model_for_inference_whose_state_forbids_a_backward_is_judged_without_one() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("kept", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.kept + self.inner(x).mean(0)
            return self.kept * 2

    calls = [(torch.randn(2, 4),) for _ in range(3)]
    run = judge_accuracy(Plan.of((Cached(), calls)), options=CompileOptions("aot_eager"))
    assert troubles(run) == []
    assert run.coverage.seen["outputs"] == 3
    assert "backward raises in eager mode" in only(run, "compiled-gradient", Verdict.SKIP).message


def test_blocks_are_compiled_one_by_one() -> None:
    blocks = [nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)]
    run = judge_accuracy(Plan.of((blocks, [(torch.randn(8, 16),)])), options=CompileOptions("aot_eager"))
    assert troubles(run) == []
    assert run.coverage.seen["compiled graphs"] == 3


def test_the_users_model_is_left_as_it_was() -> None:
    model = Network().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert_accurate(model, torch.randn(24, 16).detach(), steps=2, options=CompileOptions("aot_eager"))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    torch.set_rng_state(random)


def test_the_run_is_emitted_and_only_failures_raise() -> None:
    with collect() as runs:
        options = CompileOptions("aot_eager")
        returned = assert_compiled(
            nn.Linear(4, 4),
            torch.randn(2, 4),
            options=options,
            name="head",
            checks="compiled-error",
        )
    assert {f.check for f in returned.findings} == {"compiled-error", "compiled-exception", "coverage"}
    assert runs == [returned]
    assert all(f.subject.startswith("head [float32, compiled by aot_eager]") for f in returned.findings)


def test_bad_input_is_told_in_one_sentence() -> None:
    model, given = nn.Linear(4, 4), torch.randn(2, 4)
    for wrong, text in (
        ({"checks": ["flush"]}, "checks must be one of compiled-exception, .*graph-break.*; found 'flush'"),
        ({"dtype": "float8_e4m3fn"}, "float16, bfloat16, float32; found"),
        ({"dtype": []}, "dtype must be one of .*; found none"),
        ({"accuracy": AccuracyOptions(autocast=True)}, "needs a dtype"),
        ({"dtype": "float16", "accuracy": AccuracyOptions(autocast=False)}, "leaves only float32"),
    ):
        with pytest.raises(UsageError, match=text):
            assert_compiled(model, given, **wrong)
    for options, wrong, text in (
        (AccuracyOptions, {"steps": 0}, "steps must be a whole number, 1 or more"),
        (AccuracyOptions, {"optimizer": torch.optim.SGD(model.parameters())}, r"lambda parameters: torch\.optim\.SGD"),
        (CompileOptions, {"backend": "inducktor"}, "backend must be one of .*inductor.*; found 'inducktor'"),
        (CompileOptions, {"mode": "fastest"}, "mode must be one of default.*; found 'fastest'"),
        (CompileOptions, {"mode": "max-autotune", "options": {"max_autotune": True}}, "mode or options, not both"),
        (CompileOptions, {"options": {"foo": 1}}, "refuses these options: .*foo"),
    ):
        with pytest.raises(UsageError, match=text):
            options(**wrong)
    with pytest.raises(UsageError, match="is compiled already, so mode would have no effect"):
        assert_compiled(torch.compile(model), given, options=CompileOptions(mode="max-autotune"))
    with pytest.raises(UsageError, match="through its model"):
        judge_accuracy(Plan.of({"step": lambda i: 0.0}))
    with pytest.raises(UsageError, match="pass name= to Subject"):
        assert_compiled(Subject((model, given)), name="twice")
