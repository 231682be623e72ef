"""What was written last to a part of a memory holds for it, and nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.facts.parts import PartMap

SIZE = 12
PIECES = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE), st.integers(1, 3))
WRITES = st.lists(st.tuples(PIECES, st.integers(0, 3)), max_size=12)


@given(WRITES, PIECES)
def test_a_part_has_what_its_elements_were_given_last(
    writes: list[tuple[tuple[int, int, int], int]], asked: tuple[int, int, int]
) -> None:
    memory, each = torch.zeros(SIZE), [set[int]() for _ in range(SIZE)]
    known = PartMap[frozenset[int]](frozenset.union)
    for (first, length, step), value in writes:
        known.put(memory[first : first + length : step], frozenset([value]))
        for element in range(SIZE)[first : first + length : step]:
            each[element] = {value}
    first, length, step = asked
    wanted = set[int]().union(*each[first : first + length : step])
    found = known.get(memory[first : first + length : step]) or frozenset()
    assert wanted <= found  # a strided tensor may be given what lies between its elements
    if step == 1 and all(step == 1 or length == 1 for (_, length, step), _ in writes):
        assert wanted == found


def test_many_parts_have_the_value_of_all() -> None:
    memory, known = torch.zeros(2000), PartMap[frozenset[int]](frozenset.union)
    for number in range(600):
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
