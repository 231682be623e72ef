"""What an interrupted run and the events of a loop say about its checkpoints. Pure functions to findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampcheck.core.run import Finding, Table, Verdict, Where, passed
from ampcheck.training.protocol.events import Act, Event
from ampcheck.training.resume.interruption import Difference, ResumeStats, measure_resume

__all__ = ["ResumeStats", "check_checkpoint_events", "check_resume", "measure_resume", "resume_table"]

_CHECK = "resume"
_LISTED = 3

_SINGLE = ("scaler", "scheduler", "optimizer state")

_CURES = {
    "scaler": "save scaler.state_dict() and load it with scaler.load_state_dict()",
    "optimizer state": "save optimizer.state_dict() and load it with optimizer.load_state_dict()",
    "optimizer settings": "save optimizer.state_dict() and load it with optimizer.load_state_dict()",
    "scheduler": "save scheduler.state_dict() and load it with scheduler.load_state_dict()",
    "weights": "save model.state_dict() (in the dtype in which it is trained) and load it with model.load_state_dict()",
    "buffers": "save model.state_dict(), and register buffers as persistent",
    "copies of weights": "save the state_dict() of the copy (an EMA, say) and load it with load_state_dict()",
}


def check_resume(stats: ResumeStats) -> list[Finding]:
    """Whether the interrupted run ended as the uninterrupted one did, and if not, what the checkpoint lacks."""
    if stats.skipped:
        verdict = Verdict.INCOMPLETE if stats.prevented else Verdict.SKIP
        hint = "let step(i) depend on i and on what save() keeps, and come to its end" if stats.prevented else ""
        return [Finding(_CHECK, verdict, stats.subject, stats.skipped, hint=hint)]
    requirement = f"{2 * stats.steps} steps with a checkpoint after {stats.steps} must end as they do without"
    if stats.raised:
        hint = "save what torch.save can write, and load it into objects of a new process"
        return [Finding(_CHECK, Verdict.FAIL, stats.subject, f"{requirement}; {stats.raised}", hint=hint)]
    wrong = [one for one in stats.differences if one.what != "losses"]
    if wrong:
        return [_lost(stats, requirement, wrong)]
    if stats.differences:
        message = f"{requirement}; the weights do, the losses do not: {_told(stats.differences)}"
        hint = "what the step returns depends on something that is not saved (a running mean)"
        return [Finding(_CHECK, Verdict.WARN, stats.subject, message, hint=hint)]
    if stats.unaided:
        return [_aided(stats, requirement)]
    text = f"{2 * stats.steps} steps end in the same weights, optimizer state and scale, bit by bit, with a checkpoint"
    text += f" after {stats.steps}"
    unit, seen = "relative difference", 2 * stats.steps
    return [passed(_CHECK, stats.subject, text, seen, observed=0.0, limit=0.0, unit=unit)]


def _lost(stats: ResumeStats, requirement: str, wrong: list[Difference]) -> Finding:
    forgotten = [one for one in stats.forgotten if one.what != "losses"]
    names = ", ".join(one.what for one in forgotten)
    if forgotten:
        told = f"{_told(wrong)}; not as saved after loading: {names} ({forgotten[0].detail})"
        hint = "; ".join(dict.fromkeys(_CURES[one.what] for one in forgotten if one.what in _CURES))
    else:
        told = f"{_told(wrong)}; weights, optimizer, scheduler and scaler were loaded as they were saved"
        hint = "save what else the step changes: a counter, the position in the data, what accumulates"
    where = Where(phase="update", module=wrong[0].names[0], step=stats.steps)
    size = max(one.size for one in wrong)
    message = f"{requirement}; {told}"
    return Finding(_CHECK, Verdict.FAIL, stats.subject, message, where, size, 0.0, "relative difference", hint)


def _aided(stats: ResumeStats, requirement: str) -> Finding:
    if stats.drew:
        what = "the state of the random generators (dropout, the order of the data) is not in the checkpoint"
        hint = "save torch.get_rng_state() (torch.cuda.get_rng_state_all()), and those of numpy and Python"
    else:
        what = "gradients that were accumulating at the interruption are not in the checkpoint"
        hint = "save right after an optimizer step"
    message = f"{requirement}; {what}: {_told(stats.unaided)}"
    return Finding(_CHECK, Verdict.WARN, stats.subject, message, Where(phase="update", step=stats.steps), hint=hint)


def _told(differences: Iterable[Difference]) -> str:
    parts = []
    for one in differences:
        count = f" ({len(one.names)} of them)" if len(one.names) > 1 else ""
        parts.append(f"{one.what} differ{'s' if one.what in _SINGLE else ''}{count}, {one.detail}")
    return "; ".join(parts[:_LISTED])


def resume_table(stats: ResumeStats) -> tuple[Table, ...]:
    """What differed right after loading, and in the end; nothing where nothing did."""
    rows = [
        (when, one.what, len(one.names), one.size, one.detail)
        for when, held in (
            ("after loading", stats.forgotten),
            ("in the end", stats.differences),
            ("in the end, unaided", stats.unaided),
        )
        for one in held
    ]
    if not rows or stats.skipped:
        return ()
    columns = ("when", "what", "how many", "relative difference", "example")
    return (Table(f"An interrupted run beside an uninterrupted one: {stats.subject}", columns, rows, _CHECK),)


def check_checkpoint_events(events: Sequence[Event], subject: str = "subject") -> list[Finding]:
    """What the events of a loop show about the scaler's state: a new scaler that starts over, a checkpoint without it.

    Empty where no scaler took over from another and no checkpoint was written.
    """
    found = [*_taken_over(events, subject), *_checkpoints(events, subject)]
    return [one for one in found if one.verdict is not Verdict.PASS] or found[:1]


def _taken_over(events: Sequence[Event], subject: str) -> list[Finding]:
    """Each scaler of which the first use comes after the last one of another at its place, or with its optimizers."""
    used: dict[str, list[int]] = {}
    for number, event in enumerate(events):
        if event.act in (Act.SCALE, Act.UPDATE, Act.SCALER_STEP) and event.enabled and event.scale is not None:
            used.setdefault(event.who, []).append(number)
    heirs: list[tuple[str, str]] = []
    for who, uses in used.items():
        earlier = [
            other
            for other, theirs in used.items()
            if other != who and theirs[-1] < uses[0] and _same_place(events, who, uses, other, theirs)
        ]
        if not earlier:
            continue
        other = max(earlier, key=lambda one: used[one][-1])
        if not _was_loaded(events, who, used[other][-1], uses[0]):
            heirs.append((who, other))
    found: list[Finding] = []
    for who, other in heirs:
        first, scale = events[used[who][0]], events[used[who][0]].scale
        last = _last_scale(events, used[other])
        updates = sum(events[number].act is Act.UPDATE for number in used[other])
        if last is None or not updates or (scale == last and found):
            continue
        if scale == last:
            verdict = Verdict.FAIL if len(heirs) > 1 else Verdict.WARN
            told = f"the count of its {updates} good steps" if len(heirs) == 1 else "its count of good steps each time"
            seen = f"a new scaler takes over {len(heirs)}x and loses {told}"
        else:
            verdict = Verdict.FAIL
            seen = f"the scale was {last:g} and starts over at {scale:g}"
        message = f"a scaler that takes over must load the state of the one before it; {seen}, at step {first.step}"
        hint = "create the GradScaler once; after a restart call scaler.load_state_dict(checkpoint['scaler'])"
        where = Where(phase="update", module=who, file=first.file, line=first.line, step=first.step)
        found.append(Finding(_CHECK, verdict, subject, message, where, scale, last, "loss scale", hint))
    return found[:_LISTED]


def _place(who: str) -> str:
    return who.partition("#")[0]


def _same_place(events: Sequence[Event], who: str, uses: list[int], other: str, theirs: list[int]) -> bool:
    if _place(who) == _place(other):
        return True
    mine = {name for number in uses for name in events[number].optimizers}
    return bool(mine & {name for number in theirs for name in events[number].optimizers})


def _was_loaded(events: Sequence[Event], who: str, last: int, first: int) -> bool:
    """Whether a state was loaded into a scaler before its first use, or at its place since the other's last use."""
    loads = [(number, event) for number, event in enumerate(events[:first]) if event.act is Act.LOAD]
    return any(one.who == who or (number > last and _place(one.who) == _place(who)) for number, one in loads)


def _last_scale(events: Sequence[Event], uses: list[int]) -> float | None:
    last = events[uses[-1]]
    return last.new_scale if last.act is Act.UPDATE and last.new_scale is not None else last.scale


def _checkpoints(events: Sequence[Event], subject: str) -> list[Finding]:
    """Checkpoints that keep an optimizer, and not, in the same step, the scaler that it is used with."""
    scalers = {event.who for event in events if event.act is Act.SCALE and event.enabled}
    written = [event for event in events if event.act is Act.CHECKPOINT and "optimizer" in event.keys]
    if not scalers or not written:
        return []
    for event in written:
        beside = [one for one in events if one.step == event.step]
        kept = any(one.act is Act.CHECKPOINT and "scaler" in one.keys for one in beside)
        kept = kept or any(one.act is Act.SAVE and one.who in scalers for one in beside)
        if not kept:
            message = (
                "a checkpoint of the optimizer must hold the state of the scaler that it is used with; "
                f"that of step {event.step} holds {', '.join(event.keys)}: after a restart the scale starts over"
            )
            where = Where(phase="update", file=event.file, line=event.line, step=event.step)
            return [Finding(_CHECK, Verdict.FAIL, subject, message, where, hint=_CURES["scaler"])]
    text = f"all {len(written)} checkpoints that hold an optimizer hold the state of the scaler"
    return [passed(_CHECK, subject, text, len(written))]
