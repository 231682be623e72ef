"""Every op of a model is told with the dtypes it was given, computed in and gave back, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcheck
from ampcheck.autocast.observe import OpDtype, OpDtypes, check_op_dtypes, observe_ops
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Verdict, collect
from ampcheck.demo import CharTransformer, batch


class PseudoInverse(nn.Module):
    """Its kernel multiplies matrices: in eager mode autocast casts them, in the compiled graph it never sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.pinv(self.inner(x).float())  # the line of pinv


class Exponential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).exp()


def stats(*ops: OpDtype, **others: Any) -> OpDtypes:
    return OpDtypes("net", "cpu", "bfloat16", False, ops, **others)


def op(**values: Any) -> OpDtype:
    return OpDtype(
        **{
            "op": "aten::mm",
            "rule": "",
            "inputs": ("float32", "float32"),
            "compute": ("bfloat16", "bfloat16"),
            **values,
        }
    )


def verdicts(findings: list[Finding]) -> list[Verdict]:
    assert {finding.check for finding in findings} == {"compiled-dtype"}
    return [finding.verdict for finding in findings]


def test_an_op_that_gives_another_dtype_compiled_fails_with_its_place() -> None:
    with collect() as runs, pytest.raises(AssertionError, match="linalg_pinv") as raised:
        ampcheck.assert_dtypes(PseudoInverse(), (torch.randn(4, 4),), {"aten::*": None})
    assert "gave bfloat16 in eager mode and float32 compiled" in str(raised.value)
    (failure,) = runs[0].of(Verdict.FAIL)
    assert failure.where.file.endswith("test_observe.py")
    assert failure.where.line == PseudoInverse.forward.__code__.co_firstlineno + 1
    assert "linalg_pinv" in str(runs[0].tables[0].rows)
    assert runs[0].coverage.seen["ops under autocast"] >= 2


def test_a_healthy_model_passes_with_the_number_of_its_ops() -> None:
    found = observe_ops(CharTransformer(layers=1, width=32), batch(2, 16))
    (passed,) = check_op_dtypes(found)
    assert passed.verdict is Verdict.PASS
    assert passed.observed == len(found.ops) >= 8
    assert {"aten::linear", "aten::scaled_dot_product_attention"} <= {op.op for op in found.ops}


def test_a_number_among_the_operands_a_copy_and_an_empty_result_are_no_finding() -> None:
    norm = nn.BatchNorm1d(4).eval()  # gives two empty tensors besides, float32 in eager mode, float16 compiled

    def function(x: Tensor) -> Tensor:
        return norm((2 * x.half() + 1).clone())

    found = observe_ops(function, (torch.randn(3, 4),), dtype="float16")
    assert not found.raised
    assert {"aten::mul.Tensor", "aten::add.Tensor", "aten::clone"} <= {op.op for op in found.ops}
    assert [f.verdict for f in check_op_dtypes(found)] == [Verdict.PASS]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4)], ids=str)
def test_what_an_op_keeps_for_backward_is_no_finding(norm: nn.Module) -> None:
    found = observe_ops(lambda x: norm(x.half()), (torch.randn(3, 4),), dtype="float16")
    assert [f.verdict for f in check_op_dtypes(found)] == [Verdict.PASS]
    assert any(op.op.endswith("_norm") and op.compiled == ("float16",) for op in found.ops)


@pytest.mark.parametrize(("device", "gives"), [("cpu", "bfloat16"), ("cuda", "float32")])
def test_each_op_is_told_with_its_dtypes_under_the_devices_policy(device: str, gives: str) -> None:
    linear, exp = observe_ops(Exponential(), (torch.randn(2, 4),), device=device, compile=False).ops
    assert (linear.op, linear.rule, linear.where.module) == ("aten::linear", "lower_precision", "inner")
    assert (linear.inputs, linear.compute, linear.eager) == (("float32",) * 3, ("bfloat16",) * 3, ("bfloat16",))
    assert (exp.op, exp.inputs, exp.compute, exp.eager) == ("aten::exp", ("bfloat16",), (gives,), (gives,))


def test_an_op_without_a_compiled_form_is_told_and_the_others_are_compared_all_the_same(odd: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return odd(x.exp()) @ x

    found = {op.op: op for op in observe_ops(function, (torch.randn(2, 2),)).ops}
    assert found["ampcheck_observed::odd"].eager == ("float32",)
    assert found["ampcheck_observed::odd"].compiled_raised
    assert found["aten::exp"].compiled == ("float32",)
    assert found["aten::matmul"].compiled == ("bfloat16",)


@pytest.fixture(scope="module")
def odd() -> Any:
    """An op that has no shape function, so that nothing can compile it."""
    library = torch.library.Library("ampcheck_observed", "FRAGMENT")
    library.define("odd(Tensor x) -> Tensor")
    library.impl("odd", lambda x: x + 1, "CPU")
    yield torch.ops.ampcheck_observed.odd
    library._destroy()


def test_the_model_its_inputs_and_autocast_stay_as_they_were() -> None:
    model, x = nn.BatchNorm1d(4), torch.randn(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    observe_ops(model, (x,), device="cuda", compile=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")


def test_other_dtypes_compiled_fail_and_one_that_raises_alone_warns() -> None:
    wrong = op(eager=("bfloat16",), compiled=("float32",))
    right = op(eager=("bfloat16",), compiled=("bfloat16",))
    accepts = op(eager_raised="RuntimeError: dtypes", compiled=("float32",))
    rejects = op(eager=("float32",), compiled_raised="RuntimeError: dtypes")
    assert verdicts(check_op_dtypes(stats(wrong, right))) == [Verdict.FAIL]
    assert verdicts(check_op_dtypes(stats(accepts, right))) == [Verdict.WARN, Verdict.PASS]
    assert verdicts(check_op_dtypes(stats(rejects, right))) == [Verdict.WARN, Verdict.PASS]
    assert "must run in eager mode" in check_op_dtypes(stats(accepts, right))[0].message
    assert "must run compiled" in check_op_dtypes(stats(rejects, right))[0].message


def test_nothing_seen_is_a_failure_and_nothing_compiled_a_skip() -> None:
    both_raise = op(eager_raised="RuntimeError: a", compiled_raised="RuntimeError: b")
    assert verdicts(check_op_dtypes(stats())) == [Verdict.FAIL]
    assert verdicts(check_op_dtypes(stats(unavailable="compile=False"))) == [Verdict.FAIL]
    assert verdicts(check_op_dtypes(stats(both_raise))) == [Verdict.FAIL]
    assert verdicts(check_op_dtypes(stats(op(eager=("float32",)), unavailable="no compiler"))) == [Verdict.SKIP]


def test_a_model_that_raises_is_judged_up_to_there_with_a_warning() -> None:
    def function(x: Tensor) -> Tensor:
        return (x @ x) @ torch.ones(3, 3)

    found = observe_ops(function, (torch.ones(2, 2),), compile=False)
    assert "RuntimeError" in found.raised
    assert next(op.eager for op in found.ops if op.op == "aten::matmul") == ("bfloat16",)
    seen = stats(op(eager=("bfloat16",), compiled=("bfloat16",)), raised=found.raised)
    assert verdicts(check_op_dtypes(seen)) == [Verdict.WARN, Verdict.PASS]


@pytest.mark.parametrize(("asked", "told"), [({"device": "cud"}, "cuda"), ({"dtype": "float64"}, "float16, bfloat16")])
def test_an_unknown_device_or_dtype_is_told_with_those_there_are(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        observe_ops(nn.Linear(2, 2), (torch.ones(2, 2),), **asked)


def test_a_whole_subject_stands_alone_and_a_loop_is_declined() -> None:
    found = observe_ops(ampcheck.Subject((nn.Linear(2, 2), (), {"input": torch.ones(1, 2)}), name="net"), compile=False)
    assert (found.subject, [op.op for op in found.ops]) == ("net", ["aten::linear"])
    with pytest.raises(UsageError, match="of kind 'training'"):
        observe_ops({"step": lambda i: 0.0}, compile=False)
