"""A block is timed until the device has finished it."""

from __future__ import annotations

import time

import pytest

from ampcheck import UsageError
from ampcheck.speed.clock import CudaClock, WallClock, clock_of, summarised


def test_a_block_lasts_at_least_as_long_as_its_calls() -> None:
    assert WallClock().block(lambda: time.sleep(0.002), 3) >= 0.006


def test_a_device_is_synchronised_once_a_block_inside_the_timed_stretch() -> None:
    done: list[str] = []
    clock = WallClock(lambda: done.append("synchronised") or time.sleep(0.003))  # type: ignore[func-returns-value]
    assert clock.block(lambda: done.append("call"), 2) >= 0.003
    assert done == ["call", "call", "synchronised"]


def test_what_the_machine_did_is_kept_as_lowest_and_highest() -> None:
    told = summarised([{"load": 1.0, "MHz": 2500.0}, {"load": 3.0}])
    assert told == {"load, lowest": 1.0, "load, highest": 3.0, "MHz, lowest": 2500.0, "MHz, highest": 2500.0}


def test_the_load_of_this_machine_is_told() -> None:
    assert clock_of("cpu").conditions()["load"] >= 0


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:99"])
def test_a_device_that_cannot_be_timed_is_refused_in_a_sentence(device: str) -> None:
    with pytest.raises(UsageError, match="use --device cpu"):
        clock_of(device)


@pytest.mark.cuda
def test_events_time_what_the_device_does_and_not_what_the_host_waits() -> None:
    import torch

    clock = clock_of("cuda")
    assert isinstance(clock, CudaClock)
    x = torch.randn(4096, 4096, device="cuda")
    long = clock.block(lambda: x @ x, 10)
    assert long > 5 * clock.block(lambda: x[:512] @ x[:, :512], 10)
    assert set(clock.conditions()) <= {"MHz", "degrees"}, "each only where NVML can be asked"
