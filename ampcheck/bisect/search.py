"""The search by halves, on plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator


def first_change(count: int, state: Callable[[int], Hashable | None]) -> tuple[int, int]:
    """Where the state of `count` items changes from that of the first: the last item before, the first one after.

    state: of an item by its number; None where it is not known, which is never read as either side. Those of the first
    and the last must be known, and differ. The two numbers are neighbours, unless the states of all items between them
    are unknown. Of several changes this finds one.
    """
    low, high, before = 0, count - 1, state(0)
    while high - low > 1:
        known = ((number, found) for number in _halves(low, high) if (found := state(number)) is not None)
        number, found = next(known, (low, None))
        if found is None:
            break
        low, high = (number, high) if found == before else (low, number)
    return low, high


def _halves(low: int, high: int) -> Iterator[int]:
    """The numbers between two: the middle, then the middles of both halves, and so on; neighbours fail together."""
    waiting = deque([(low, high)])
    while waiting:
        start, end = waiting.popleft()
        middle = (start + end) // 2
        if start < middle < end:
            yield middle
            waiting += [(start, middle), (middle, end)]
