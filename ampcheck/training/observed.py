"""A loop as it runs by itself: what its steps did, and what did not go as a step must."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from ampcheck.autocast.missing import NEEDS_CUDA, not_imitated
from ampcheck.autocast.placement import is_open
from ampcheck.checks import REGISTRY
from ampcheck.checks.always import judge_unfollowed
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.core.environment import quiet
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import listed
from ampcheck.numerics.measure import unfollowed
from ampcheck.numerics.observe import measure_block
from ampcheck.records.gradients import GradientStats
from ampcheck.records.invariance import InvarianceStats
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.protocol import Act, Event, StepError, all_skipped, without_gradients
from ampcheck.records.reductions import ReductionStats
from ampcheck.records.stagnation import StagnationStats
from ampcheck.records.state import Role, StateDtypeStats
from ampcheck.training.distributed.replicas import RankReplicas, ReplicaWatch
from ampcheck.training.following import Following
from ampcheck.training.gradients.watch import FUNCTIONAL
from ampcheck.training.loop import TrainingLoop, parameters_of
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.reductions.sums import reduction_stats
from ampcheck.training.scale.invariance import measure_invariance
from ampcheck.training.stagnation.stagnation import stagnation_stats
from ampcheck.training.state_dtypes.measure import measure_state_dtypes

_LISTED = 3

_OF_GRADIENTS = ("gradient-underflow", "loss-scale", "loss-dtype")
"""Checks that need a backward pass."""

_OF_UPDATES = ("nonfinite-gradient", "stagnation", "resume")
"""Checks that need a weight that changes."""

_BACKWARD = "let step(i) run loss.backward(), or observe as many steps as it takes to reach it ('steps' in the mapping)"

_OPTIMIZER = "let the mapping name the optimizer that steps these weights, and the model that it was built for"

_STILL = (
    "look at the learning rate, and at what happens to gradients between backward and step: zeros and replaced "
    "infinities teach nothing; updates that are too small for a 16-bit weight are reported by stagnation"
)

_ANOTHER = "build the optimizer from the parameters of the model that runs; clear gradients after the step"

_SKIPPED = "gradients were infinite or NaN in every step: see loss-scale for the scales that serve, and the first op"

_UNUSED = (
    "write scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update(), or leave the scaler out: "
    "bfloat16 and float32 need none"
)

_DISABLED = (
    "where this machine lacks the device, autocast and GradScaler do nothing: choose both by the device that is "
    "there, torch.autocast('cpu', dtype) and torch.amp.GradScaler('cpu')"
)

_ITERATOR = "it draws on an iterator that ends: let step(i) depend on i alone, or observe fewer steps (--steps)"

_STOPPED = {
    "raised": (
        "a step must come to its end",
        "run the step by itself; later code was not checked",
    ),
    "memory": (
        "a step must fit into memory",
        "use a smaller batch, model or data set for the audit: it keeps a copy of all that the step reaches "
        "(weights, state, gradients, data), and one more of what training changes",
    ),
    "value": ("a step must return its loss, a float (or a tensor of one element)", "return loss.item()"),
}
"""Requirement and hint for each kind of `StepError`."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Record of a loop that ran by itself.

    losses: what its steps returned. replaced: parameters that the optimizer steps and that are no longer those of the
    model. stepped: whether an optimizer applied a gradient; changed: whether a bit of any weight changed. narrow:
    whether backward ran in 16 bits; None where compiled code hides it. absent: scalers that do nothing, as those for a
    missing device; unused: enabled scalers that no step uses. idle: the first step of an optimizer, if none of all had
    gradients and no parameter changed. empty: whether there is nothing that a step could change. unfollowed: compiled
    code and other threads, which were not judged. values: what the shadow saw of the ops, where it followed the steps.
    undefined: as in `Following`. replicas: what this rank held, of several. scales: how it depends on the loss scale.
    """

    subject: str
    losses: tuple[float, ...] = ()
    events: tuple[Event, ...] = ()
    stopped: StepError | None = None
    residency: StateDtypeStats | None = None
    replaced: tuple[str, ...] = ()
    stepped: bool = True
    changed: bool = True
    narrow: bool | None = None
    absent: tuple[str, ...] = ()
    idle: Event | None = None
    unused: tuple[str, ...] = ()
    empty: bool = False
    gradients: GradientStats | None = None
    updates: StagnationStats | None = None
    sums: ReductionStats | None = None
    places: Mapping[int, Where] = field(default_factory=dict)
    exact: Mapping[int, float] = field(default_factory=dict)
    undefined: frozenset[int] = frozenset()
    unfollowed: Mapping[str, int] = field(default_factory=dict)
    values: NumericsStats | None = None
    replicas: RankReplicas = field(default_factory=RankReplicas)
    scales: InvarianceStats | None = None

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return len(self.losses)

    def place(self, step: int) -> Where | None:
        """Where a step first made an infinity or a NaN; of a place that is known from an earlier step, that one."""
        return None if (made := self.made(step)) is None else self.places[made]

    def made(self, step: int) -> int | None:
        """The step in which an infinity or a NaN of this step was made, as far as its place is known."""
        return next((number for number in range(step, -1, -1) if number in self.places), None)

    @property
    def all_skipped(self) -> bool:
        """True if scalers skipped every optimizer step."""
        return all_skipped(self.events)

    @property
    def learned(self) -> bool:
        """True if a backward pass ran, or `torch.autograd.grad` computed gradients of parameters."""
        compared = self.gradients is not None and bool(self.gradients.gradients)
        return compared or any(event.act is Act.BACKWARD for event in self.events)

    @property
    def functional(self) -> bool:
        """True if all gradients came from `torch.func`, or from `torch.autograd.grad` of other tensors."""
        return not self.learned and any(event.act is Act.GRAD for event in self.events)


class Observation:
    """The record of a loop while its steps run. following: compares what they compute, where that is wanted."""

    def __init__(self, loop: TrainingLoop, recorder: Recorder, following: Following | None) -> None:
        self.loop, self.recorder, self.following = loop, recorder, following
        self.losses: list[float] = []
        self.replicas = ReplicaWatch(loop)
        recorder.on_look = self.replicas.look
        self.stopped: StepError | None = None
        modules = self._in_modules()
        self._owned = {name: parameter for name, parameter in loop.parameters() if id(parameter) in modules}
        self._before = measure_state_dtypes(loop, after_step=False)

    def ended(self, taken: float | StepError) -> None:
        """Record what a step returned, or the error that it ended with."""
        if isinstance(taken, StepError):
            self.stopped = taken
            return
        self.losses.append(taken)
        if self.following is not None:
            self.following.ended(self.recorder.step, taken)

    def result(self) -> Observed:
        """Return what the loop did in the steps that came to their end."""
        loop, losses, stopped = self.loop, self.losses, self.stopped
        events, scalers = tuple(self.recorder.events), loop.scalers
        residency = measure_state_dtypes(loop, after_step=bool(losses), before=self._before)
        steps = {id(p) for optimizer in loop.optimizers.values() for p in parameters_of(optimizer)}
        lost = steps - self._in_modules()
        # The second phase of a script may have a model of its own with the same names, and an optimizer for it.
        taken_over = {name for name, parameter in loop.parameters() if id(parameter) in steps - lost}
        replaced = tuple(n for n, p in self._owned.items() if id(p) in lost and n not in taken_over)
        stepped = any(event.act is Act.OPTIMIZER_STEP and event.gradients for event in events)
        stepped = stepped and not all_skipped(events)  # a fused optimizer is called all the same, its kernel skips
        before, after = _weights(self._before), _weights(residency)
        stored = any(p.is_floating_point() and p.dtype.itemsize <= 2 for _, p in loop.parameters())
        low = stored or any(event.low or event.dtype in ("float16", "bfloat16") for event in events)
        disabled = {path: scaler for path, scaler in loop.reached.scalers.items() if path not in scalers}
        still = {k: v for k, v in after.items() if k[0] is Role.PARAMETER}.items() <= before.items()
        compared: dict[str, Any] = {}
        if (following := self.following) is not None:
            error = f"step {stopped.step}: {stopped.message}" if stopped else ""
            residency = replace(residency, vanished=following.moments.vanished)
            compared = {
                "gradients": following.gradients.result(len(losses)),
                "updates": stagnation_stats(loop, following.updates, error),
                "sums": reduction_stats(following.sums, following.lineage, loop.name),
                "places": following.places,
                "exact": following.exact,
                "undefined": frozenset(following.undefined),
                "unfollowed": unfollowed(following.shadow),
                "scales": measure_invariance(loop.name, following.degrees, named=loop.step is not None),
            }
        present = (loop.device_type, *(["cuda"] if is_open() else []))
        return Observed(
            loop.name,
            tuple(losses),
            events,
            stopped,
            residency=residency,
            replaced=replaced,
            stepped=stepped,
            changed=bool(replaced) or after != before or (stepped and (loop.sharded or not before)),
            narrow=True if low else None if loop.reached.compiled else False,
            absent=tuple(path for path, scaler in disabled.items() if scaler._device not in present),
            idle=without_gradients(events) if still else None,
            unused=() if self.recorder.scaled else tuple(scalers),
            empty=loop.empty,
            replicas=self.replicas.result(events),
            **compared,
        )

    def _in_modules(self) -> set[int]:
        return {id(parameter) for module in self.loop.reached.modules.values() for parameter in module.parameters()}


def observe(loop: TrainingLoop, steps: int, *, follow: bool = True) -> Observed:
    """Run the first steps and record their events. follow: under a shadow, which compares what they compute."""
    recorder = Recorder(loop)
    following = Following(loop, recorder) if follow else None
    seen = Observation(loop, recorder, following)
    with quiet(), recorder.listening(), nullcontext() if following is None else following.degrees.following():
        for taken in recorder.run(steps, following.step if following is not None else None):
            seen.ended(taken)
            if isinstance(taken, StepError):
                break
            if following is not None:
                following.degrees.returned(taken)
    result = seen.result()
    if following is None:
        return result
    following.shadow.reach_ends()
    return replace(result, values=measure_block(following.shadow, loop.name))


def _weights(state: StateDtypeStats) -> dict[tuple[Role, str], int]:
    """The sum of the bits of each trained tensor.

    Copies count too: master weights take up an update that their 16-bit copies cannot represent yet.
    """
    trained = (t for t in state.tensors if t.floating and (t.role in (Role.PARAMETER, Role.COPY) or t.trained))
    return {(tensor.role, tensor.name): tensor.version[-1] for tensor in trained}


def unjudged(findings: Iterable[Finding], seen: Observed) -> list[Finding]:
    """The findings, those incomplete that need a backward pass, an update or a scaler that the steps do not have."""

    def judged(finding: Finding) -> Finding:
        why, hint = _missing(finding, seen)
        if not why:
            return finding
        return replace(finding, verdict=Verdict.INCOMPLETE, message=f"not judged: {why}", hint=hint, seen=0)

    return [judged(finding) for finding in findings]


def _missing(finding: Finding, seen: Observed) -> tuple[str, str]:
    check = finding.check
    if finding.verdict not in (Verdict.PASS, Verdict.SKIP) or not seen.steps:
        return "", ""
    if not seen.learned and check in _OF_GRADIENTS:
        why = FUNCTIONAL if seen.functional else f"no backward pass ran in {seen.steps} steps"
        return why, _BACKWARD
    moved = seen.updates is not None and any(updates.moved for updates in seen.updates.tensors)
    aside = (check == "stagnation" and moved) or (check == "resume" and finding.verdict is Verdict.SKIP)
    if not seen.changed and check in _OF_UPDATES and not aside:
        why = "the scaler skipped every optimizer step, and " if seen.all_skipped else ""
        hint = _SKIPPED if seen.all_skipped else _STILL if seen.stepped else _OPTIMIZER
        return f"{why}no weight changed in {seen.steps} steps", hint
    if seen.unused and check in ("scaler-protocol", "scale-invariance"):
        names = ", ".join(seen.unused)
        return f"{names} is enabled, and no step of {seen.steps} uses it: losses are not scaled", _UNUSED
    return "", ""


def _check_stopped(subject: str, stopped: StepError) -> Finding:
    """`coverage`: a step did not come to its end, by the code's own fault or since it needs CUDA itself."""
    where = Where(op=stopped.op, file=stopped.file, line=stopped.line, step=stopped.step)
    if is_open() and (lack := not_imitated(stopped.message)):
        message = f"not judged from step {stopped.step} on: it needs CUDA itself ({lack}): {stopped.message}"
        return COVERAGE.incomplete(subject, message, where=where, hint=NEEDS_CUDA)
    requirement, hint = _STOPPED[stopped.kind]
    hint = _ITERATOR if stopped.message.startswith("StopIteration") else hint
    return COVERAGE.fail(subject, f"{requirement}; step {stopped.step}: {stopped.message}", where=where, hint=hint)


def check_observed(seen: Observed) -> list[Finding]:
    """`coverage`: the steps came to their end, returned a loss, changed weights, and did something in 16 bits."""
    subject, steps, stopped = seen.subject, seen.steps, seen.stopped
    if seen.empty:
        message = "a training loop needs a module, an optimizer or a tensor that lives across steps; found none"
        hint = "name them: {'model': model, 'optimizer': optimizer, 'scaler': scaler, 'step': step}"
        return [COVERAGE.fail(subject, message, hint=hint)]
    findings: list[Finding] = []
    if stopped is not None:
        findings.append(_check_stopped(subject, stopped))
    if seen.replaced:
        message = (
            "the parameters of a model must stay the same objects, or its optimizer steps others; replaced were "
            f"{listed(seen.replaced, _LISTED)}"
        )
        hint = "write into parameters (parameter.data.copy_), or build a new optimizer"
        findings.append(COVERAGE.fail(subject, message, hint=hint))
    if not steps:
        return findings
    findings += _check_learning(seen)
    if seen.learned and seen.narrow is False and seen.absent:
        names = ", ".join(seen.absent)
        text = f"backward ran in float32 alone, and {names} is disabled: low precision was not judged"
        findings.append(COVERAGE.warn(subject, text, hint=_DISABLED))
    if (unjudged := judge_unfollowed(seen.unfollowed)) is not None:
        verdict, text, hint = unjudged
        findings.append(COVERAGE.finding(verdict, subject, f"{steps} steps ran; {text}", hint=hint))
    if not findings:
        text = f"{steps} steps ran, with {len(seen.events)} backward passes, steps and other events"
        findings.append(COVERAGE.passed(subject, text, steps))
    return findings


def _check_learning(seen: Observed) -> Iterator[Finding]:
    """That steps ran backward, and that optimizers changed weights by it."""
    subject, steps = seen.subject, seen.steps
    if not seen.learned:
        text = f"no backward pass ran in {steps} steps: nothing was learned from gradients, and none judged"
        if seen.functional:
            text = f"{FUNCTIONAL} in {steps} steps: they were not judged"
        yield COVERAGE.warn(subject, text)
    elif seen.idle is not None:
        text = f"an optimizer must step weights that have gradients; {steps} steps ran backward, and none had any in it"
        yield COVERAGE.fail(subject, text, where=seen.idle.where, hint=_ANOTHER)
    elif not seen.changed:
        idle = next((event for event in seen.events if event.act is Act.OPTIMIZER_STEP and not event.gradients), None)
        verdict, where, text = Verdict.WARN, Where(), f"{steps} steps ran backward, and "
        if seen.all_skipped:
            text, hint = f"{text}the scaler skipped every optimizer step: no weight changed", _SKIPPED
            where = Where("update", op="GradScaler.step")
        elif seen.stepped:
            text, hint = f"{text}no bit of any weight changed although optimizers applied gradients", _STILL
        else:
            text, hint = f"{text}no optimizer applied a gradient and no weight changed", _OPTIMIZER
            if idle is not None:
                text, hint = f"an optimizer must step the weights that have gradients; {text}", _ANOTHER
                verdict, where = Verdict.FAIL, idle.where
        yield COVERAGE.finding(verdict, subject, text, where=where, hint=hint)


def prevented(seen: Observed, loop: TrainingLoop, checks: Iterable[str]) -> Iterator[Finding]:
    """Incomplete checks without a first step; skipped where memory was short, or nothing was to judge."""
    memory = seen.stopped is not None and seen.stopped.kind == "memory"
    idle = {"resume": loop.save is None, "scale-invariance": not loop.scalers}
    message = "not judged: step 0 did not finish (see `coverage`)"
    hint = "fix the step that `coverage` names, so that step(0) returns its loss"
    for slug in checks:
        if slug != "scaler-protocol":
            verdict = Verdict.SKIP if memory or idle.get(slug) else Verdict.INCOMPLETE
            yield REGISTRY[slug].finding(verdict, seen.subject, message, hint=hint)
