"""A region that a block leaves open ends with the block: its own exit, whenever it comes, changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.autocast.emulate import emulate
from ampcheck.autocast.guards.guard import AutocastObservation
from ampcheck.torchtools.global_state import nesting, preserved_state, read_state

Close = Callable[[], object]


def region() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def generator() -> Close:
    def items() -> Generator[int, None, None]:
        with region():
            yield 1
            yield 2

    kept = items()
    next(kept)
    return kept.close


def coroutine() -> Close:
    class Pause:
        def __await__(self) -> Iterator[None]:
            yield

    async def run() -> None:
        with region():
            await Pause()

    kept: Coroutine[Any, Any, None] = run()
    kept.send(None)
    return kept.close


def context_manager() -> Close:
    @contextmanager
    def amp() -> Iterator[None]:
        with region():
            yield

    kept = amp()
    kept.__enter__()
    return lambda: kept.__exit__(None, None, None)


def stack() -> Close:
    kept = ExitStack()
    kept.enter_context(region())
    return kept.close


def by_hand() -> Close:
    kept = region()
    kept.__enter__()
    return lambda: kept.__exit__(None, None, None)


LEFT_OPEN = [generator, coroutine, context_manager, stack, by_hand]
BLOCKS = [preserved_state, lambda: AutocastObservation(["autocast-state"]), AutocastObservation]


@pytest.fixture(params=LEFT_OPEN, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Callable[[], Close]:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("block", BLOCKS, ids=["preserved", "settings", "guard"])
def test_the_exit_of_an_abandoned_region_changes_nothing(
    block: Callable[[], AbstractContextManager[Any]], make: Callable[[], Close]
) -> None:
    before = read_state()
    with block():
        close = make()
    assert read_state() == before
    close()
    assert read_state() == before


def test_it_leaves_a_region_alone_that_is_entered_meanwhile(make: Callable[[], Close]) -> None:
    with preserved_state():
        close = make()
    with torch.autocast("cpu", torch.float16):
        before = read_state()
        close()
        assert read_state() == before
    assert nesting() == 0


def test_it_leaves_the_emulated_device_alone_too(make: Callable[[], Close]) -> None:
    with emulate("cuda"):
        with preserved_state():
            close = make()
        with torch.autocast("cuda", torch.float16):
            before = read_state()
            close()
            assert read_state() == before


def test_a_weight_that_changes_between_regions_is_cast_again_afterwards(make: Callable[[], Close]) -> None:
    with preserved_state():
        close = make()
    close()
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    outputs = []
    for weight in (1.0, 2.0):
        with torch.no_grad():
            layer.weight.fill_(weight)
        with region():
            outputs.append(layer(x)[0, 0].item())
    assert outputs == [4.0, 8.0]


def test_a_region_around_the_block_is_left_as_usual_though_a_generator_is_suspended_in_it(
    make: Callable[[], Close],
) -> None:
    @contextmanager
    def amp() -> Iterator[None]:
        with region():
            yield

    before = read_state()
    with amp():
        with preserved_state():
            close = make()
        assert torch.is_autocast_enabled("cpu")
        assert nesting() == 1
        close()
        assert torch.is_autocast_enabled("cpu")
    assert read_state() == before


def test_a_region_that_is_abandoned_can_be_entered_again() -> None:
    kept = region()
    with preserved_state():
        kept.__enter__()
    before = read_state()
    for _ in range(2):
        with kept:
            assert torch.is_autocast_enabled("cpu")
            assert nesting() == 1
        assert read_state() == before
    assert type(kept) is torch.autocast


def test_a_region_of_another_thread_is_its_own() -> None:
    entered, leave, inside = threading.Event(), threading.Event(), []

    def work() -> None:
        with region():
            entered.set()
            leave.wait(10)
            inside.append((torch.is_autocast_enabled("cpu"), nesting()))
        inside.append((torch.is_autocast_enabled("cpu"), nesting()))

    thread = threading.Thread(target=work)
    with preserved_state():
        thread.start()
        entered.wait(10)
    leave.set()
    thread.join()
    assert inside == [(True, 1), (False, 0)]


def test_a_block_leaves_autocast_itself_as_it_was() -> None:
    before = dict(vars(torch.autocast))
    with preserved_state(), preserved_state():
        generator()
    assert dict(vars(torch.autocast)) == before
