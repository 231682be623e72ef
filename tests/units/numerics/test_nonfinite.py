"""NaN is never a pass: made by the model, handed in with the data, or left over when nothing can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampcheck import Finding, Run, Subject, Verdict, audit, watch
from ampcheck.core.run import collect
from ampcheck.numerics.checks import OBSERVABLE
from ampcheck.report.sections import headline

NAN, INF = math.nan, math.inf


class Model(nn.Module):
    """A linear layer, and whatever the case does with its result."""

    def __init__(self, then: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(width, width), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.layer(x))


def judged(model: nn.Module, x: Any = None, **options: Any) -> Run:
    torch.manual_seed(0)
    data = torch.randn(4, 8) if x is None else x
    return audit(Subject((model, data), **options), compile=False)


def reported(run: Run, verdict: Verdict, check: str = "nonfinite-reference") -> list[Finding]:
    return [f for f in run.of(verdict) if f.check == check]


@pytest.fixture(autouse=True)
def _equal_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("op", "then"),
    [
        ("aten::log", lambda y: torch.log(-torch.relu(y) - 1)),
        ("aten::sqrt", lambda y: torch.sqrt(-y.abs() - 1)),
        ("aten::div.Tensor", lambda y: (y - y) / (y - y)),
        ("aten::acos", lambda y: torch.acos(y.abs() + 2)),
        ("aten::pow.Tensor_Scalar", lambda y: (-y.abs() - 1) ** 0.5),
        ("aten::_softmax", lambda y: y.masked_fill(y < INF, -INF).softmax(-1)),
        ("aten::sub.Tensor", lambda y: (y / 0.0).abs() - (y / 0.0).abs()),
    ],
)
def test_nan_that_the_model_makes_in_every_precision_fails_at_its_op_and_line(op: str, then: Any) -> None:
    run = judged(Model(then))
    (finding,) = reported(run, Verdict.FAIL)
    assert (finding.where.op, finding.where.phase) == (op, "forward")
    assert finding.where.file.endswith("test_nonfinite.py")
    assert finding.where.line
    assert "are NaN in float64" in finding.message
    judging_values = {"overflow", "precision-loss", "nonfinite-gradient"}
    assert {f.check for f in run.of(Verdict.PASS)}.isdisjoint(judging_values)
    assert {f.check for f in run.of(Verdict.INCOMPLETE)} == judging_values


def over(y: Tensor) -> Tensor:
    """The same values by way of others that float16 does not hold."""
    return y * 1e5 / 1e5


def by_the_largest(y: Tensor) -> Tensor:
    scores = y.unsqueeze(-1) @ (y * 1e5).unsqueeze(1) / 1e5
    top = scores.amax(-1, keepdim=True)
    e = (scores - top.masked_fill(top == -INF, 0.0)).exp()
    return e / e.sum(-1, keepdim=True).clamp_min(1e-4)


SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": by_the_largest,
    "where": lambda y: y / torch.where(over(y) > -1e9, 1.0, 0.0),
    "isfinite": lambda y: y / over(y).isfinite().to(y.dtype),
    "rows": lambda y: y[(over(y).abs() < 1e9).all(-1)].mean(0),
    "sum of a mask": lambda y: (y * (m := over(y).abs() < 1e9)).sum(-1) / m.sum(-1),
}


@pytest.mark.parametrize("then", SPOILT.values(), ids=SPOILT)
def test_a_decision_on_what_overflowed_is_no_fault_of_float64(then: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    run = audit((Model(then), 4 * torch.randn(4, 8)), compile=False, dtype="float16")
    assert {"overflow"} <= {f.check for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)}
    assert [f.message for f in run.findings if f.check == "nonfinite-reference" and f.verdict is not Verdict.PASS] == []


@pytest.mark.parametrize(
    "then", [lambda y: over(y) / (y * 0).sum(), lambda y: over(y) + (y * 0).norm(dim=-1).sqrt()[0]]
)
def test_what_float64_makes_itself_fails_beside_an_overflow(then: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    run = audit((Model(then), 4 * torch.randn(4, 8)), compile=False, dtype="float16")
    assert reported(run, Verdict.FAIL)


def test_one_row_of_nan_in_a_batch_fails_and_the_other_rows_are_judged() -> None:
    def then(y: Tensor) -> Tensor:
        return torch.cat([torch.log(-y[:1].abs() - 1), y[1:]])

    run = judged(Model(then))
    (finding,) = reported(run, Verdict.FAIL)
    assert finding.observed == 8
    assert "8 of 32 elements" in finding.message
    assert {f.check for f in run.of(Verdict.PASS)} >= {"precision-loss"}


def with_nan(tensor: Tensor, value: float = NAN) -> Tensor:
    tensor = tensor.detach().clone()
    tensor.view(-1)[3] = value
    return tensor


def poisoned(name: str, value: float = NAN) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
    with torch.no_grad():
        tensor.copy_(with_nan(tensor, value))
    return model


@pytest.mark.parametrize(
    ("model", "x", "named", "module"),
    [
        (nn.Linear(8, 8), with_nan(torch.ones(4, 8)), "input args.0 holds 1 NaN", ""),
        (poisoned("0.weight"), torch.ones(4, 8), "parameter 0.weight holds 1 NaN", "0"),
        (poisoned("0.weight", INF), with_nan(torch.ones(4, 8), 0.0), "parameter 0.weight holds 1 infinities", "0"),
        (poisoned("1.running_mean"), torch.ones(4, 8), "buffer 1.running_mean holds 1 NaN", "1"),
    ],
)
def test_nan_that_is_handed_in_fails_and_names_the_input_or_weight(
    model: nn.Module, x: Tensor, named: str, module: str
) -> None:
    finding = reported(judged(model, x), Verdict.FAIL)[0]
    assert named in finding.message
    assert finding.where.module == module


def test_nan_that_the_model_handles_is_no_finding() -> None:
    class FillsMissing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("unused", torch.tensor([NAN]))

        def forward(self, x: Tensor) -> Tensor:
            known = ~x.isnan()
            safe = self.layer(torch.where(known, x, 0.0))
            return torch.where(known, safe, torch.log(-safe.abs() - 1).nan_to_num(0.0).detach())

    run = judged(FillsMissing(), with_nan(torch.randn(4, 8)))
    assert not run.failed
    assert reported(run, Verdict.PASS)[0].seen == 4 * 8 + 8 * 8 + 8


def test_infinities_that_the_model_means_pass_and_are_compared_in_place_and_sign() -> None:
    pad = torch.full((4, 2), -INF)

    def padded(y: Tensor) -> Tensor:
        return torch.cat([y * 100, pad], -1)

    run = judged(Model(padded))
    assert not run.failed
    assert not run.of(Verdict.WARN)
    assert "8 infinities are compared in place and sign" in reported(run, Verdict.PASS)[0].message


def test_the_loss_scale_of_a_model_with_infinite_outputs_backs_off_like_any_other() -> None:
    class Detector(nn.Module):
        """Gradients overflow in float16 at a loss scale of 65536; GradScaler settles on a smaller one."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layer(x) * 8, torch.full((4, 2), -INF)], -1)

    run = judged(Detector())
    assert [(f.check, f.message) for f in (*run.of(Verdict.FAIL), *run.of(Verdict.WARN))] == []
    scales = [f.message for f in run.findings if f.check == "nonfinite-gradient" and "[float16" in f.subject]
    assert len(scales) == 1
    assert "at loss scale 65536" not in scales[0]


@pytest.mark.parametrize("factor", [1e6, 1.0])
def test_a_message_about_gradients_names_a_loss_scale_where_one_is_in_use(factor: float) -> None:
    """Gradients that overflow at every scale were last computed without one, as in a loop that has no scaler."""
    run = judged(Model(lambda y: y), loss=lambda out: out.float().sum() * factor)
    (finding,) = (f for f in run.findings if f.check == "nonfinite-gradient" and "[float16" in f.subject)
    assert (finding.verdict, "without a loss scale" in finding.message) == (
        (Verdict.FAIL, True) if factor == 1e6 else (Verdict.PASS, False)
    )
    assert "smaller loss scale" not in finding.hint
    assert "at loss scale 1," not in finding.message


def test_outputs_that_are_all_infinite_fail() -> None:
    finding = reported(judged(Model(lambda y: y.abs() / 0.0)), Verdict.FAIL)[0]
    assert "every element" in finding.message
    assert finding.where.op == "aten::div.Tensor"


@pytest.mark.parametrize(
    ("then", "op"),
    [
        (lambda y: (y - y).abs().sqrt() + y, "aten::div.Tensor"),
        (lambda y: torch.where(y.abs() < 0, torch.log(y - y), y), "aten::div.Tensor"),
    ],
)
def test_gradients_that_are_not_finite_in_float64_fail_at_the_op_of_backward(then: Any, op: str) -> None:
    (finding,) = reported(judged(Model(then)), Verdict.FAIL)
    assert (finding.where.phase, finding.where.op) == ("backward", op)
    assert finding.where.file.endswith("test_nonfinite.py")
    assert "gradients must be finite in float64" in finding.message


def test_gradients_of_masked_outputs_are_incomplete_until_the_real_loss_is_given() -> None:
    def log_of_a_mask(y: Tensor) -> Tensor:
        return torch.log(torch.cat([y.exp(), (y - y)[:, :1]], -1))

    run = judged(Model(log_of_a_mask))
    assert not run.failed
    assert "loss=" in reported(run, Verdict.INCOMPLETE)[0].hint
    given = judged(Model(log_of_a_mask), loss=lambda y: y[:, :8].square().mean())
    assert "div" in reported(given, Verdict.FAIL)[0].where.op  # 0 / 0: the mask's own derivative
    mended = judged(
        Model(lambda y: torch.cat([y, torch.full((4, 1), -INF)], -1)), loss=lambda y: y.logsumexp(-1).mean()
    )
    assert not mended.failed
    assert not mended.of(Verdict.INCOMPLETE)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("no derivative")


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("model", "check", "reason"),
    [
        (Model(RaisesInBackward.apply), "nonfinite-gradient", "no derivative"),
        (Model(lambda y: None), "precision-loss", "returns no floating tensor"),
        (Model(lambda y: {"loss": None}), "precision-loss", "returns no floating tensor"),
        (Model(lambda y: y.argmax(-1)), "precision-loss", "returns no floating tensor"),
        (Reentrant(), "nonfinite-gradient", "no floating output has a gradient"),
        (Model(torch.no_grad()(lambda y: y * 1)), "nonfinite-gradient", "no floating output has a gradient"),
        (Model(lambda y: y.detach()), "nonfinite-gradient", "no floating output has a gradient"),
    ],
)
def test_what_was_asked_for_and_not_judged_is_incomplete_and_in_the_headline(
    model: nn.Module, check: str, reason: str
) -> None:
    run = judged(model)
    assert any(reason in f.message for f in reported(run, Verdict.INCOMPLETE, check))
    assert "incomplete" in headline(run)
    assert not run.failed


def test_a_model_without_anything_to_train_is_complete_without_gradients() -> None:
    model = nn.Linear(8, 8).requires_grad_(False)
    assert not judged(model).of(Verdict.INCOMPLETE)


def test_parameters_that_a_reentrant_checkpoint_cuts_off_are_incomplete_and_unused_ones_are_not() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Reentrant(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    run = judged(Head())
    findings = reported(run, Verdict.INCOMPLETE, "nonfinite-gradient")
    assert ["body.layer.weight, body.layer.bias" in f.message for f in findings] == [True, True]
    assert "use_reentrant=False" in findings[0].hint

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    assert not judged(Unused()).of(Verdict.INCOMPLETE)


def test_a_block_that_ends_with_nan_in_every_precision_fails_and_a_masked_one_warns() -> None:
    x = torch.tensor([1.0, -1.0])
    with (
        pytest.raises(AssertionError, match=r"log in `.*` made 1 of 2 elements NaN in every precision"),
        watch(checks=OBSERVABLE),
    ):
        kept = torch.log(x).half() * 2
    assert kept.isnan().any()
    with collect() as runs, watch(checks=OBSERVABLE):
        masked = torch.where(x > 0, torch.log(x), 0.0)
    assert masked.isfinite().all()
    assert [f.verdict for f in runs[0].findings if f.check == "nonfinite-reference"] == [Verdict.WARN]


def test_a_cast_of_the_models_own_that_overflows_in_every_precision_fails_at_the_cast() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) * 3e5
            y = y.half().to(x.dtype)
            return self.second(y)

    findings = reported(judged(Casts()), Verdict.FAIL, "overflow")
    first = next(finding for finding in findings if "bfloat16" in finding.subject)
    assert first.where.op == "aten::_to_copy"
    assert "the cast overflows" in first.hint


def test_what_float32_loses_of_data_that_determine_nothing_is_no_failure() -> None:
    class Absorbs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.layer(x).to(x.dtype)
            with torch.autocast("cpu", enabled=False):
                return (scores - 1e9).softmax(-1)  # a row that is masked whole: float32 keeps nothing of the scores

    assert not judged(Absorbs(), torch.randn(4, 8) * 8).failed


def test_nan_that_a_block_mends_in_place_or_selects_from_is_no_failure() -> None:
    x = torch.tensor([1.0, -1.0])
    with watch(checks=OBSERVABLE):
        y = torch.log(x)
        y.nan_to_num_()
    with watch(checks=OBSERVABLE):
        z = torch.log(x)
        z[z.isnan()] = 0.0
    with watch(checks=OBSERVABLE):
        raw = torch.log(x)
        kept = torch.where(x > 0, raw, 0.0)
    assert (y + z + kept).isfinite().all()
    assert raw.isnan().any()


def test_nan_that_the_model_writes_is_incomplete_and_asks_for_another_padding() -> None:
    def padded(y: Tensor) -> Tensor:
        out = y.new_full((6, 8), NAN)
        out[:4] = y
        return out

    run = judged(Model(padded))
    assert not run.failed
    assert "pad with -inf" in reported(run, Verdict.INCOMPLETE)[0].hint


def test_a_large_constant_excuses_no_output() -> None:
    class Absorbs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y = (y.detach() + 1000) - 1000
            mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
            return (torch.zeros(4, 4) + mask).softmax(-1) @ y.float()

    failed = [f.subject for f in reported(judged(Absorbs()), Verdict.FAIL, "precision-loss")]
    assert "subject [bfloat16, eager]" in failed


def test_a_float32_run_that_casts_to_16_bits_itself_excuses_nothing() -> None:
    class Rotates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(1000, 1004).to(torch.bfloat16)[:, None]
            return self.layer(x).float() * 1e-3 + positions.float().sin()

    failed = reported(judged(Rotates()), Verdict.FAIL, "precision-loss")
    assert {f.subject for f in failed} == {"subject [float16, eager]", "subject [bfloat16, eager]"}


class Spectrum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(x.float() * 1e30) * 1e30).abs().log()


def test_complex_numbers_that_overflow_are_a_failure_in_the_format_of_their_parts() -> None:
    run = audit((Spectrum(), torch.ones(2, 8)), dtype="bfloat16", compile=False)
    overflow = [finding for finding in run.findings if finding.check == "overflow"]
    assert overflow
    assert all(finding.verdict is Verdict.FAIL for finding in overflow)
