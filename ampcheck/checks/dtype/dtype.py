"""Requires: Modules give the dtype that was declared for them. A pattern that matches nothing fails.

Measured: Floating outputs of every module are followed through tuples, dicts, dataclasses and model outputs.

Causes: A float32 parameter or constant that promotes a 16-bit stream; a missing cast back.

Fix: Cast the result, or the parameter at the point of use.
"""

from __future__ import annotations

from collections.abc import Mapping

from ampcheck.core.check import Check
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.patterns import matches
from ampcheck.core.run import Finding, Where
from ampcheck.core.subject import MODELS
from ampcheck.core.text import counted
from ampcheck.records.numerics import NumericsStats

CHECK = Check(
    "dtype",
    "dtype",
    __doc__,
    subjects=MODELS,
    needs=("NumericsStats",),
    order=210,
    evidence=("tests/corpus/norm_weight_promotes",),
)


def check(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """The modules that the subject declares a dtype for give that dtype."""
    if not stats.declared_dtypes:
        return []
    if stats.raised is not None:
        return [CHECK.skip(stats.name, "the run raised before it was complete: see low-precision-error")]
    # A declaration of one 16-bit format says nothing about a run in another.
    other = {p: d for p, d in stats.declared_dtypes.items() if format_of(d).bits == 16 and d != stats.format}
    skipped_ones = [
        CHECK.skip(stats.name, f"{pattern!r} is declared {dtype}, and this run is in {stats.format}")
        for pattern, dtype in other.items()
    ]
    declared = {pattern: dtype for pattern, dtype in stats.declared_dtypes.items() if pattern not in other}
    return skipped_ones + of_modules(stats.name, stats.module_dtypes, declared)


def of_modules(subject: str, seen: Mapping[str, tuple[str, ...]], declared: Mapping[str, str]) -> list[Finding]:
    """Module outputs have the declared dtypes; a pattern that no module with a floating output matches fails."""
    found = []
    for pattern, wanted in declared.items():
        matching = {module: dtypes for module, dtypes in seen.items() if matches(pattern, module)}
        wrong = {module: dtypes for module, dtypes in matching.items() if set(dtypes) != {wanted}}
        if not matching:
            names = ", ".join(name or "(the root)" for name in sorted(seen)[:8]) or "none"
            message = f"{pattern!r} must match a module that gives a floating output; it matches none ({names}, ...)"
            hint = "* stands for one part of a path, ** for any number of them"
            found.append(CHECK.fail(subject, message, hint=hint))
        for module, dtypes in wrong.items():
            message = f"{module or '(the root)'} must give {wanted} ({pattern!r}); it gave {', '.join(dtypes)}"
            widened = wanted != "float32" and "float32" in dtypes
            hint = (
                "look for a float32 parameter or constant that promotes the result, or for a missing .to(x.dtype)"
                if widened
                else "autocast decides by device and op, see PyTorch's documentation of it; cast in the module itself"
            )
            found.append(CHECK.fail(subject, message, where=Where("forward", module), hint=hint))
        if matching and not wrong:
            text = f"{pattern!r} matches {counted(len(matching), 'modules')}, all of which give {wanted}"
            found.append(CHECK.passed(subject, text, len(matching)))
    return found
