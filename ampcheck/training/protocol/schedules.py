"""Schedules that go on for an optimizer that another has replaced. Pure: judged from events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ampcheck.training.protocol.events import OF_STEPS, Act, Event

_LEAST = 4
"""Steps of a scheduler after the last one of its optimizer, from which that has more than paused."""

_Turn = tuple[Event, set[str]]
"""A step of a scheduler, and the optimizers that were stepped since its last one."""


def left_behind(events: Sequence[Event]) -> Iterator[tuple[Event, str]]:
    """The first step of each scheduler that goes on although another optimizer has taken the place of its own.

    The other has its name, steps parameters of it, and has no schedule: its learning rates stay as they are, while
    those of the one before go on changing. An optimizer that steps now and then only pauses.
    """
    turns: dict[str, list[_Turn]] = defaultdict(list)
    since: dict[str, set[str]] = defaultdict(set)
    stepped = set[str]()
    for event in events:
        if event.act in OF_STEPS:
            for names in (stepped, *since.values()):
                names.update(event.optimizers or (event.who,))
        elif event.act is Act.SCHEDULER_STEP:
            turns[event.who].append((event, since.pop(event.who, set(stepped))))
            since[event.who] = set()
    scheduled = {name for event in events if event.act is Act.SCHEDULER_STEP for name in event.optimizers}
    for scheduler, of_scheduler in turns.items():
        (own,) = of_scheduler[0][0].optimizers
        in_use = [number for number, (_, names) in enumerate(of_scheduler) if own in names]
        if len(in_use) < 2:
            continue
        pause = max(later - earlier for earlier, later in pairwise(in_use))
        after = of_scheduler[in_use[-1] + 1 :]
        if len(after) < max(_LEAST, 2 * pause) or len({dict(event.rates).get(own) for event, _ in after}) == 1:
            continue
        for name in set.intersection(*(names for _, names in after)) - scheduled:
            rates = {dict(event.rates).get(name) for event, _ in after}
            if name.partition("#")[0] == own.partition("#")[0] and len(rates) == 1 and None not in rates:
                message = (
                    f"a scheduler must belong to the optimizer that steps; {scheduler} was stepped {len(after)} times "
                    f"since {own} was stepped last, and {name}, which has taken its place, keeps its learning rate"
                )
                yield after[0][0], message
