"""Whether the updates of narrow tensors change anything: the record, its tables, and the check `stagnation`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ampcheck.catalog.training import STAGNATION
from ampcheck.core.check import Evidence
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Verdict, Where
from ampcheck.core.text import listed, percent
from ampcheck.records.state import Role
from ampcheck.training.lineage import VanishedConstant
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.stagnation.forecast import AVERAGE, FAR, FOLLOWS, HORIZON, MEAN, SUM, Stop, stops
from ampcheck.training.stagnation.rates import rates_of, share_lost
from ampcheck.training.stagnation.updates import TensorUpdates, UpdateWatch, by_slot, rounds_at_random

_WARNED_FROM = 0.5

_LEAST = 2

_LISTED = 3

_PLURAL = {"other": "tensors of the step", "scaler": "state of the scaler", "copy": "copies"}


@dataclass(frozen=True, slots=True)
class StagnationStats:
    """What became of the updates of a loop in `steps` observed steps.

    looked: tensors that live across steps; narrow: those of them narrower than float32. error: why the loop stopped.
    horizon: how many steps are planned. waiting: narrow parameters that have gradients. counted: in which steps the
    elements that kept their value were counted, "" where float64 says what they should have become.
    """

    subject: str
    steps: int
    looked: int
    narrow: int
    tensors: tuple[TensorUpdates, ...] = ()
    vanished: tuple[VanishedConstant, ...] = ()
    error: str = ""
    horizon: int = HORIZON
    coverage: Coverage = field(default_factory=Coverage)
    waiting: frozenset[str] = frozenset()
    counted: str = ""


def stagnation_stats(loop: TrainingLoop, watch: UpdateWatch, error: str = "") -> StagnationStats:
    """What the updates of the steps that ended came to. error: why the loop stopped."""
    tensors = list(watch.tensors.values())
    modules, rates = {path for path, _ in loop.modules()}, rates_of(loop)
    for updates in tensors:
        updates.settle()
    carriers = {name for updates in tensors for name in updates.carriers}
    for group in by_slot(tensors, {name for name, _ in loop.parameters()}):
        if rounds_at_random(group):
            for updates in group:
                updates.lost, updates.random = 0, True
    horizon = loop.horizon or HORIZON
    for updates in tensors:
        owner = updates.name.rpartition(".")[0]  # of the state of an optimizer, a parameter
        module = next((path for path in (owner, owner.rpartition(".")[0]) if path in modules), "")
        updates.where = replace(updates.where, module=module)
        updates.compensates = updates.name in carriers
        rate = rates.get(updates.name)
        if rate is not None and not updates.random and not updates.carriers:
            updates.rate, updates.largest = rate
            updates.lost_at_largest = share_lost(updates.samples, updates.largest, format_of(updates.dtype))
    endless = watch.restarted | watch.iterates
    known = {n: updates.course(updates.name in endless, horizon) for n, updates in enumerate(tensors)}
    courses = {number: course for number, course in known.items() if course is not None}
    for number, stop in stops(courses, horizon).items():
        tensors[number].stop = stop
    for updates in tensors:
        updates.samples.clear()
    for constant in watch.vanished.values():
        groups = (group for optimizer in loop.optimizers.values() for group in optimizer.param_groups)
        options = (n for g in groups for n, v in g.items() if isinstance(v, float) and v == abs(constant.constant))
        constant.option = next(options, "")
    moved = sum(updates.moved for updates in tensors)
    coverage = Coverage({"tensors across steps": watch.looked, "updates of elements": moved}, watch.unseen)
    vanished = tuple(watch.vanished.values())
    return StagnationStats(
        loop.name,
        watch.steps,
        watch.looked,
        watch.narrow,
        tuple(tensors),
        vanished,
        error,
        horizon,
        coverage,
        frozenset(watch.waiting),
    )


def check_stagnation(stats: StagnationStats, limits: Limits) -> list[Finding]:
    """`stagnation`: what the loop adds to its tensors arrives there.

    Fails, per role, for tensors that lose the share `limits.stagnation` of their updates or of a decay, for those that
    add up increments and will stop, and for constants (an eps) that are zero in their format. Warns where more than
    half of the updates are lost, and where it is doubtful that so many are as would fail.
    """
    if not stats.steps:
        why = f": {stats.error}" if stats.error else ""
        return [STAGNATION.skip(stats.subject, f"nothing was looked at: no step came to its end{why}")]
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
    return STAGNATION.finding(
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
    return STAGNATION.fail(stats.subject, message, where=where, observed=lost, limit=limit, unit="share", hint=hint)


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
        return STAGNATION.fail(stats.subject, message, where=worst.where, observed=stop.steps, unit="steps", hint=hint)
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
    return STAGNATION.finding(
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
    return STAGNATION.fail(stats.subject, message, **shown)


def _passed(stats: StagnationStats, limits: Limits) -> Finding:
    steps = _steps(stats.steps)
    if not stats.narrow:
        text = f"none of the {stats.looked} tensors that live across steps is narrower than float32 ({steps})"
        return STAGNATION.passed(stats.subject, text, stats.looked)
    moved, lost = sum(tensor.moved for tensor in stats.tensors), sum(tensor.lost for tensor in stats.tensors)
    written = {tensor.name for tensor in stats.tensors if tensor.steps or tensor.overwritten}
    hidden = sum(stats.coverage.unseen.values())
    overwritten = sum(tensor.overwritten > 0 for tensor in stats.tensors)
    if not moved and hidden:
        text = "the updates of narrow tensors ran where ops are not seen (compiled code, bits, collectives)"
        return STAGNATION.skip(stats.subject, f"nothing was looked at: {text}")
    if unmoved := sorted(stats.waiting - written) if not hidden else []:
        why = f"{listed(unmoved, _LISTED)} have gradients and were not updated in {steps}"
        hint = "observe as many steps as it takes to step the optimizer ('steps' in the mapping)"
        return STAGNATION.incomplete(stats.subject, f"not judged: {why}", hint=hint)
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
    return STAGNATION.passed(stats.subject, text, seen, observed=worst, limit=limits.stagnation, unit="share")


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
