"""The marker: its arguments, and the contexts in which the body of a marked test runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.core.plan import Plan
from ampcheck.core.subject import Subject

_STATE = "autocast-state"
_GUARDS = ("autocast-", "policy-")
"""Prefixes of the checks of a guard; all other checks are those of an observation."""

_PARITY = "parity"
"""The check of what a test returns."""


@dataclass(frozen=True)
class MarkerArguments:
    """The arguments of a marker. checks: of the observation, None for no observation. guards: checks of a guard.

    lock: the file, relative to the test's folder, "" for the default one, None for no lock. device: whose policy is
    emulated. speed: defaults of the fixture `speed`. parity: compare the two executions that the test returns.
    """

    checks: tuple[str, ...] | None = None
    guards: tuple[str, ...] = ()
    lock: str | None = None
    device: str | None = None
    speed: Mapping[str, object] = field(default_factory=dict)
    parity: bool = False

    @classmethod
    def of(cls, item: pytest.Item) -> MarkerArguments:
        """The arguments of a test's closest marker, if it has one. Raises `UsageError` for invalid ones."""
        __tracebackhide__ = True
        marker = item.get_closest_marker("ampcheck")
        if marker is None:
            return cls()
        options = dict(marker.kwargs)
        lock, device, speed = options.pop("lock", False), options.pop("device", None), options.pop("speed", None)
        wrong = [repr(name) for name in marker.args if not isinstance(name, str)]
        wrong += [f"{key}={value!r}" for key, value in options.items()]
        wrong += [] if isinstance(lock, (bool, str)) else [f"lock={lock!r}"]
        wrong += [] if device is None or isinstance(device, str) else [f"device={device!r}"]
        wrong += [] if speed is None or isinstance(speed, Mapping) else [f"speed={speed!r}"]
        if wrong:
            raise UsageError(
                "the marker ampcheck takes names of checks, such as 'overflow', lock=True or a path, device='cuda', "
                f"and speed={{'at_least': 1.2}}, not {', '.join(wrong)}"
            )
        parity = _PARITY in marker.args
        names = tuple(dict.fromkeys(name for name in marker.args if name != _PARITY))
        guards = tuple(name for name in names if name.startswith(_GUARDS))
        checks = tuple(name for name in names if name not in guards)
        observes = bool(checks) or not (guards or lock or device or parity or speed is not None)
        file = (lock if isinstance(lock, str) else "") if lock else None
        return cls(checks if observes else None, guards, file, device, speed or {}, parity)

    def plan(self, body: str) -> Plan:
        """Return what is judged of a test's body, of this name; the checks are empty where nothing is."""
        checks = self.checks or ()
        if self.checks == ():
            from ampcheck.watch_families import OP_CHECKS

            checks = OP_CHECKS
        subject = Subject(lambda: None, body)  # which pytest runs
        return Plan(subject, checks=(*checks, *self.guards), emulated=self.device or "")

    def with_guard(self) -> MarkerArguments:
        """The same with a guard of autocast's state; unchanged if torch is not imported."""
        if "torch" not in sys.modules or _STATE in self.guards:
            return self
        return replace(self, guards=(*self.guards, _STATE))


def compare_returned(item: pytest.Function) -> bool:
    """Return whether the marker of a test asks to compare the two executions that it returns; runs the test and
    compares them.

    Raises what `assert_parity` raises, and `UsageError` for a test that returns no pair.
    """
    __tracebackhide__ = True
    if not MarkerArguments.of(item).parity:
        return False
    from ampcheck.parity import assert_parity

    returned = item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
    pair = returned if isinstance(returned, tuple) else (returned,)
    if not 2 <= len(pair) <= 4 or not isinstance(pair[-1] if len(pair) == 4 else {}, Mapping):
        raise UsageError(
            "a test that is marked with 'parity' returns (a, b), (a, b, args) or (a, b, args, options of "
            f"assert_parity); found {returned!r:.80}"
        )
    assert_parity(*pair[:3], **dict(*pair[3:]))
    return True


@contextmanager
def observed(item: pytest.Item, *, guard: bool) -> Iterator[None]:
    """Run the test's body inside, in the contexts that its marker and `--ampcheck-guard` require.

    What they raise names the place; it has no frames of ours.
    """
    __tracebackhide__ = True
    arguments = MarkerArguments.of(item)
    if guard:
        arguments = arguments.with_guard()
    raised: BaseException | None = None
    try:
        with run_marked(item, arguments):
            try:
                yield
            except BaseException as error:
                raised = error
                raise
    except (AssertionError, UsageError) as error:
        if error is raised:
            raise
        raise error.with_traceback(None) from None


@contextmanager
def run_marked(item: pytest.Item, arguments: MarkerArguments) -> Iterator[None]:
    """Run the test's body inside; raise `AssertionError` with the failures of the checks on leaving."""
    __tracebackhide__ = True
    plan = arguments.plan(item.nodeid)
    with ExitStack() as stack:
        if arguments.lock is not None:
            from ampcheck.autocast.locks.lock import lock_path, locked_calls

            folder, name = item.path.parent, item.nodeid.partition("::")[2]
            file = lock_path(folder / arguments.lock, folder)
            stack.enter_context(locked_calls(f"{item.path.name}::{name}", file, device=plan.policy))
        elif arguments.device is not None:
            from ampcheck.autocast.emulate import emulate

            stack.enter_context(emulate(plan.emulated))
        if plan.checks:
            from ampcheck.watch import watch

            stack.enter_context(watch(checks=plan.checks, name=plan.subject.name))
        yield
