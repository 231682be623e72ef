"""Ops whose floating results are decisions: companions take those of the run."""

from __future__ import annotations

from typing import Any

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import restart, rule

rule(
    "sign", "sgn", "floor", "ceil", "round", "trunc", "fix", "floor_divide", "heaviside", "nextafter", "frexp",
    "sign_", "sgn_", "floor_", "ceil_", "round_", "trunc_", "floor_divide_", "heaviside_", "nextafter_",
    "_foreach_sign", "_foreach_round", "_foreach_floor", "_foreach_ceil", "_foreach_trunc",
    "_foreach_sign_", "_foreach_round_", "_foreach_floor_", "_foreach_ceil_", "_foreach_trunc_",
    "fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask",
)(restart)  # fmt: skip


@rule("div", "div_")
def _divide(call: Call, side: Side) -> Any:
    """A quotient; one that is rounded to an integer is a decision."""
    if call.argument("rounding_mode") is None:
        return side.run(call)
    return restart(call, side)


@rule("remainder", "fmod", "remainder_", "fmod_")
def _remainder(call: Call, side: Side) -> Any:
    """What is left over after as many divisors as the run took away."""
    if call.written:  # the dividend of the run was overwritten
        return restart(call, side)
    dividend, divisor = call.argument("self"), call.argument("other")
    times = ((side.convert_value(dividend) - side.convert(call.out)) / side.convert_value(divisor)).round()
    return side.lift(dividend) - times * side.lift(divisor)


@rule("frac")
def _fraction(call: Call, side: Side) -> Any:
    """What is left over after the integer that the run took away."""
    x = call.args[0]
    return side.of(x) - side.convert(x).trunc()
