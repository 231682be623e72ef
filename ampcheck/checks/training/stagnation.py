"""Requires: The updates of a tensor change it, now and in the steps that are planned. Fails where 90 % (the limit
stagnation) of the updates of a tensor narrower than float32 change nothing; where an average (a second moment, running
statistics, an EMA) will stand still further than 20 % of its size from what it follows, or does so already further than
10 %; where a weight decay leaves the values as they are, where a sum or counter will stop, and where an optimizer's eps
is zero in the format. Warns where more than half of the updates are lost, and where an average will stand still between
10 % and 20 % of its size away.

Measured: Float64 is carried along with every tensor of the steps. For each tensor narrower than float32 that lives
across steps (parameters, optimizer state, copies, buffers) it says what the first updates should have been, in
whichever steps they come. An element whose update is not zero there, and which holds the same value afterwards, has
lost it. What another tensor holds instead (a float32 copy, a compensation) is not lost; what is rounded at random is no
update. A weight decay is judged by its own multiplication. What is added to an average or a sum in the observed steps,
and the part of itself that it keeps, say where it stops: an average at a distance of half of the spacing divided by 1 -
decay, between u / 2 and u (the unit roundoff) of its size by 1 - decay, less what its values vary by; a sum where its
increment is half of the spacing. The observed addends are replayed up to there, for the planned steps: 'horizon' in the
mapping, else 10,000. Updates of a warm-up are judged at the largest learning rate that PyTorch's schedulers wrote
beside it. Compiled code is not measured. ampcheck.watch compares 16-bit weights before and after each measured step,
and with their values at the first of them; a float32 copy in the optimizer's state is no stagnation.

Causes: Weights in bfloat16 with a small learning rate: an element moves from about 1/256 of its value on. beta2 = 0.999
and averages of decay 0.999 in bfloat16; batch norm with momentum 0.01. self.step += 1 in a buffer that model.bfloat16()
casts: it stops at 256 (2048 in float16). Running losses in 16 bits. eps=1e-8 in float16.

Fix: Keep it exact: float32 master weights or state, Kahan summation, stochastic rounding. Keep counters as integers,
averages and sums in float32, and use an eps that the format holds (1e-4 in float16).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ampcheck.core.check import Check, Evidence
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import Kind
from ampcheck.core.text import listed, percent
from ampcheck.records.stagnation import (
    AVERAGE,
    FAR,
    FOLLOWS,
    MEAN,
    SUM,
    StagnationStats,
    Stop,
    TensorUpdates,
    VanishedConstant,
)
from ampcheck.records.state import Role

CHECK = Check(
    "stagnation",
    "training",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("StagnationStats",),
    order=606,
    evidence=("tests/corpus/training/adam_eps_zero_in_half", "tests/corpus/training/center_buffer_in_half"),
)

_WARNED_FROM = 0.5

_LEAST = 2

_LISTED = 3

_PLURAL = {"other": "tensors of the step", "scaler": "state of the scaler", "copy": "copies"}


def check(stats: StagnationStats, limits: Limits) -> list[Finding]:
    """Check that what the loop adds to its tensors arrives there.

    Fails, per role, for tensors that lose the share `limits.stagnation` of their updates or of a decay, for those that
    add up increments and will stop, and for constants (an eps) that are zero in their format. Warns where more than
    half of the updates are lost, and where it is doubtful that so many are as would fail.
    """
    if not stats.steps:
        why = f": {stats.error}" if stats.error else ""
        return [CHECK.skip(stats.subject, f"nothing was looked at: no step came to its end{why}")]
    findings: list[Finding] = []
    judged = [tensor for tensor in stats.tensors if not tensor.compensates]
    for role in dict.fromkeys(tensor.role for tensor in judged):
        findings += _of_role(stats, [tensor for tensor in judged if tensor.role == role], limits)
    findings += [_vanished(stats, constant) for constant in stats.vanished]
    return findings or [_passed(stats, limits)]


def _of_role(stats: StagnationStats, tensors: list[TensorUpdates], limits: Limits) -> Iterable[Finding]:
    rest = [tensor for tensor in tensors if tensor.stop is None]
    parameters = Role.PARAMETER.value  # one that a weight decay multiplies is no average
    judged = [t for t in rest if (t.role == parameters or not t.averages) and t.steps > t.overwritten]
    many = [tensor for tensor in judged if tensor.share >= limits.stagnation]
    failed = [tensor for tensor in many if tensor.moved >= _LEAST and not tensor.doubt]
    stuck = [tensor for tensor in rest if tensor not in failed and tensor.decay.share >= limits.stagnation]
    if failed:
        yield _lost(stats, failed, Verdict.FAIL, limits)
    if stuck:
        yield _decay(stats, stuck, limits)
    for kind in (AVERAGE, MEAN, SUM):
        stopped = [(tensor, tensor.stop) for tensor in tensors if tensor.stop and tensor.stop.kind == kind]
        far = [(t, s) for t, s in stopped if kind == SUM or s.distance > FAR or t.share >= limits.stagnation]
        if far:
            yield _stops(stats, far, Verdict.FAIL)
        if near := [pair for pair in stopped if pair not in far]:
            yield _stops(stats, near, Verdict.WARN)
    known = (*failed, *stuck)
    warned = [t for t in judged if t not in known and (t in many if t.doubt else t.share > _WARNED_FROM)]
    if warned:
        yield _lost(stats, warned, Verdict.WARN, limits)


def _lost(stats: StagnationStats, tensors: list[TensorUpdates], verdict: Verdict, limits: Limits) -> Finding:
    ranked = _ranked(tensors, lambda tensor: tensor.share)
    worst, limit = ranked[0], limits.stagnation if verdict is Verdict.FAIL else _WARNED_FROM
    unit = format_of(worst.dtype).unit_roundoff
    message = (
        f"updates must change what they are added to, but of the updates of {_names(ranked)} in {worst.dtype} "
        f"{percent(worst.share)} changed nothing in {_steps(worst.steps)} (limit {percent(limit)})"
    )
    if worst.lost_at_largest is not None:
        message += f", computed at the largest learning rate, {worst.largest:.2g} (now {worst.rate:.2g})"
    if worst.doubt:
        message += f" ({worst.doubt})"
    norm = f"In norm they are {worst.relative_update:.2g} of the values; in" if not stats.counted else "In"
    message += (
        f": they are below half of the spacing. {norm} {worst.dtype} an element moves from about {unit:.2g} of its "
        "value on"
    )
    if stats.counted:
        message += f" ({stats.counted})"
    where, hint = worst.where, _cures(worst)
    return CHECK.finding(
        verdict, stats.subject, message, where=where, observed=worst.share, limit=limit, unit="share", hint=hint
    )


def _decay(stats: StagnationStats, tensors: list[TensorUpdates], limits: Limits) -> Finding:
    ranked = _ranked(tensors, lambda tensor: tensor.decay.share)
    worst = ranked[0]
    decay, lost = worst.decay, worst.decay.share
    what = "weight decay" if worst.role == "parameter" else "decay"
    message = (
        f"a decay must make values smaller, but {what} of {_names(ranked)} by {decay.factor:.6g} leaves "
        f"{percent(lost)} of the nonzero elements as they are: in {worst.dtype} a change of "
        f"{1.0 - decay.factor:.2g} is below half of the spacing"
    )
    if worst.role != "parameter":
        message += ", so the values grow and never shrink"
    where, limit, hint = replace(worst.where, op=decay.op), limits.stagnation, _cures(worst)
    return CHECK.fail(stats.subject, message, where=where, observed=lost, limit=limit, unit="share", hint=hint)


def _stops(stats: StagnationStats, tensors: list[tuple[TensorUpdates, Stop]], verdict: Verdict) -> Finding:
    """Tensors that stop in one way, the first of them first."""
    tensors = sorted(tensors, key=lambda pair: -pair[1].distance if pair[1].kind != SUM else pair[1].steps)
    (worst, stop), names, s = tensors[0], _names([tensor for tensor, _ in tensors]), "s" * (len(tensors) == 1)
    when = "now" if not stop.steps else f"after about {stop.steps:,} more steps"
    seen = f"; in {_steps(worst.steps)} {percent(worst.share)} of its updates changed nothing" if worst.lost else ""
    hint = "keep it in float32"
    if stop.kind == SUM:
        exact = format_of(worst.dtype).largest_exact_integer
        message = (
            f"a sum must go on growing, but {names} add{s} up about {stop.increment:.3g} a step in {worst.dtype}, "
            f"which holds whole numbers up to {exact} only: it stops at about {stop.value:.4g}, {when}, unless it is "
            f"reset before; after {stats.horizon:,} steps {percent(stop.distance)} of it would be missing"
        )
        if stop.increment == round(stop.increment):
            hint = "keep it in an integer or float32 tensor (an integer buffer is not cast by .bfloat16() or .half())"
        return CHECK.fail(stats.subject, message, where=worst.where, observed=stop.steps, unit="steps", hint=hint)
    if stop.kind == MEAN:
        message = (
            f"a mean must take in every value, but {names} in {worst.dtype} take{s} the mean of all values so far, and "
            f"{when} a further value, {percent(stop.distance)} away, changes it by less than half of the spacing"
        )
    else:
        what = "an average must follow its values" if stop.increment else "a decay must make values smaller"
        message = (
            f"{what}, but {names} keep{s} {stop.gain:.6g} of itself in a step: in "
            f"{worst.dtype} a distance of up to {percent(stop.distance)} of its size changes it by less than half of "
            f"the spacing, so that it stands still {when}{seen}"
        )
    where, hint, limit = worst.where, _cures(worst), FAR if verdict is Verdict.FAIL else FOLLOWS
    return CHECK.finding(
        verdict, stats.subject, message, where=where, observed=stop.distance, limit=limit, unit="of its size", hint=hint
    )


def _vanished(stats: StagnationStats, constant: VanishedConstant) -> Finding:
    name = f"{constant.option} of the optimizer, " if constant.option else ""
    of = listed(constant.of, _LISTED) or "a tensor of the loop"
    message = (
        f"a constant that guards must not vanish, but {name}{constant.constant:.3g}, rounds to zero in "
        f"{constant.dtype}, so it no longer prevents a division by zero: it is added to what {of} gives, and "
        f"{constant.zeros} of the results were exactly zero"
    )
    form = format_of(constant.dtype)
    hint = (
        f"use {constant.option or 'a constant'} of at least {form.smallest_subnormal:.2g}, the smallest value that "
        f"{constant.dtype} holds (1e-4 keeps its digits), or keep the state in float32 or bfloat16"
    )
    where, limit = Where("update", op=constant.op, file=constant.file, line=constant.line), form.flushes_at
    shown = Evidence(where=where, observed=abs(constant.constant), limit=limit, hint=hint, kind="guard")
    shown["names"] = constant.of
    return CHECK.fail(stats.subject, message, **shown)


def _passed(stats: StagnationStats, limits: Limits) -> Finding:
    steps = _steps(stats.steps)
    if not stats.narrow:
        text = f"none of the {stats.looked} tensors that live across steps is narrower than float32 ({steps})"
        return CHECK.passed(stats.subject, text, stats.looked)
    moved, lost = sum(tensor.moved for tensor in stats.tensors), sum(tensor.lost for tensor in stats.tensors)
    written = {tensor.name for tensor in stats.tensors if tensor.steps or tensor.overwritten}
    hidden = sum(stats.coverage.unseen.values())
    overwritten = sum(tensor.overwritten > 0 for tensor in stats.tensors)
    if not moved and hidden:
        text = "the updates of narrow tensors ran where ops are not seen (compiled code, bits, collectives)"
        return CHECK.skip(stats.subject, f"nothing was looked at: {text}")
    if unmoved := sorted(stats.waiting - written) if not hidden else []:
        why = f"{listed(unmoved, _LISTED)} have gradients and were not updated in {steps}"
        hint = "observe as many steps as it takes to step the optimizer ('steps' in the mapping)"
        return CHECK.incomplete(stats.subject, f"not judged: {why}", hint=hint)
    text = f"{stats.narrow} of {stats.looked} tensors that live across steps are narrower than float32"
    if moved:
        most = _steps(max(tensor.steps for tensor in stats.tensors))
        text += f"; of {moved:,} updates of their elements {percent(lost / moved)} changed nothing in {most}"
    else:
        text += f"; none of them was updated in {steps}"
    if overwritten:
        text += f"; {overwritten} are overwritten with values from elsewhere"
    if carried := sum(bool(tensor.carriers) for tensor in stats.tensors):
        text += f"; what {carried} of them lose is kept in another tensor"
    if hidden:
        text += f"; {hidden} changes came from ops that cannot be followed"
    if stats.counted:
        text += f"; {stats.counted}"
    worst = max((tensor.share for tensor in stats.tensors if not tensor.compensates), default=0.0)
    seen = moved + overwritten + stats.looked - stats.narrow  # no update is lost in float32
    return CHECK.passed(stats.subject, text, seen, observed=worst, limit=limits.stagnation, unit="share")


def _cures(tensor: TensorUpdates) -> str:
    wide = "float32 master weights" if tensor.role == "parameter" else "float32 for this tensor"
    return f"keep it exact: {wide}, Kahan summation or stochastic rounding"


def _ranked(tensors: list[TensorUpdates], key: Callable[[TensorUpdates], float]) -> list[TensorUpdates]:
    return sorted(tensors, key=lambda tensor: (-key(tensor), -tensor.elements))


def _names(ranked: list[TensorUpdates]) -> str:
    role = ranked[0].role
    kind = _PLURAL.get(role, role if role == Role.STATE.value else f"{role}s")
    return f"{kind} {listed((one.name for one in ranked), _LISTED)}"


def _steps(steps: int) -> str:
    return "one step" if steps == 1 else f"{steps} steps"
