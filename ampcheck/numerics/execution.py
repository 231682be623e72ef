"""What a run left behind, and the dtypes of its loss and modules. Pure functions from `NumericsStats` to findings."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ampcheck.catalog.autocast import AUTOCAST_STATE
from ampcheck.catalog.numerics import DTYPE, LOSS_DTYPE
from ampcheck.checks.range import left_out, passed
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.patterns import matches
from ampcheck.core.run import Finding, Where
from ampcheck.core.text import counted
from ampcheck.records.numerics import NumericsStats


def check_state(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """The model leaves autocast, grad mode, the default dtype and device, and the precision switches as they were."""
    if not stats.left:
        return []
    items = [f"{name} was {old} and is {new}" for name, (old, new) in stats.left.items()]
    message = (
        "a model must leave autocast, grad mode, default dtype and device and the precision switches as it found "
        f"them, but {'; '.join(items)}. They were restored after the call"
    )
    hint = "change them in a with statement (torch.no_grad(), torch.autocast(...), torch.device(...)) or restore them"
    where = Where("forward")
    return [AUTOCAST_STATE.fail(stats.name, message, where=where, observed=len(items), limit=0, hint=hint)]


def check_loss_dtype(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """A loss of 16 bits has two or three digits: a warning."""
    check = LOSS_DTYPE
    if skipped := left_out(stats, check):
        return skipped
    if not stats.losses:
        return [check.absent(stats.name, "the subject gives no loss of its own")]
    low = [dtype for dtype in stats.losses if format_of(dtype).bits <= 16]
    if not low:
        return [passed(stats, check, f"the loss is {stats.losses[0]}", len(stats.losses))]
    digits = -math.log10(format_of(low[0]).unit_roundoff)
    message = f"a loss must be computed in float32; it or a part of it is {low[0]}, with {digits:.1f} decimal digits"
    hint = "compute the loss from output.float(), or under torch.autocast(enabled=False)"
    return [check.warn(stats.name, message, where=Where(phase="forward"), hint=hint)]


def check_declared_dtypes(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """The modules that the subject declares a dtype for give that dtype."""
    if not stats.declared_dtypes:
        return []
    if stats.raised is not None:
        return [DTYPE.skip(stats.name, "the run raised before it was complete: see low-precision-error")]
    # A declaration of one 16-bit format says nothing about a run in another.
    other = {p: d for p, d in stats.declared_dtypes.items() if format_of(d).bits == 16 and d != stats.format}
    skipped_ones = [
        DTYPE.skip(stats.name, f"{pattern!r} is declared {dtype}, and this run is in {stats.format}")
        for pattern, dtype in other.items()
    ]
    declared = {pattern: dtype for pattern, dtype in stats.declared_dtypes.items() if pattern not in other}
    return skipped_ones + check_dtypes(stats.name, stats.module_dtypes, declared)


def check_dtypes(subject: str, seen: Mapping[str, tuple[str, ...]], declared: Mapping[str, str]) -> list[Finding]:
    """Module outputs have the declared dtypes; a pattern that no module with a floating output matches fails."""
    found = []
    for pattern, wanted in declared.items():
        matching = {module: dtypes for module, dtypes in seen.items() if matches(pattern, module)}
        wrong = {module: dtypes for module, dtypes in matching.items() if set(dtypes) != {wanted}}
        if not matching:
            names = ", ".join(name or "(the root)" for name in sorted(seen)[:8]) or "none"
            message = f"{pattern!r} must match a module that gives a floating output; it matches none ({names}, ...)"
            hint = "* stands for one part of a path, ** for any number of them"
            found.append(DTYPE.fail(subject, message, hint=hint))
        for module, dtypes in wrong.items():
            message = f"{module or '(the root)'} must give {wanted} ({pattern!r}); it gave {', '.join(dtypes)}"
            widened = wanted != "float32" and "float32" in dtypes
            hint = (
                "look for a float32 parameter or constant that promotes the result, or for a missing .to(x.dtype)"
                if widened
                else "autocast decides by device and op, see PyTorch's documentation of it; cast in the module itself"
            )
            found.append(DTYPE.fail(subject, message, where=Where("forward", module), hint=hint))
        if matching and not wrong:
            text = f"{pattern!r} matches {counted(len(matching), 'modules')}, all of which give {wanted}"
            found.append(DTYPE.passed(subject, text, len(matching)))
    return found
