"""`resume`, as the events of a loop show it: a new scaler that starts over, a checkpoint without the scaler's state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ampcheck.catalog.training import RESUME
from ampcheck.core.check import Evidence
from ampcheck.core.run import Finding, Verdict
from ampcheck.training.protocol.events import Act, Event

_LISTED = 3


def check_checkpoint_events(events: Sequence[Event], subject: str = "subject") -> list[Finding]:
    """Findings about the scaler's state; empty where no scaler replaced another and no checkpoint was written."""
    findings = [*_replacements(events, subject), *_checkpoints(events, subject)]
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
        findings.append(RESUME.finding(verdict, subject, message, **shown))
    return findings[:_LISTED]


def _path(who: str) -> str:
    return who.partition("#")[0]


def _was_loaded(events: Sequence[Event], who: str, last: int, first: int) -> bool:
    """Whether a state was loaded into a scaler before its first use, or under its path since the other's last use."""
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
            return [RESUME.fail(subject, message, where=event.where, hint=hint)]
    text = f"all {len(written)} checkpoints that hold an optimizer hold the state of the scaler"
    return [RESUME.passed(subject, text, len(written))]
