"""What autocast really does to real ops is what the probe says, and emulation does the same to CPU tensors.

The oracle runs each op without autocast on tensors that were cast by the rule, and compares every op that runs below,
its dtypes, the result's dtypes and, on real tensors, every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

import op_samples
import pytest
import torch
from op_oracle import Row, compare_devices, compare_emulation, compare_rule

from ampcheck.autocast.probe import measure_policy
from ampcheck.autocast.state import registered
from ampcheck.records.policy import FP32, LOWER, PROMOTE, Policy

DEVICES = ("cpu", "cuda", "xpu", "mps")
PLACES = [*product(DEVICES, [torch.float16]), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16)]
NOT_RUN_BY_FAKE_TENSORS = {"aten::scaled_dot_product_attention"}
"""Its choice of a kernel asks the real device before any kernel runs."""


@pytest.fixture(scope="module")
def calls() -> Iterator[op_samples.Calls]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    yield op_samples.harvest(each=1)
    torch.set_num_threads(threads)


@lru_cache
def policy(device: str, low: torch.dtype) -> Policy:
    return measure_policy(device, low)


def told(rows: list[Row]) -> list[str]:
    return [f"{r.op} ({r.rule}) given {r.given}: {r.difference}: {r.one} against {r.other}" for r in rows]


@pytest.mark.parametrize("device", DEVICES)
def test_there_is_a_call_of_every_overload_that_autocast_knows(device: str, calls: op_samples.Calls) -> None:
    assert set(registered(device)) - set(calls) == set()


@pytest.mark.parametrize(("device", "low"), PLACES, ids=str)
def test_autocast_does_to_every_op_what_the_probed_rule_says(
    device: str, low: torch.dtype, calls: op_samples.Calls
) -> None:
    rows = compare_rule(policy(device, low), low, calls)
    assert told([row for row in rows if row.difference]) == []
    missed = {row.op for row in rows} - {row.op for row in rows if row.looked_at}
    assert missed <= (NOT_RUN_BY_FAKE_TENSORS if device != "cpu" else set())


@pytest.mark.parametrize(("device", "low"), PLACES, ids=str)
def test_under_emulation_every_op_gives_the_bits_that_the_rule_gives(
    device: str, low: torch.dtype, calls: op_samples.Calls
) -> None:
    rows = compare_emulation(policy(device, low), low, calls)
    assert told([row for row in rows if row.difference]) == []
    assert {row.op for row in rows if row.looked_at} == set(registered(device))


@pytest.mark.parametrize("device", DEVICES[1:])
def test_an_emulated_op_gives_the_dtypes_of_the_device_unless_the_kernels_differ_without_autocast(
    device: str, calls: op_samples.Calls
) -> None:
    rows = compare_devices(policy(device, torch.float16), torch.float16, calls)
    assert told([row for row in rows if row.difference and not row.kernel]) == []
    assert sum(not row.difference and not row.one.raised for row in rows) > 500


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_wrong_rule_of_any_op_would_be_seen(device: str, calls: op_samples.Calls) -> None:
    true = policy(device, torch.float16)
    swapped = {LOWER: FP32, FP32: LOWER, PROMOTE: LOWER}
    wrong = {op: replace(p, rule=swapped[p.rule]) for op, p in true.ops.items() if p.rule in swapped}
    rows = compare_rule(replace(true, ops=wrong), torch.float16, calls)
    seen = {row.op for row in rows if row.difference}
    assert len(wrong) > 90
    assert set(wrong) - seen == (NOT_RUN_BY_FAKE_TENSORS if device != "cpu" else set())
