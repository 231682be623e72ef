"""Large matrices are followed by the rows that ops read: the same companions and the same faults, in less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampcheck
from ampcheck.shadow import Shadow, rows
from ampcheck.shadow.faults import FLUSH, OVERFLOW, ZERO

ROWS, WIDTH = 512, 32
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of these tests count as large."""
    monkeypatch.setattr(rows, "LARGE", ROWS * WIDTH)


class Classifier(nn.Module):
    """Looks rows up and classifies them."""

    def __init__(self, lookup: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda w, i: F.embedding(i, w)):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator))
        self.weight = nn.Parameter(torch.randn(5, WIDTH, generator=generator))
        self.lookup = lookup

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.lookup(self.table, ids), self.weight).square().mean()


def train(model: Classifier, make: Callable[..., torch.optim.Optimizer], steps: int = 3) -> list[torch.Tensor]:
    """The losses, the weights and the last gradients."""
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randint(0, ROWS, (4, 5), generator=generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_run_is_untouched(name: str, large: None) -> None:
    plain = train(Classifier(), OPTIMIZERS[name])
    with Shadow() as shadow:
        followed = train(Classifier(), OPTIMIZERS[name])
    assert shadow.store.by_rows
    assert not shadow.unruled
    assert not shadow.faults
    assert all(torch.equal(a, b) for a, b in zip(plain, followed, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_companions_of_rows_equal_those_of_the_whole_table(
    name: str, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact(limit: int) -> list[torch.Tensor]:
        monkeypatch.setattr(rows, "LARGE", limit)
        with Shadow() as shadow:
            values = train(Classifier(), OPTIMIZERS[name], steps=1)
        assert shadow.store.by_rows == (limit <= ROWS * WIDTH)
        return [shadow.exact(value) for value in values]

    ids = torch.randint(0, ROWS, (4, 5), generator=torch.Generator().manual_seed(1)).unique()
    for by_rows, whole in zip(exact(ROWS * WIDTH), exact(1 << 40), strict=True):
        read = (by_rows[ids], whole[ids]) if len(whole.shape) == 2 and len(whole) == ROWS else (by_rows, whole)
        torch.testing.assert_close(*read, rtol=1e-12, atol=1e-15)


def test_companions_of_a_large_table_are_small(large: None) -> None:
    model = Classifier()
    with Shadow(model) as shadow:
        model(torch.arange(8)).backward()
    assert model.table.grad is not None
    assert shadow.store.nbytes() < model.table.nbytes / 2


def test_an_op_that_needs_all_rows_gets_them(large: None) -> None:
    model = Classifier()
    with Shadow(model) as shadow:
        model(torch.arange(8)).backward()
        product = model.table @ model.weight.t()
    expected = model.table.double() @ model.weight.double().t()
    torch.testing.assert_close(shadow.exact(product), expected, rtol=1e-12, atol=1e-12)


def test_what_overwrites_the_table_keeps_its_companions(large: None) -> None:
    table = torch.full((ROWS, WIDTH), 1 / 3)
    with Shadow() as shadow:
        F.embedding(torch.arange(8), table)
        table[3:5] *= 3.0
        table.clamp_(max=0.5)
    expected = torch.full((ROWS, WIDTH), 1 / 3).double()
    expected[3:5] *= 3.0
    assert torch.equal(shadow.exact(table), expected.clamp_(max=0.5))


LOOKUPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda table, ids: F.embedding(ids, table),
    "padded": lambda table, ids: F.embedding(ids, table, padding_idx=3),
    "index_select": lambda table, ids: table.index_select(0, ids.reshape(-1)),
    "index": lambda table, ids: table[ids],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_row_that_overflows_is_found(name: str, large: None) -> None:
    model = Classifier(LOOKUPS[name])
    with torch.no_grad():
        model.table[7] = 1e5
    with Shadow() as shadow, torch.autocast("cpu", torch.float16):
        model(torch.tensor([1, 7, 9])).backward()
    assert OVERFLOW in {fault.kind for fault in shadow.faults}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_gradient_that_is_flushed_is_found(name: str, large: None) -> None:
    model = Classifier(LOOKUPS[name]).half()
    with Shadow() as shadow:
        (model(torch.tensor([1, 7, 9])) * 2.0**-22).backward()
    assert {FLUSH, ZERO} & {fault.kind for fault in shadow.faults if fault.where.phase == "backward"}


def test_coverage_says_that_other_rows_restart(large: None) -> None:
    model = Classifier()
    with ampcheck.watch(raises=False) as watched:
        train(model, OPTIMIZERS["sgd"], steps=1)
    unseen: dict[str, Any] = dict(watched.run.coverage.unseen)
    assert any("of a large matrix (followed in the rows that ops read)" in reason for reason in unseen)
