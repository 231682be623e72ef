"""Promise: shards of FSDP2 and DTensor are followed; the run is bit for bit as without a shadow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

FSDP = pytest.mark.needs_torch("2.9", "FSDP2 runs on the CPU")
CASES = ["dtensor", *(["fsdp", "fsdp_bfloat16", "fsdp_overflows"] if hasattr(torch.cpu.Stream, "record_event") else [])]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(Path(__file__).parent / "rank_worker.py", ",".join(CASES), str(folder))
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@FSDP
@pytest.mark.parametrize("case", ["fsdp", "fsdp_bfloat16"])
def test_shards_are_followed_and_unchanged(ranks: list[dict[str, Any]], case: str) -> None:
    """Three steps in 16 bits; the exact shards are those of one process in float64."""
    for seen in (rank[case] for rank in ranks):
        assert seen["same"]
        assert seen["apart"] <= 1e-12
        assert (seen["faults"], seen["unruled"]) == ([], {})


@FSDP
def test_a_fault_inside_a_sharded_module_is_found_at_its_line(ranks: list[dict[str, Any]]) -> None:
    for seen in (rank["fsdp_overflows"] for rank in ranks):
        (failure,) = seen["failures"]
        assert failure[:2] == ["overflow", seen["line"]]
        assert "weight" in failure[2]  # a sharded parameter


def test_ops_of_dtensors_are_followed_and_found_at_their_line(ranks: list[dict[str, Any]]) -> None:
    for seen in (rank["dtensor"] for rank in ranks):
        assert max(seen["apart"]) <= 1e-12
        ((kind, _, line, _),) = seen["faults"]
        assert (kind, line) == ("overflow", seen["line"])
        assert seen["unruled"] == {}
