"""Requires: A run that is interrupted, saved and loaded ends in the same weights, optimizer state and loss scale as one
that is not, bit by bit. Warns when only random numbers, accumulating gradients or the reported losses differ.

Measured: A run of 2 N steps; then N steps, save(), torch.save and torch.load in memory, back to the state at the start
as a new process has it, load(checkpoint), N more. Scalers start from a scale that a new one does not have. What differs
right after loading is named. A loop that is not deterministic is skipped. In the events of a loop, a scaler that takes
over from another without its state, and a checkpoint of the optimizer without the scaler, fail as well.

Causes: The scaler's or the scheduler's state_dict() is not in the checkpoint, the EMA is not, a GradScaler is created
again, weights are saved in 16 bits.

Fix: Save and load the state_dict() of model, optimizer, scaler, scheduler and EMA; create the scaler once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import Kind
from ampcheck.records.protocol import Act, Event
from ampcheck.records.resume import NOT_DECLARED, UNIT, Difference, ResumeStats, SavedStates

CHECK = Check(
    "resume",
    "training",
    __doc__,
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("SavedStates", "ResumeStats"),
    order=605,
    evidence=("tests/corpus/training/scaler_left_out_of_the_checkpoint", "reference: a new scaler in each epoch"),
)

_LISTED = 3
_SINGULAR = ("scaler", "scheduler", "optimizer state")

_HINTS = {
    "scaler": "save scaler.state_dict() and load it with scaler.load_state_dict()",
    "optimizer state": "save optimizer.state_dict(), in the dtypes that it has, and load it with "
    "optimizer.load_state_dict()",
    "optimizer settings": "save optimizer.state_dict() and load it with optimizer.load_state_dict()",
    "scheduler": "save scheduler.state_dict() and load it with scheduler.load_state_dict()",
    "weights": "save model.state_dict() (in the dtype in which it is trained) and load it with model.load_state_dict()",
    "buffers": "save model.state_dict(), and register buffers as persistent",
    "copies of weights": "save the state_dict() of the copy (an EMA, say) and load it with load_state_dict()",
}


def check(record: SavedStates | ResumeStats, limits: Limits) -> list[Finding]:
    """The interrupted run ends as the uninterrupted one does; checkpoints hold the state of the scaler."""
    return _of_calls(record) if isinstance(record, SavedStates) else _of_run(record)


def _of_run(stats: ResumeStats) -> list[Finding]:
    """Return whether the interrupted run ended as the uninterrupted one did, and if not, what the checkpoint lacks."""
    subject, steps = stats.subject, stats.steps
    if stats.skipped == NOT_DECLARED:
        return [CHECK.skip(subject, stats.skipped)]
    if stats.skipped:
        hint = "let step(i) depend on i and on what save() keeps, and come to its end"
        return [CHECK.incomplete(subject, stats.skipped, hint=hint)]
    requirement = f"{2 * steps} steps with a checkpoint after {steps} must end as they do without"
    if stats.raised:
        hint = "save what torch.save can write, and load it into objects of a new process"
        return [CHECK.fail(subject, f"{requirement}; {stats.raised}", hint=hint)]
    wrong = [difference for difference in stats.differences if difference.what != "losses"]
    if wrong:
        forgotten = [difference for difference in stats.forgotten if difference.what != "losses"]
        message = f"{requirement}; {_listed(wrong)}"
        if forgotten:
            names = ", ".join(difference.what for difference in forgotten)
            message += f"; not as saved after loading: {names} ({forgotten[0].detail})"
            hint = "; ".join(dict.fromkeys(_HINTS[d.what] for d in forgotten if d.what in _HINTS))
        else:
            message += "; weights, optimizer, scheduler and scaler were loaded as they were saved"
            hint = "save what else the step changes: a counter, the position in the data, what accumulates"
        where, size = Where(phase="update", module=wrong[0].names[0], step=steps), max(d.size for d in wrong)
        return [CHECK.fail(subject, message, where=where, observed=size, limit=0.0, unit=UNIT, hint=hint)]
    if stats.differences:
        message = f"{requirement}; the weights do, the losses do not: {_listed(stats.differences)}"
        hint = "what the step returns depends on something that is not saved (a running mean)"
        return [CHECK.warn(subject, message, hint=hint)]
    if stats.unaided:
        what = "gradients that were accumulating at the interruption are not in the checkpoint"
        hint = "save right after an optimizer step"
        if stats.drew:
            what = "the state of the random generators (dropout, the order of the data) is not in the checkpoint"
            hint = "save torch.get_rng_state() (torch.cuda.get_rng_state_all()), and those of numpy and Python"
        message = f"{requirement}; {what}: {_listed(stats.unaided)}"
        return [CHECK.warn(subject, message, where=Where(phase="update", step=steps), hint=hint)]
    text = f"{2 * steps} steps end in the same weights, optimizer state and scale, bit by bit, with a checkpoint"
    return [CHECK.passed(subject, f"{text} after {steps}", 2 * steps, observed=0.0, limit=0.0, unit=UNIT)]


def _listed(differences: Iterable[Difference]) -> str:
    parts = []
    for difference in differences:
        count = f" ({len(difference.names)} of them)" if len(difference.names) > 1 else ""
        verb = "differs" if difference.what in _SINGULAR else "differ"
        parts.append(f"{difference.what} {verb}{count}, {difference.detail}")
    return "; ".join(parts[:_LISTED])


def _of_calls(calls: SavedStates) -> list[Finding]:
    """The scaler's state; empty where no scaler replaced another and no checkpoint was written."""
    findings = [*_replacements(calls.events, calls.subject), *_checkpoints(calls.events, calls.subject)]
    return [finding for finding in findings if finding.verdict is not Verdict.PASS] or findings[:1]


def _replacements(events: Sequence[Event], subject: str) -> list[Finding]:
    """Each scaler that replaces another, under its name or with its optimizers, without loading its state."""
    used: dict[str, list[int]] = defaultdict(list)
    resumed = {name for event in events if event.act is Act.LOAD for name in event.optimizers}
    optimizers: dict[str, set[str]] = defaultdict(set)
    for number, event in enumerate(events):
        if event.act in (Act.SCALE, Act.UPDATE, Act.SCALER_STEP) and event.enabled and event.scale is not None:
            used[event.who].append(number)
            optimizers[event.who].update(event.optimizers)
    heirs: list[tuple[str, str]] = []
    for who, uses in used.items():
        before = [name for name, theirs in used.items() if name != who and theirs[-1] < uses[0]]
        # A fold, or another phase, begins with a new optimizer; one that goes on loads the state of the last one.
        begins = bool(optimizers[who]) and not optimizers[who] & resumed
        shared = [name for name in before if optimizers[who] & optimizers[name]]
        earlier = shared or [name for name in before if _path(who) == _path(name) and not begins]
        other = max(earlier, key=lambda name: used[name][-1], default=None)
        if other is not None and not _was_loaded(events, who, used[other][-1], uses[0]):
            heirs.append((who, other))
    findings: list[Finding] = []
    for who, other in heirs:
        first = events[used[who][0]]
        previous = events[used[other][-1]]
        scale, last = first.scale, previous.scale if previous.new_scale is None else previous.new_scale
        updates = sum(events[number].act is Act.UPDATE for number in used[other])
        if last is None or not updates or (scale == last and findings):
            continue
        if scale == last:
            verdict = Verdict.FAIL if len(heirs) > 1 else Verdict.WARN
            lost = f"the count of its {updates} good steps" if len(heirs) == 1 else "its count of good steps each time"
            observed = f"a new scaler takes over {len(heirs)}x and loses {lost}"
        else:
            verdict, observed = Verdict.FAIL, f"the scale was {last:g} and starts over at {scale:g}"
        message = f"a scaler that takes over must load the state of the one before it; {observed}, at step {first.step}"
        hint = "create the GradScaler once; after a restart call scaler.load_state_dict(checkpoint['scaler'])"
        where = replace(first.where, module=who)
        shown = Evidence(where=where, observed=scale, limit=last, unit="loss scale", hint=hint)
        findings.append(CHECK.finding(verdict, subject, message, **shown))
    return findings[:_LISTED]


def _path(who: str) -> str:
    return who.partition("#")[0]


def _was_loaded(events: Sequence[Event], who: str, last: int, first: int) -> bool:
    """Return whether a state was loaded into a scaler before its first use, or under its path since the other's last
    use."""
    loads = [(number, event.who) for number, event in enumerate(events[:first]) if event.act is Act.LOAD]
    return any(name == who or (number > last and _path(name) == _path(who)) for number, name in loads)


def _checkpoints(events: Sequence[Event], subject: str) -> list[Finding]:
    """A checkpoint with an optimizer must contain its scaler, or another of the same step must."""
    scalers = {event.who for event in events if event.act is Act.SCALE and event.enabled}
    written = [event for event in events if event.act is Act.CHECKPOINT and "optimizer" in event.keys]
    if not scalers or not written:
        return []
    saving = {
        event.step
        for event in events
        if (event.act is Act.CHECKPOINT and "scaler" in event.keys) or (event.act is Act.SAVE and event.who in scalers)
    }
    for event in written:
        if event.step not in saving:
            message = (
                "a checkpoint of the optimizer must hold the state of the scaler that it is used with; "
                f"that of step {event.step} holds {', '.join(event.keys)}: after a restart the scale starts over"
            )
            hint = "save scaler.state_dict() and load it with scaler.load_state_dict()"
            return [CHECK.fail(subject, message, where=event.where, hint=hint)]
    text = f"all {len(written)} checkpoints that hold an optimizer hold the state of the scaler"
    return [CHECK.passed(subject, text, len(written))]
