"""The search by halves finds a planted change in few looks, and never reads what is not known as either side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ampcheck.tools.bisect.judge import first_change


@given(st.integers(2, 400), st.data())
def test_one_change_is_found_in_as_many_looks_as_halves(count: int, data: st.DataObject) -> None:
    change = data.draw(st.integers(1, count - 1))
    looks: list[int] = []

    def state(number: int) -> str:
        looks.append(number)
        return "after" if number >= change else "before"

    assert first_change(count, state) == (change - 1, change)
    assert len(looks) - 1 <= (count - 1).bit_length()


@given(st.integers(3, 60), st.data())
def test_unknown_items_widen_the_answer_and_never_move_it(count: int, data: st.DataObject) -> None:
    change = data.draw(st.integers(1, count - 1))
    unknown = data.draw(st.sets(st.integers(1, count - 2)))

    def state(number: int) -> bool | None:
        return None if number in unknown else number >= change

    low, high = first_change(count, state)
    assert low < change <= high
    assert low not in unknown
    assert high not in unknown
    assert set(range(low + 1, high)) <= unknown


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=2, max_size=60))
def test_of_several_changes_one_is_found(states: list[str]) -> None:
    if states[0] == states[-1]:
        return
    low, high = first_change(len(states), states.__getitem__)
    assert high == low + 1
    assert states[low] == states[0] != states[high]
