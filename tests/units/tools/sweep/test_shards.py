"""Shards of a sweep: each target in one of them, the same on each machine, of about the same cost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Table
from ampcheck.tools.sweep.listing import Entry
from ampcheck.tools.sweep.shards import costs_of, github_matrix, parse_shard, split


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=60), st.integers(1, 12))
def test_shards_part_the_list_and_none_exceeds_the_mean_by_more_than_one_target(seconds: list[float], n: int) -> None:
    entries = [Entry(f"m.py:t{i}") for i in range(len(seconds))]
    n = min(n, len(entries))
    costs = {entry.target: cost for entry, cost in zip(entries, seconds, strict=True)}
    shards = split(entries, n, costs)
    assert shards == split(list(entries), n, dict(reversed(costs.items())))
    assert sorted(entry.target for shard in shards for entry in shard) == sorted(costs)
    loads = [sum(costs[entry.target] for entry in shard) for shard in shards]
    assert max(loads) <= sum(seconds) / n + max(seconds) + 1e-6
    assert all(shard == [entry for entry in entries if entry in shard] for shard in shards)  # in the list's order


@pytest.mark.parametrize("costs", [{}, {f"m.py:t{i}": 0.0 for i in range(10)}])
def test_targets_of_equal_cost_are_dealt_out(costs: dict[str, float]) -> None:
    entries = [Entry(f"m.py:t{i}") for i in range(10)]
    assert [len(shard) for shard in split(entries, 4, costs)] == [3, 3, 2, 2]
    with pytest.raises(UsageError, match="11 shards need as many targets; there are 10 targets"):
        split(entries, 11, costs)


def test_costs_are_those_of_an_earlier_run_and_of_a_new_target_the_median(tmp_path: Path) -> None:
    entries = [Entry("m.py:M[slow]"), Entry("m.py:a"), Entry("m.py:b"), Entry("m.py:new")]
    rows = [("slow", "pass", 60.0), ("m.py:a", "fail", 2), ("m.py:b", "pass", 1.0), ("m.py:gone", "pass", 900.0)]
    path = tmp_path / "earlier.json"
    Run(tables=(Table("Targets", ("target", "verdict", "seconds"), rows),)).save(path)
    costs = costs_of(str(path), entries)
    assert costs == {"m.py:M[slow]": 60.0, "m.py:a": 2.0, "m.py:b": 1.0, "m.py:new": 2.0}
    twins = [Entry("m.py:M[slow]"), Entry("n.py:M[slow]"), Entry("m.py:b")]
    assert costs_of(str(path), twins) == dict.fromkeys((entry.target for entry in twins), 1.0)  # whose is not known
    matrix = json.loads(github_matrix(entries, 2, costs))
    assert matrix == {
        "include": [{"shard": "1/2", "targets": 1, "minutes": 1.0}, {"shard": "2/2", "targets": 3, "minutes": 0.1}]
    }
    wrong = [("m.py:a", "pass", value) for value in (-1.0, math.nan, math.inf, "3", True, None)]
    Run(tables=(Table("Targets", ("target", "verdict", "seconds"), wrong),)).save(tmp_path / "wrong.json")
    with pytest.raises(UsageError, match=r"wrong\.json has seconds of none"):
        costs_of(str(tmp_path / "wrong.json"), entries)
    with pytest.raises(UsageError, match=r"earlier\.json has seconds of none"):
        costs_of(str(path), [Entry("m.py:other")])


@pytest.mark.parametrize("text", ["0/4", "5/4", "a/b", "1", "1/0", "-1/4", "1/4/2", "1.0/4", "", "٢/٤"])
def test_a_shard_is_a_number_of_as_many(text: str) -> None:
    with pytest.raises(UsageError, match="--shard takes k/n"):
        parse_shard(text)
    assert parse_shard("4/4") == (4, 4)
