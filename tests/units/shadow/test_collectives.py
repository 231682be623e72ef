"""Promise: companions of all ranks travel with collectives; a sum over ranks that loses values is found at its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import needs_gloo, run_ranks

pytestmark = [needs_gloo, pytest.mark.needs_torch("2.8", "gloo's reduce_scatter")]

CASES = [
    "collectives", "received", "lone", "too_large", "overflows", "overflows_elsewhere", "flushes", "loses_digits",
    "ddp", "ddp_compressed", "ddp_compressed_overflows",
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("collectives")
    run_ranks(Path(__file__).parent / "rank_worker.py", ",".join(CASES), str(folder))
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def both(ranks: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [rank[case] for rank in ranks]


def test_exact_is_the_collective_in_float64(ranks: list[dict[str, Any]]) -> None:
    for seen in both(ranks, "collectives"):
        assert len(seen["apart"]) >= 16
        assert {name: apart for name, apart in seen["apart"].items() if apart > 1e-12} == {}
        assert (seen["unruled"], seen["faults"]) == ({}, [])


def test_what_is_received_from_one_process_restarts_and_is_counted(ranks: list[dict[str, Any]]) -> None:
    sender, receiver = both(ranks, "received")
    assert receiver["restarted"]
    assert list(receiver["unruled"]) == ["c10d::recv_: the companions of other ranks are not known"]
    assert sender["unruled"] == {}
    assert sender["faults"] == receiver["faults"] == []


def test_a_shadow_on_one_rank_waits_for_nothing_and_says_what_it_does_not_know(ranks: list[dict[str, Any]]) -> None:
    seen, other = both(ranks, "lone")
    assert seen["same"]
    assert other["same"]
    assert seen["faults"] == []
    assert len(seen["unruled"]) == 4


def test_companions_beyond_the_limit_of_size_restart(ranks: list[dict[str, Any]]) -> None:
    for seen in both(ranks, "too_large"):
        assert seen["faults"] == []
        assert sum(seen["unruled"].values()) == 1


@pytest.mark.parametrize(
    ("case", "check"),
    [("overflows", "overflow"), ("flushes", "silent-zero"), ("ddp_compressed_overflows", "overflow"),
     ("loses_digits", "precision-loss")],
)  # fmt: skip
def test_a_sum_over_ranks_that_loses_values_is_found_at_its_line(
    ranks: list[dict[str, Any]], case: str, check: str
) -> None:
    for seen in both(ranks, case):
        assert [failure[:2] for failure in seen["failures"]] == [[check, seen["line"]]], seen


def test_a_fault_on_one_rank_is_no_fault_of_the_collective(ranks: list[dict[str, Any]]) -> None:
    sound, faulty = both(ranks, "overflows_elsewhere")
    assert sound["faults"] == []
    ((kind, _, line, reaches),) = faulty["faults"]
    assert (kind, line) == ("overflow", faulty["line"])
    assert reaches


@pytest.mark.parametrize("case", ["ddp", "ddp_compressed"])
def test_ddp_is_followed_and_unchanged(ranks: list[dict[str, Any]], case: str) -> None:
    """Buckets, a hook that compresses to float16, synchronised buffers; exact is one process in float64."""
    for seen in both(ranks, case):
        assert seen["same"]
        assert seen["apart"] <= 1e-12
        assert (seen["faults"], seen["unruled"]) == ([], {})
