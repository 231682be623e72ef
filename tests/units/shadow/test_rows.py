"""Large matrices are followed by the rows that ops read: the same companions and the same faults, in less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampcheck
from ampcheck.facts import rows
from ampcheck.records.faults import FLUSH, OVERFLOW, ZERO
from ampcheck.shadow import Shadow

ROWS, WIDTH = 512, 32
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, 1e-2, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 1e-2, centered=True, momentum=0.9),
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_companions_of_a_large_table_stay_small_when_it_is_trained(name: str, large: None) -> None:
    """So do those of its gradient and of the optimizer's state, which starts as zeros."""
    model = Classifier()
    with Shadow(model) as shadow:
        train(model, OPTIMIZERS[name], steps=2)
    assert shadow.store.nbytes() < model.table.nbytes


@pytest.mark.parametrize("in_place", [False, True])
def test_a_large_constant_overflows(in_place: bool, large: None) -> None:
    constant = torch.ones(ROWS, WIDTH)
    with Shadow() as shadow:
        values = torch.ones_like(constant)
        for _ in range(2):
            values = values.mul_(1e30) if in_place else values * 1e30
    assert {fault.kind for fault in shadow.faults} == {OVERFLOW}


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


def squares(x: torch.Tensor) -> torch.Tensor:
    return (x * x).float().mean()


def squares_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.clone().square_().float().mean()


def clipping(x: torch.Tensor) -> torch.Tensor:
    gradient = x.clone()
    return gradient.mul_(1 / (x * x).sum().float().sqrt())


def conversion(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x.float() * 300.0)


def lookup_first(x: torch.Tensor) -> torch.Tensor:
    F.embedding(torch.arange(4), x)
    return x * x


@pytest.mark.parametrize("number", [ROWS // 2, ROWS, 4 * ROWS])
@pytest.mark.parametrize("function", [squares, squares_in_place, clipping, conversion, lookup_first])
def test_large_data_of_16_bits_overflow_as_small_data_do(
    function: Callable[[torch.Tensor], torch.Tensor], number: int, large: None
) -> None:
    data = (torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(0)) * 300).half()
    with Shadow() as shadow:
        function(data)
    assert OVERFLOW in {fault.kind for fault in shadow.faults}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_row_that_was_not_looked_up_overflows(in_place: bool, large: None) -> None:
    table = torch.ones(ROWS, WIDTH)
    table[7, 5] = 1e30
    with Shadow() as shadow:
        F.embedding(torch.arange(4), table)
        table.mul_(1e20) if in_place else table * 1e20
    assert [(fault.kind, fault.elements) for fault in shadow.faults] == [(OVERFLOW, 1)]


def test_rows_that_are_infinite_on_purpose_are_no_overflow(large: None) -> None:
    table = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    with Shadow() as shadow:
        F.embedding(torch.arange(4), table)
        masked = table.masked_fill(table > 0, -torch.inf)
        table.masked_fill_(table > 0, -torch.inf)
        table.mul_(2.0)
    assert not shadow.faults
    assert torch.equal(shadow.exact(table), 2 * masked.double())


@pytest.mark.parametrize("look", [lambda t, i: F.embedding(i, t), lambda t, i: t.index_select(0, i)])
def test_more_lookups_than_make_a_large_result(
    look: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], large: None
) -> None:
    table = torch.full((8 * ROWS, WIDTH), 1 / 3)
    ids = torch.arange(4 * ROWS, 5 * ROWS).repeat(2)
    with Shadow() as shadow:
        F.embedding(ids, table)
        table[ids] *= 3.0
        rows = look(table, ids)
    assert torch.equal(shadow.exact(rows), shadow.exact(table)[ids])


def test_coverage_says_that_other_rows_restart(large: None) -> None:
    model = Classifier()
    with ampcheck.watch(fail_on="never") as watched:
        train(model, OPTIMIZERS["sgd"], steps=1)
    unseen: dict[str, Any] = dict(watched.run.coverage.unseen)
    assert any("of a large matrix (followed in the rows that ops read)" in reason for reason in unseen)
