"""The check tf32, on records."""

from __future__ import annotations

from ampcheck.checks.training.tf32 import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict, Where
from ampcheck.records.tf32 import ConfounderStats, OperandStats, ProductError, ReducedProduct

LIMITS = Limits()
PLACE = Where(op="aten::mm", file="model.py", line=3)


def machine(*products: ProductError, **facts: str) -> ConfounderStats:
    return ConfounderStats("this machine", "cuda:0", {"backends.cudnn.allow_tf32": True}, products, **facts)


def test_a_product_that_is_off_by_more_than_float32_explains_names_its_flag() -> None:
    (found,) = check(machine(ProductError("convolution", 64, 8000.0)), LIMITS)
    assert (found.verdict, found.observed) == (Verdict.WARN, 8000.0)
    assert "as of TF32 or float16); torch.backends.cudnn.allow_tf32 is True" in found.message
    assert found.hint.startswith("torch.backends.cudnn.allow_tf32 = False")


def test_products_in_float32_pass_with_what_the_flags_do_elsewhere() -> None:
    (clean,) = check(machine(ProductError("matmul", 64, 1.0)), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 1)
    assert "a convolution in float32 would run in TF32 on an Ampere GPU or later" in clean.message
    (unmeasured,) = check(machine(unmeasured="no kernel"), LIMITS)
    assert (unmeasured.verdict, unmeasured.message[-9:]) == (Verdict.SKIP, "no kernel")


def test_operands_that_lost_bits_fail_unless_they_were_quantised_on_purpose() -> None:
    cut, coarse = ReducedProduct(PLACE, 13, 64, 5000.0, 2), ReducedProduct(PLACE, 20, 64, None)
    found = check(OperandStats("step", 5, (cut, coarse)), LIMITS)
    assert [f.verdict for f in found] == [Verdict.FAIL, Verdict.WARN]
    assert "mm was given, 2x, float32 in name only: the last 13 of 23 mantissa bits" in found[0].message
    (clean,) = check(OperandStats("step", 5, (ReducedProduct(PLACE, 13, 64, 1.0),)), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 5)
    assert [check(OperandStats("step", 0, (), why), LIMITS)[0].verdict for why in ("", "it raised")] == [
        Verdict.SKIP
    ] * 2
