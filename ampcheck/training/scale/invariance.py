"""`scale-invariance`: what an optimizer steps, and what a step returns, is the same at every loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampcheck.catalog.training import SCALE_INVARIANCE
from ampcheck.core.check import Evidence
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.facts.degree import NOWHERE, RETURNED, Dependence, Place
from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.protocol.order import all_skipped
from ampcheck.training.scale.degrees import Degrees

_READ = "unscale gradients (scaler.unscale_) before code reads them, and read the loss from before it is scaled"
_NO_STEP = "let the mapping name the optimizer that steps these weights, and let it step within the observed steps"
_NOT_FINITE = "mend what is infinite or NaN: see overflow and nonfinite-gradient"
_CALLS = (
    "unscale (scaler.unscale_) before gradients are clipped or read; scale every loss of the step; call update once, "
    "after all optimizers"
)
_PENALTY = (
    "unscale what torch.autograd.grad gives of a scaled loss ({}) before a penalty is made of it: grad / "
    "scaler.get_scale(); and scale the sum of loss and penalty"
)
_RETURN = "return the loss before it is scaled, or keep scaler.get_scale() from before scaler.update()"


@dataclass(frozen=True, slots=True)
class InvarianceStats:
    """Whether training depends on the loss scale, as one run shows it.

    gradients: how many were judged. found: what depends on it. skipped: why nothing is judged; place: the line that
    prevents it; hint: what to change.
    """

    subject: str
    gradients: int = 0
    found: tuple[Dependence, ...] = ()
    skipped: str = ""
    place: Place = ("", None)
    hint: str = ""

    @property
    def invariant(self) -> bool | None:
        """Whether gradients are equal at every scale; None where that was not seen."""
        if self.skipped or not self.gradients:
            return None
        return all(found.what == RETURNED for found in self.found)


def measure_invariance(subject: str, degrees: Degrees, *, named: bool) -> InvarianceStats:
    """What one run says, as far as it decides. named: whether a mapping names the parts of the loop, so that something
    must have been stepped."""
    degrees.numbers.close()
    stats = InvarianceStats(subject, degrees.looked, tuple(degrees.found))
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


def check_invariance(stats: InvarianceStats, events: Sequence[Event] = ()) -> list[Finding]:
    """`scale-invariance`. events: of the run, in which a penalty of scaled gradients is looked for."""
    if stats.skipped:
        verdict, message = Verdict.INCOMPLETE if stats.hint else Verdict.SKIP, f"not judged: {stats.skipped}"
        where = Where(file=stats.place[0], line=stats.place[1])
        return [SCALE_INVARIANCE.finding(verdict, stats.subject, message, where=where, hint=stats.hint)]
    if stats.found:
        return [_depends(stats.subject, found, events) for found in stats.found]
    text = f"each of {stats.gradients} gradients of optimizers is the same at every loss scale"
    return [SCALE_INVARIANCE.passed(stats.subject, text, stats.gradients)]


def _depends(subject: str, found: Dependence, events: Sequence[Event]) -> Finding:
    power = found.powers[0] if len(found.powers) == 1 else None
    how = "is a sum of parts that depend on it in different ways"
    if power is not None:
        how = "is multiplied by the scale" if power > 0 else "is divided by the scale"
        how += "" if abs(power) == 1 else f" to the power of {abs(power):g}"
    elif found.powers:
        how = "depends on two scales: of two scalers, or from before and after scaler.update()"
    message = f"training must be the same at every loss scale; {found.what} {how}"
    file, line = found.place
    where = Where("update", found.name.rpartition(".")[0], file=file, line=line, step=found.step)
    penalty = next((e for e in events if e.act is Act.GRAD and e.scaled and e.create_graph), None)
    kind, hint = "", _CALLS
    if found.what == RETURNED:
        kind, hint = "returned", _RETURN
    elif penalty is not None:
        kind, hint = "penalty", _PENALTY.format(f"{penalty.file}:{penalty.line}")
    shown = Evidence(where=where, observed=power, limit=0.0, unit="power of the scale", hint=hint, kind=kind)
    return SCALE_INVARIANCE.fail(subject, message, **shown)
