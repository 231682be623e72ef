"""The check autocast-bypass, on records."""

from __future__ import annotations

import pytest

from ampcheck.checks.autocast.autocast_bypass import check
from ampcheck.core.run import Verdict
from checks.autocast.records import LIMITS, block, call


@pytest.mark.parametrize(
    ("facts", "verdict", "said"),
    [
        ({"result": "bfloat16"}, Verdict.FAIL, "It wrote bfloat16"),
        ({"result": "float32"}, Verdict.WARN, "It ran in float32: nothing is unsafe"),
        ({"raised": "mixed dtypes"}, Verdict.FAIL, "It raised: mixed dtypes"),
        ({"raised": "mixed dtypes", "caught": True}, Verdict.WARN, "It raised: mixed dtypes"),
    ],
)
def test_a_variant_that_autocast_does_not_see(facts: dict[str, object], verdict: Verdict, said: str) -> None:
    (found,) = check(block(call("bypass", "float32", **facts)), LIMITS)
    assert (found.verdict, found.hint) == (verdict, "call mm and assign its result")
    assert "aten::mm would have computed in float16" in found.message
    assert said in found.message


def test_what_autocast_would_have_left_alone_and_what_wrote_the_same_dtype_pass() -> None:
    calls = call("bypass", "float16", expected=""), call("bypass", "float32", result="float16"), call("thread")
    (clean,) = check(block(*calls, counts={"autocast ops": 3}), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 3)
