"""What was written last to a part of a memory holds for it, and nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.facts.parts import PartMap

SIZE = 12
PIECES = st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE), st.integers(1, 3))
"""First element, length and step."""
WRITES = st.lists(st.tuples(PIECES, st.integers(0, 3) | st.none()), max_size=12)
"""Values of pieces; None drops them."""


@given(WRITES, PIECES)
def test_a_part_has_what_its_elements_were_given_last(
    writes: list[tuple[tuple[int, int, int], int | None]], asked: tuple[int, int, int]
) -> None:
    memory, each = torch.zeros(SIZE), [set[int]() for _ in range(SIZE)]
    known = PartMap[frozenset[int]](frozenset.union)
    for (first, length, step), value in writes:
        piece = memory[first : first + length : step]
        if value is not None:
            known.put(piece, frozenset([value]))
        elif piece.is_contiguous():
            known.pop(piece)
        for element in range(SIZE)[first : first + length : step]:
            if value is not None or piece.is_contiguous():
                each[element] = set() if value is None else {value}
    first, length, step = asked
    piece = memory[first : first + length : step]
    wanted = set[int]().union(*each[first : first + length : step])
    found = known.get(piece) or frozenset()
    assert wanted <= found  # a strided tensor may be given what lies between its elements
    dense = [memory[first : first + length : step].is_contiguous() for (first, length, step), _ in writes]
    if piece.is_contiguous() and all(dense):
        assert wanted == found


def test_many_parts_have_the_value_of_all() -> None:
    memory, known = torch.zeros(6000), PartMap[frozenset[int]](frozenset.union)
    for number in range(6000):
        known.put(memory[number : number + 1], frozenset([number % 5]))
    assert known.get(memory) == frozenset(range(5))
    assert known.get(memory[:1]) is not None


def test_what_was_dropped_is_gone_and_the_rest_is_not() -> None:
    memory, known = torch.zeros(4), PartMap[int](max)
    known.put(memory[:2], 1)
    known.put(memory[2:], 2)
    known.pop(memory[2:])
    assert (known.get(memory), known.get(memory[2:])) == (1, None)
    known.put(torch.eye(2).to_sparse(), 3)
    assert known.get(torch.eye(2).to_sparse()) is None


def test_buckets_of_many_parts_are_told_apart_again_and_again() -> None:
    memory, known = torch.zeros(1000), PartMap[int](max)
    for value in (5, 1):
        for number in range(1000):
            known.put(memory[number : number + 1], value)
    assert known.get(memory) == 1
