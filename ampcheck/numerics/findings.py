"""What every check of a `NumericsStats` says in the same words."""

from __future__ import annotations

from collections.abc import Iterable

from ampcheck.core.check import Check, Evidence
from ampcheck.core.formats import format_of_values
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.source import op_name
from ampcheck.core.text import listed
from ampcheck.numerics.stats import NumericsStats
from ampcheck.shadow import Fault

_CASTS = ("aten::_to_copy", "aten::copy_", "prims::convert_element_type")


def who(stats: NumericsStats) -> str:
    """The subject and its arm, as findings name them."""
    return stats.name


def op_text(stats: NumericsStats, where: Where) -> str:
    """``rsub in `sigma = 1 - alpha` ``: the op as its source line calls it, or else without the namespace of PyTorch's
    own, and the text of that line where it is known."""
    op, text = op_name(where), stats.sources.get((where.file, where.line), "")
    part = "the backward pass at " if where.phase == "backward" else ""
    return f"{op} in {part}`{text if len(text) <= 100 else text[:97] + '...'}`" if text else op


def range_text(fault: Fault) -> str:
    """The magnitudes that go into an op and come out of it."""
    if 0 < fault.examination.numel <= fault.examination.lost:
        return f"inputs reach {fault.amax_in:.5g} and no result is finite; float64 reaches {fault.exact_amax:.5g}"
    text = f"magnitudes up to {fault.amax_in:.5g} go in, up to {fault.amax_out:.5g} come out"
    return text if fault.exact_amax == fault.amax_out else f"{text} ({fault.exact_amax:.5g} in float64)"


def reach_text(stats: NumericsStats, fault: Fault) -> str:
    """Where the damage is left, and that the code itself chose the format, where the run has another of 16 bits."""
    places = sorted(fault.reaches, key=lambda name: -fault.reaches[name])
    halves = {"float16", "bfloat16"}
    own = bool(stats.arm) and fault.dtype != stats.format and {fault.dtype, stats.format} <= halves
    chosen = f"; the code itself casts to {fault.dtype}, this run is in {stats.format}" if own else ""
    return chosen + (f"; it reaches {listed(places, 3)}" if places else "")


def is_cast(where: Where) -> bool:
    """Whether an op does nothing but convert values."""
    return where.op.removesuffix(".default") in _CASTS


def mend_cast(where: Where, format_text: str) -> str:
    """The hint for a cast that overflows. format_text: what it casts to."""
    here = f"module {where.module}" if where.module else f"{where.file}:{where.line}" if where.file else "that op"
    return (
        f"the cast overflows: it is given values beyond the largest of {format_text}; normalise or clamp them before "
        f"it, or keep {here} in float32 (with torch.autocast(enabled=False) around it)"
    )


def wider(dtype: str) -> str:
    """The formats that have a larger range."""
    return "bfloat16 or float32" if format_of_values(dtype).name == "float16" else "float32"


def faults_of(stats: NumericsStats, kinds: Iterable[str]) -> list[Fault]:
    """The faults of these kinds."""
    return [fault for fault in stats.faults if fault.kind in kinds]


def passed(
    stats: NumericsStats,
    check: Check,
    text: str,
    seen: int,
    observed: float | None = None,
    limit: float | None = None,
    unit: str = "",
) -> Finding:
    """A pass that rests on `seen` observations, with the coverage of the run."""
    text = f"{text} ({stats.coverage})"
    return check.passed(who(stats), text, seen, observed=observed, limit=limit, unit=unit)


def elements_lost(
    stats: NumericsStats, check: Check, verdict: Verdict, message: str, count: int, shown: Evidence
) -> Finding:
    """A failure or warning about `count` elements, of which none may be so."""
    shown |= {"observed": count, "limit": 0, "unit": "elements"}
    return check.finding(verdict, who(stats), message, **shown)


def no_gradients(stats: NumericsStats, check: Check) -> Finding | None:
    """A skip where nothing needs a gradient; incomplete where the subject keeps backward from its weights."""
    if not stats.no_backward and stats.of("gradient"):
        return None
    reason = f"no gradients to judge: {stats.no_backward or 'the run gave no gradient'}"
    if stats.no_backward and not stats.prevented:
        return check.skip(who(stats), reason)
    hint = (
        "mend what raises or cuts the graph (no_grad, detach, a reentrant checkpoint whose inputs need no gradient); "
        "for a model that is never trained set requires_grad_(False)"
    )
    return check.incomplete(who(stats), reason, hint=hint)
