"""Judges whether what an optimizer steps, and what a step returns, is the same at every loss scale."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.facts.degree import NOWHERE
from ampcheck.records.invariance import InvarianceStats, Place
from ampcheck.records.protocol import Act, all_skipped
from ampcheck.training.scale.degrees import Degrees

_READ = "unscale gradients (scaler.unscale_) before code reads them, and read the loss from before it is scaled"
_NO_STEP = "let the mapping name the optimizer that steps these weights, and let it step within the observed steps"
_NOT_FINITE = "mend what is infinite or NaN: see overflow and nonfinite-gradient"


def measure_invariance(subject: str, degrees: Degrees, *, named: bool) -> InvarianceStats:
    """Return what one run says, as far as it decides. named: whether a mapping names the parts of the loop, so that
    something must have been stepped."""
    degrees.numbers.close()
    graphs = (e for e in degrees.recorder.events if e.act is Act.GRAD and e.scaled and e.create_graph)
    penalty = next((f"{event.file}:{event.line}" for event in graphs), "")
    stats = InvarianceStats(subject, degrees.looked, tuple(degrees.found), penalty=penalty)
    left = degrees.left or degrees.numbers.decided
    if not degrees.scales.used:
        return replace(stats, skipped="no GradScaler is in use")
    if stats.found or (degrees.looked and not degrees.unknown and left is None):
        return stats
    if left is not None:
        why = f"the run uses a number that depends on the loss scale{_at(left)}, and what that decides was not judged"
        return replace(stats, skipped=why, place=left, hint=_READ)
    if degrees.unknown:
        total = degrees.looked + degrees.unknown
        after = _at(degrees.lost or NOWHERE, "after")
        why = f"it is not known how {degrees.unknown} of {total} gradients depend on the loss scale{after}"
        return replace(stats, skipped=why, place=degrees.lost or ("", None), hint=_READ)
    why, hint = "no optimizer stepped a gradient", _NO_STEP
    if all_skipped(degrees.recorder.events):
        why, hint = "every step was skipped: its gradients are not finite", _NOT_FINITE
    return replace(stats, skipped=why, hint=hint if named else "")


def _at(place: Place, word: str = "at") -> str:
    return f" {word} {place[0]}:{place[1]}" if place[0] else ""
