"""Checks of every run: how much of it was examined."""

from __future__ import annotations

from collections.abc import Mapping

from ampcheck.core.run import Verdict
from ampcheck.records.numerics import COMPILED, OTHER_INFINITIES, OTHER_THREADS

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
"""Events that a shadow does not follow, each with its verdict, what that means, and a hint."""


def judge_unfollowed(unseen: Mapping[str, int]) -> tuple[Verdict, str, str] | None:
    """Verdict, message and hint for a run of which compiled code, or other threads, were not judged; else None."""
    lacks = [lack[1:] for lack in _UNFOLLOWED if unseen.get(lack[0])]
    if not lacks:
        return None
    verdicts, messages, hints = zip(*lacks, strict=True)
    return verdicts[0], ", and ".join(messages), "; ".join(hints)
