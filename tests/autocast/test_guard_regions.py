"""Regions that act on other code than the code that they are for, or on none; each defect beside healthy code."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pluggy
import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.autocast.guards.guard import judge_call
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.torchtools.global_state import changed, read_state, restore_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.ones(2, 4)
Case = Callable[[], object]


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = read_state()
    yield
    after = read_state()
    restore_state(before)
    assert changed(before, after) == {}


def region(dtype: torch.dtype = BF16, **options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype, **options)


@contextmanager
def amp() -> Iterator[None]:
    with region():
        yield


@asynccontextmanager
async def async_amp() -> AsyncIterator[None]:
    with region():
        yield


class Amp:
    """A context manager that is a class, around a generator that it resumes itself."""

    def __enter__(self) -> None:
        self.generator = amp.__wrapped__()
        next(self.generator)

    def __exit__(self, *exc: object) -> None:
        next(self.generator, None)


def product() -> torch.dtype:
    return (X @ X.mT).dtype


def judged(function: Case, *checks: str) -> Run:
    return judge_call(function, "it", checks or None)


def findings(run: Run, *verdicts: Verdict) -> list[Finding]:
    return [f for f in run.findings if f.verdict in (verdicts or (Verdict.FAIL, Verdict.WARN, Verdict.INCOMPLETE))]


def line_of(text: str) -> int:
    """The one line of this file that ends with a marker."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return number


# --- a region stays open while its generator or coroutine is suspended


def items(enter: Callable[[], AbstractContextManager[Any]]) -> Iterator[torch.Tensor]:
    with enter():
        for _ in range(2):
            yield X @ X.mT


def leaks(case: Case) -> list[Finding]:
    found = findings(judged(case))
    assert {f.check for f in found} <= {"autocast-state"}
    assert all("suspended" in f.message for f in found)
    return found


@pytest.mark.parametrize("enter", [region, amp, Amp])
def test_a_generator_that_yields_inside_a_region_lends_it_to_the_loop(enter: Any) -> None:
    def loop() -> None:
        for _ in items(enter):
            assert product() is BF16

    assert len(leaks(loop)) == 1


def test_the_finding_is_at_the_line_whose_op_was_cast_and_names_the_line_of_the_region() -> None:
    def lent() -> Iterator[int]:
        with region():  # the region
            yield 1

    def loop() -> None:
        for _ in lent():
            _ = X @ X.mT  # the cast

    (found,) = leaks(loop)
    assert found.where.line == line_of("the cast")
    assert f":{line_of('the region')} stays open" in found.message
    assert "cast float32 to bfloat16" in found.message


def test_a_region_on_an_exit_stack_of_a_generator_is_found() -> None:
    def lent() -> Iterator[int]:
        with ExitStack() as stack:
            stack.enter_context(region())
            yield 1

    assert leaks(lambda: [product() for _ in lent()])


def test_a_generator_around_a_generator_does_not_hide_it() -> None:
    assert leaks(lambda: [product() for _ in (y for y in items(region))])


def test_a_loop_inside_a_coroutine_is_a_consumer() -> None:
    async def loop() -> None:
        for _ in items(region):
            product()

    assert leaks(lambda: asyncio.run(loop()))


def test_an_asynchronous_generator_lends_it_to_its_loop() -> None:
    async def lent() -> AsyncIterator[int]:
        with region():
            yield 1

    async def loop() -> None:
        async for _ in lent():
            product()

    assert leaks(lambda: asyncio.run(loop()))


async def _alone(enter: Callable[[], AbstractContextManager[Any]]) -> None:
    with enter():
        product()
        await asyncio.sleep(0)
        product()


async def _alone_in_async_amp() -> None:
    async with async_amp():
        await asyncio.sleep(0)
        product()


async def _other() -> None:
    product()


@pytest.mark.parametrize("alone", [lambda: _alone(region), lambda: _alone(amp), _alone_in_async_amp])
def test_a_coroutine_that_awaits_inside_a_region_lends_it_to_other_tasks(alone: Any) -> None:
    async def both() -> None:
        await asyncio.gather(alone(), _other())

    assert leaks(lambda: asyncio.run(both()))


@pytest.mark.parametrize("alone", [lambda: _alone(region), lambda: _alone(amp), _alone_in_async_amp])
def test_a_coroutine_that_awaits_inside_a_region_may_do_so_where_no_other_computes(alone: Any) -> None:
    assert not leaks(lambda: asyncio.run(alone()))


def test_what_a_coroutine_awaits_inside_its_region_is_its_own() -> None:
    async def child() -> None:
        await asyncio.sleep(0)
        assert product() is BF16

    async def run() -> None:
        with region():
            await child()
        async with async_amp():
            await child()

    assert not leaks(lambda: asyncio.run(run()))


def test_what_a_generator_yields_from_inside_its_region_is_its_own() -> None:
    def child() -> Iterator[int]:
        assert product() is BF16
        yield 1
        assert product() is BF16

    def parent() -> Iterator[int]:
        with region():
            yield from child()
            product()

    assert not leaks(lambda: list(parent()))


def test_a_generator_that_computes_inside_and_yields_outside_is_right() -> None:
    def lent() -> Iterator[torch.Tensor]:
        for _ in range(2):
            with region():
                y = X @ X.mT
            yield y

    assert not leaks(lambda: [product() for _ in lent()])


@pytest.mark.parametrize("enter", [amp, Amp])
def test_a_context_manager_that_yields_inside_a_region_is_right(enter: Any) -> None:
    def run() -> None:
        with enter():
            assert product() is BF16

    assert not leaks(run)


def test_a_loop_that_runs_nothing_that_autocast_casts_is_right() -> None:
    assert not leaks(lambda: [y.float() + 1 for y in items(region)])
    assert not leaks(lambda: [(y @ y).dtype for y in items(region)])  # which is bfloat16 in any case


@pytest.mark.parametrize("options", [{}, {"enabled": False}])
def test_a_loop_with_a_region_of_its_own_is_right(options: Any) -> None:
    def loop() -> None:
        for _ in items(region):
            with region(**options):
                product()

    assert not leaks(loop)


def test_a_fixture_that_yields_inside_a_region_is_right() -> None:
    """pytest resumes it in a function that has returned when the test runs."""

    def set_up(generator: Iterator[None]) -> None:
        next(generator)

    def run() -> None:
        fixture = amp.__wrapped__()
        set_up(fixture)
        assert product() is BF16
        next(fixture, None)

    assert not leaks(run)


def test_a_hook_wrapper_that_yields_inside_a_region_is_right() -> None:
    spec, impl = pluggy.HookspecMarker("it"), pluggy.HookimplMarker("it")

    class Spec:
        @spec
        def call(self) -> None: ...

    class Wrapper:
        @impl(wrapper=True)
        def call(self) -> Any:
            with region():
                return (yield)

    class Called:
        @impl
        def call(self) -> torch.dtype:
            return product()

    manager = pluggy.PluginManager("it")
    manager.add_hookspecs(Spec)
    manager.register(Wrapper())
    manager.register(Called())
    seen = []
    assert not leaks(lambda: seen.append(manager.hook.call()))
    assert seen == [[BF16]]


def test_a_coroutine_that_enters_a_region_for_its_caller_is_right() -> None:
    async def run() -> None:
        opened = region()

        async def before() -> None:
            await asyncio.sleep(0)
            opened.__enter__()

        await before()
        assert product() is BF16
        opened.__exit__(None, None, None)

    assert not leaks(lambda: asyncio.run(run()))


# --- a region that decorates code which runs later


def _generator() -> Iterator[torch.dtype]:
    yield product()


async def _coroutine() -> torch.dtype:
    return product()


async def _async_generator() -> AsyncIterator[torch.dtype]:
    yield product()


async def _all(values: AsyncIterator[torch.dtype]) -> list[torch.dtype]:
    return [value async for value in values]


RUNS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "generator": (_generator, lambda made: list(made())),
    "coroutine": (_coroutine, lambda made: [asyncio.run(made())]),
    "asynchronous generator": (_async_generator, lambda made: asyncio.run(_all(made()))),
}


@pytest.mark.parametrize("decorate", [region(), amp()], ids=["autocast", "contextmanager"])
@pytest.mark.parametrize("kind", RUNS)
def test_a_region_that_decorates_code_which_runs_later_fails_at_the_function(kind: str, decorate: Any) -> None:
    function, run = RUNS[kind]
    decorated, seen = decorate(function), []
    (found,) = findings(judged(lambda: seen.append(run(decorated))))
    assert seen == [[FP32]]
    assert (found.check, found.verdict) == ("autocast-scope", Verdict.FAIL)
    assert f"the {kind} {function.__name__}" in found.message
    assert found.where.line == function.__code__.co_firstlineno


@pytest.mark.parametrize("kind", RUNS)
def test_a_decorator_that_changes_nothing_where_it_is_called_is_no_defect(kind: str) -> None:
    function, run = RUNS[kind]

    def inside() -> None:
        with region():
            assert run(region()(function)) == [BF16]

    assert not findings(judged(inside))
    assert not findings(judged(lambda: run(region(enabled=False)(function))))


def test_a_decorated_function_is_right_and_so_is_one_that_awaits_its_coroutine() -> None:
    assert not findings(judged(lambda: region()(product)()))
    assert not findings(judged(lambda: amp()(product)()))
    assert not findings(judged(lambda: asyncio.run(async_amp()(_coroutine)())))


# --- code inside a region that leaves the switches changed


def _switch(restore: bool, *, dtype: bool = False) -> None:
    before = torch.get_autocast_dtype("cpu")
    try:
        if dtype:
            torch.set_autocast_dtype("cpu", FP16)
        else:
            torch.set_autocast_enabled("cpu", False)
        raise ValueError
    finally:
        if restore:
            torch.set_autocast_enabled("cpu", True)
            torch.set_autocast_dtype("cpu", before)


@pytest.mark.parametrize("checks", [(), ("autocast-state",)])
@pytest.mark.parametrize("dtype", [False, True])
@pytest.mark.parametrize("restores", [False, True])
def test_a_region_ends_in_the_state_that_it_set(restores: bool, dtype: bool, checks: tuple[str, ...]) -> None:
    def run() -> None:
        with region():  # switched
            with suppress(ValueError):
                _switch(restores, dtype=dtype)
            product()

    found = findings(judged(run, *checks))
    assert [f.check for f in found] == ([] if restores else ["autocast-state"])
    for finding in found:
        assert finding.verdict is Verdict.FAIL
        assert finding.where.line == line_of("switched")
        assert f"ended with autocast {'float16' if dtype else 'off'} on cpu" in finding.message


def test_an_error_that_ends_the_region_too_left_nothing_to_run_in_it() -> None:
    def run() -> None:
        product()
        with suppress(ValueError), region():
            _switch(restore=False)

    assert not findings(judged(run))


# --- a region for a device that no op is on

ABSENT = "cuda" if not torch.cuda.is_available() else "xpu"


def in_region_of(device: str, run: Case, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that it switches the region off
        with torch.autocast(device, BF16, **options):  # for a device
            run()


def test_a_region_for_a_device_that_is_not_there_is_incomplete_and_names_its_line() -> None:
    (found,) = findings(judged(lambda: in_region_of(ABSENT, product)))
    assert (found.check, found.verdict) == ("autocast-scope", Verdict.INCOMPLETE)
    assert found.where.line == line_of("for a device")
    assert f"this machine has no {ABSENT}" in found.message
    assert "computes in bfloat16" in found.message


def test_a_region_for_another_device_than_the_ops_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampcheck.autocast.guards.open_regions._available", lambda device: True)
    (found,) = findings(judged(lambda: in_region_of(ABSENT, product)))
    assert (found.check, found.verdict) == ("autocast-scope", Verdict.WARN)
    assert f"no op ran on {ABSENT}" in found.message


def test_a_training_step_in_such_a_region_is_not_passed() -> None:
    def run() -> None:
        in_region_of(ABSENT, lambda: nn.Linear(4, 1)(X).sum().backward())

    assert [f.check for f in findings(judged(run))] == ["autocast-scope"]
    assert not judged(run).failed


@pytest.mark.parametrize(
    "run",
    [
        lambda: in_region_of(ABSENT, lambda: X + 1),
        lambda: in_region_of(ABSENT, product, enabled=False),
        lambda: in_region_of(ABSENT, lambda: in_region_of("cpu", product)),
        lambda: in_region_of("cpu", lambda: in_region_of(ABSENT, product)),
        lambda: in_region_of(ABSENT, lambda: in_region_of("cpu", product, enabled=False)),
        lambda: in_region_of("cpu", product),
    ],
    ids=["nothing-to-cast", "off", "both", "both-turned", "island", "own"],
)
def test_a_region_that_has_nothing_to_do_or_another_beside_it_is_no_defect(run: Case) -> None:
    assert not findings(judged(run))


def test_under_emulation_the_region_acts() -> None:
    def run() -> None:
        with ampcheck.emulate("cuda"):
            in_region_of("cuda", product)

    assert not findings(judged(run))
