"""Promise: ops of other threads are counted, change nothing that is reported, and what they write enters anew."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from handwritten.loops import batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ampcheck
from ampcheck.core.run import Run, Verdict
from ampcheck.shadow import Shadow


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def in_a_thread(function) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


def unseen(run: Run) -> str:
    return "; ".join(run.coverage.unseen)


def test_a_thread_that_trains_the_same_weights_is_counted_and_is_no_fault() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ampcheck.watch(fail_on="never") as seen:
        for x, y in batches(3):
            take_step(model, optimizer, x, y)
            in_a_thread(lambda x=x, y=y: take_step(model, optimizer, x, y))
        take_step(model, optimizer, x, y)
    assert seen.run.of(Verdict.FAIL) == ()
    assert "ops of other threads" in unseen(seen.run)


@pytest.mark.parametrize("pooled", [False, True])
def test_what_a_thread_writes_into_a_tensor_of_the_block_enters_anew(pooled: bool) -> None:
    with Shadow() as shadow:
        results = torch.zeros(4, 8)
        results.add_(0.0)

        def fill() -> None:
            for row in range(4):
                results[row].copy_(torch.full((8,), float(row + 1)))

        if pooled:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(fill).result()
        else:
            in_a_thread(fill)
        total = results.half().square().sum()
        assert float(shadow.exact(total)) == 8 * (1 + 4 + 9 + 16)
    assert shadow.faults == ()
    assert shadow.unruled["ops of other threads"] == 4  # what `full` made; copies are exact


def test_a_fault_of_this_thread_is_found_while_another_computes() -> None:
    stop, ran = threading.Event(), threading.Event()

    def compute() -> None:
        model = net()
        while not stop.is_set():
            model(torch.randn(4, 6))
            ran.set()

    with Shadow() as shadow:
        thread = threading.Thread(target=compute)
        thread.start()
        assert ran.wait(60)
        try:
            lost = torch.from_numpy(torch.full((4,), 300.0).numpy()).half().square()
            kept = torch.from_numpy(torch.full((4,), 3.0).numpy()).half().square()
        finally:
            stop.set()
            thread.join()
    assert not bool(lost.isfinite().any())
    assert bool(kept.isfinite().all())
    assert [fault.kind for fault in shadow.faults] == ["overflow"]


def test_a_thread_outlives_the_block() -> None:
    start, results = threading.Event(), []

    def compute() -> None:
        start.wait(60)
        results.append(torch.ones(3).half() * 2)

    with Shadow() as shadow:
        thread = threading.Thread(target=compute)
        thread.start()
    start.set()
    thread.join()
    assert results[0].tolist() == [2.0, 2.0, 2.0]
    assert shadow.unruled == {}


def test_a_loader_of_worker_processes() -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, torch.arange(8) % 3), batch_size=4, num_workers=1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampcheck.watch(fail_on="never") as seen:
        for data, labels in loader:
            take_step(model, optimizer, data, labels)
    assert seen.run.of(Verdict.FAIL) == ()


def test_a_thread_that_only_copies_hides_nothing() -> None:
    batch = torch.randn(4, 8)
    with Shadow() as shadow:
        in_a_thread(lambda: batch.clone())
    assert not shadow.unruled
