"""The order that training needs with or without a scaler: clear, backward, step, schedule. Pure: judged from events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ampcheck.records.protocol import OF_STEPS, Act, Event

_REPEATED = 2
"""Steps with gradients of earlier ones as well, from which they count as never cleared."""


def never_cleared(events: Sequence[Event]) -> Iterator[tuple[Event, str]]:
    """The first backward pass that added to gradients of a step before, for each optimizer that goes on with them.

    A GAN leaves such gradients behind, and clears them before it uses them. A scaler need not be in use.
    """
    stepped, added = set[str](), dict[str, Event]()
    repeated = Counter[str]()
    for event in events:
        if event.act is Act.BACKWARD:
            stepped -= set(event.cleared)
            for name in event.cleared:
                added.pop(name, None)
            for name in stepped.intersection(event.optimizers):
                added.setdefault(name, event)
        elif event.act is Act.OPTIMIZER_STEP:
            stepped.add(event.who)
            repeated[event.who] += event.who in added
    for name, event in added.items():
        if repeated[name] >= _REPEATED:
            message = (
                f"gradients must be cleared after the step that used them; those of {name} went into {repeated[name]} "
                "more steps, each time with those of all steps before"
            )
            yield event, message


def limits_follow(clips: Sequence[tuple[Event, float]]) -> bool:
    """Return whether the limits of a call that clips scaled gradients follow the scale: each clip comes with that of
    its gradients.

    Where the scale changes, a right limit changes by the same factor. Where it never does, the loop must have read it,
    and the limit must be nearer to it than to 1, in orders of magnitude: limits of true gradients are about 1.
    """
    limits = {event.limit for event, _ in clips}
    ratios = [event.limit / scale for event, scale in clips if event.limit is not None and scale]
    changed = len({scale for _, scale in clips}) > 1
    if len(ratios) < len(clips) or any(event.scale is None for event, _ in clips) or (changed and len(limits) == 1):
        return False
    constant = max(ratios) <= min(ratios) * (1 + 1e-6)
    return (changed and constant) or all((event.limit or 0.0) ** 2 >= scale for event, scale in clips)


def stepped_first(events: Sequence[Event]) -> tuple[Event, str] | None:
    """A new schedule that moves on before its optimizer was stepped for the first time: its first rate is not used."""
    stepped = set[str]()
    for event in events:
        if event.act in OF_STEPS:
            stepped.update(event.optimizers or (event.who,))
        elif event.act is Act.SCHEDULER_STEP and event.begins and not stepped.intersection(event.optimizers):
            message = (
                f"a scheduler must step after its optimizer; {event.who} moved on before {event.optimizers[0]} was "
                "stepped for the first time, so that no step uses its first learning rate"
            )
            return event, message
    return None
