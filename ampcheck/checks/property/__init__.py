"""Properties over all inputs of a strategy: what its checks share, the text of a failure and what mends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ampcheck.core.check import Check
from ampcheck.core.run import Finding
from ampcheck.records.property import (
    ACCURACY,
    COMPILED,
    DECISION,
    NONFINITE,
    RAISES,
    RANGE,
    Breaking,
    Problem,
    PropertyStats,
)

_FLOAT32 = "or compute this part in float32"

_EPS = "use a larger eps, one that the format holds (at least torch.finfo(dtype).smallest_normal)"

_SUMS = "divide before summing"

_FAMILIES = {
    "take the logarithm in one step (logsigmoid, log_softmax)": "sigmoid _softmax",
    "subtract the largest before exp": "exp exp2 expm1 cosh sinh",
    "scale before squaring or multiplying": "pow square mul mul_ prod cumprod",
    _SUMS: "sum mean cumsum add add_ sub sub_ linalg_vector_norm norm addcmul",
    "keep what is divided by, or goes into the logarithm, away from zero by an eps that the format holds (at least "
    "torch.finfo(dtype).smallest_normal)": "div div_ reciprocal rsqrt log log2 log10 logit atanh addcdiv",
    "scale an operand before the product": "mm addmm bmm baddbmm addbmm mv dot convolution linear "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention",
    "scale before the cast, or cast to bfloat16": "_to_copy copy_",
    "take the lowest value of a mask from torch.finfo(x.dtype).min": "masked_fill masked_fill_ where",
}

_BY_OP = {op: text for text, ops in _FAMILIES.items() for op in ops.split()}

_BY_KIND = {
    RAISES: "make the operands' dtypes meet, and take constants from torch.finfo(x.dtype)",
    NONFINITE: "subtract the largest before exp, scale before squaring, use an eps that the format holds, " + _FLOAT32,
    RANGE: "declare smaller inputs, scale the result, or give it in float32 or bfloat16",
    ACCURACY: "use the stable form (log1p, expm1, logsumexp, a two-pass variance), or compute this part in float32",
    DECISION: "decide upon float32 values",
    COMPILED: (
        "run torch.compile(model, backend='aot_eager'): if the error remains, tracing makes it, otherwise Inductor"
    ),
}


def remedy(kind: str, op: str, *, vanished: bool = False) -> str:
    """One sentence; "" where nothing general helps.

    kind: of `Problem`. op: the overload to blame (`aten::exp`), "" where it is not known.
    vanished: see `Problem`.
    """
    name = op.rpartition("::")[2].partition(".")[0]
    if kind == NONFINITE and name in _BY_OP:
        return f"{_EPS if vanished and _BY_OP[name] == _SUMS else _BY_OP[name]}, {_FLOAT32}"
    return _BY_KIND.get(kind, "")


_SHOWN = 600
"""Characters of an example in a message; the run's table and the written test have all of it."""


def short(code: str) -> str:
    """An example in a message."""
    return code if len(code) <= _SHOWN else f"{code[:_SHOWN]}... ({len(code):,} characters)"


def failures(stats: PropertyStats, check: Check, template: Callable[[Problem], str]) -> Iterator[Finding]:
    """The failures by the examples that break a property. template: of a problem, "" for one of another property.

    Its fields are `format` and `detail`; `value`, the element, which is `low` here and `exact` in float64; and `error`.
    """
    for breaking in stats.breakings:
        if text := template(breaking.problem):
            yield _failure(stats, check, breaking, text)


def judged(
    stats: PropertyStats, check: Check, template: Callable[[Problem], str], passed: Callable[[], Finding]
) -> Iterator[Finding]:
    """The failures; where there are none a pass, or a skip with its reason, if the search looked for the property."""
    failed = list(failures(stats, check, template))
    if not failed and check.slug in stats.skipped:
        failed = [check.skip(stats.name, stats.skipped[check.slug])]
    elif not failed and check.slug in stats.asked:
        failed = [passed()]
    yield from failed


def _failure(stats: PropertyStats, check: Check, breaking: Breaking, text: str) -> Finding:
    problem = breaking.problem
    place = f"output {problem.output}[{problem.index}]" if problem.output else f"element {problem.index} of the output"
    searched = f"after {breaking.found_after} of {stats.budget} examples"
    if stats.cut:
        searched += "; making it smaller was cut short by the budget"
    if breaking.climbed:  # of a lone input, beyond what was drawn for it
        searched = f"by gradient ascent {stats.domain}, the declared domain, {searched}"
    text = text.format(
        format=stats.format,
        detail=problem.detail,
        value=place,
        low=describe_value(problem.low),
        exact=describe_value(problem.exact),
        error=f"a relative error of {problem.observed:.2g}, where rounding explains {problem.limit:.2g}",
    )
    hints = [remedy(problem.kind, problem.where.op, vanished=problem.vanished)]
    hints += [f"run pytest {breaking.file}"] if breaking.file else []
    hints += [f"no test was written: {breaking.unwritten}"] if breaking.unwritten else []
    measured = (problem.observed, problem.limit) if problem.observed else (None, None)
    return check.fail(
        stats.name,
        f"{text}. The smallest input found is {short(breaking.example.code())}, {searched}",
        where=problem.where,
        observed=measured[0],
        limit=measured[1],
        unit="elements" if problem.kind in (NONFINITE, RANGE) else "relative error",
        hint="; ".join(filter(None, hints)),
    )


def describe_value(value: float) -> str:
    """A number in a message: short, with infinities and NaN by name."""
    return f"{value:.6g}" if math.isfinite(value) else "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
