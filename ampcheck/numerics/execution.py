"""What ran, in which dtypes, and how much of it was seen. Pure functions from `NumericsStats` to findings."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ampcheck.catalog.autocast import AUTOCAST_STATE
from ampcheck.catalog.numerics import COVERAGE, DTYPE, LOSS_DTYPE
from ampcheck.checks.range import left_out, passed
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.patterns import matches
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import counted, listed
from ampcheck.numerics.run import COMPILED
from ampcheck.records.numerics import VALUELESS, NumericsStats
from ampcheck.shadow.threads import OTHER_INFINITIES, OTHER_THREADS

_UNFOLLOWED = (
    (
        OTHER_INFINITIES,
        Verdict.WARN,
        "another thread made an infinity or a NaN of finite values",
        "run what the other thread computes in this one, which shows the op",
    ),
    (
        COMPILED,
        Verdict.WARN,
        "values inside compiled code were not judged",
        "judge compiled code by itself: audit((model, inputs)) compares it with eager code, watch(compiled_model) "
        "measures the values inside its graphs",
    ),
    (
        OTHER_THREADS,
        Verdict.INCOMPLETE,
        "ops of other threads were not judged",
        "run what the other threads compute in the thread that is watched",
    ),
)
"""What a shadow does not follow: its verdict, what that means, and a hint."""


def judge_unfollowed(unseen: Mapping[str, int]) -> tuple[Verdict, str, str] | None:
    """Verdict, message and hint for a run of which compiled code, or other threads, were not judged; else None."""
    lacks = [lack[1:] for lack in _UNFOLLOWED if unseen.get(lack[0])]
    if not lacks:
        return None
    verdicts, messages, hints = zip(*lacks, strict=True)
    return verdicts[0], ", and ".join(messages), "; ".join(hints)


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


def check_coverage(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Something was looked at. Nothing looked at is a failure."""
    check = COVERAGE
    total = stats.coverage.total
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    if stats.raised is not None:
        say = check.unjudged if stats.raised.ours else check.skip
        return [say(stats.name, "the run raised, so little was seen: see low-precision-error")]
    if stats.judged and not stats.low and VALUELESS in stats.coverage.unseen:
        text = f"not judged: the subject returns {VALUELESS}"
        return [check.unjudged(stats.name, text, hint="let it compute with tensors that hold values")]
    if stats.judged and not stats.low:
        message = f"a verdict on {stats.format} needs ops that compute in it; no op computed in {stats.format} "
        message += f"({counted(stats.ops, 'ops')} ran)"
        hint = "is the model's autocast switched off, or does it hold only ops that autocast leaves in float32?"
        verdict = Verdict.WARN if total else Verdict.FAIL
        return [check.finding(verdict, stats.name, message, observed=0, limit=1, unit="ops", hint=hint)]
    unjudged = None if stats.judged else judge_unfollowed(stats.coverage.unseen)
    if not total and unjudged is None:
        message = "a verdict needs evidence; no op, tensor or gradient was looked at"
        hint = "give inputs with which the model computes something"
        if not stats.judged:
            hint = "let this thread run an op on tensors inside the block"
        return [check.fail(stats.name, message, observed=0, limit=1, unit="observations", hint=hint)]
    text = f"looked at {stats.coverage}" + (f"; not looked at: {unseen}" if unseen else "")
    text += _own_casts(stats)
    if unjudged is not None:
        verdict, lack, hint = unjudged
        return [check.finding(verdict, stats.name, f"{text}; {lack}", hint=hint)]
    if stats.no_backward:
        text += f"; no backward: {stats.no_backward}"
    return [check.passed(stats.name, text, total, observed=total, limit=1, unit="observations")]


def _own_casts(stats: NumericsStats) -> str:
    """The casts to 16 bits that the code makes without autocast, at places where nothing is lost."""
    lost = {(fault.where.file, fault.where.line) for fault in stats.faults if fault.reaches}
    text = ""
    for dtype in sorted({dtype for _, _, dtype in stats.casts}):
        sound = {(f, n): count for (f, n, d), count in stats.casts.items() if d == dtype and (f, n) not in lost}
        if sound:
            casts, places = counted(sum(sound.values()), "casts"), listed(f"{file}:{line}" for file, line in sound)
            outcome = "cost nothing" if not lost else "are not where values are lost"
            outcome = outcome if casts != "1 cast" else outcome.replace("cost", "costs").replace("are", "is")
            text += f"; {casts} to {dtype} of your own {outcome}: {places}"
    return text
