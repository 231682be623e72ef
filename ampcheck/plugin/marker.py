"""The marker: what it asks for, and the contexts in which the body of a marked test runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest

from ampcheck.core.errors import UsageError

MARKER = (
    "ampcheck(*checks, lock=False, device=None): observe the test's body and fail it with the findings of these "
    "checks, such as 'overflow' or 'autocast-state'; without names, of every check that an observation can judge. "
    "lock=True (or a path): compare what the body sends through autocast with ampcheck.lock.json beside the test. "
    "device='cuda': run the body under that device's autocast policy. With lock or device alone nothing is observed. "
    "The closest marker counts."
)

STATE = "autocast-state"
_GUARDS = ("autocast-", "policy-")
"""How the names of the checks begin that a guard makes; those of an observation are other ones."""


@dataclass(frozen=True)
class Asked:
    """What a marker asks for. checks: of the observation, None for no observation. guards: checks of autocast's use.

    lock: the file, relative to the test's folder, "" for the default one, None for no lock. device: whose policy.
    """

    checks: tuple[str, ...] | None = None
    guards: tuple[str, ...] = ()
    lock: str | None = None
    device: str | None = None

    @classmethod
    def of(cls, marker: pytest.Mark) -> Asked:
        """Read a marker. Raises `UsageError` for what it does not take."""
        __tracebackhide__ = True
        lock, device = marker.kwargs.get("lock", False), marker.kwargs.get("device")
        wrong = [repr(name) for name in marker.args if not isinstance(name, str)]
        wrong += [f"{key}={value!r}" for key, value in marker.kwargs.items() if key not in ("lock", "device")]
        wrong += [] if isinstance(lock, (bool, str)) else [f"lock={lock!r}"]
        wrong += [] if device is None or isinstance(device, str) else [f"device={device!r}"]
        if wrong:
            raise UsageError(
                "the marker ampcheck takes names of checks, such as 'overflow', lock=True or a path, and "
                f"device='cuda', not {', '.join(wrong)}"
            )
        names = tuple(dict.fromkeys(marker.args))
        guards = tuple(name for name in names if name.startswith(_GUARDS))
        checks = tuple(name for name in names if name not in guards)
        observes = bool(checks) or not (guards or lock or device)
        return cls(
            checks if observes else None, guards, (lock if isinstance(lock, str) else "") if lock else None, device
        )


def guarded(asked: Asked | None) -> Asked | None:
    """The same with a guard of autocast's state; without torch there is nothing to guard."""
    if "torch" not in sys.modules:
        return asked
    held = asked or Asked()
    return held if STATE in held.guards else replace(held, guards=(*held.guards, STATE))


@contextmanager
def watched(item: pytest.Item, asked: Asked) -> Iterator[None]:
    """The test's body runs inside; on leaving, `AssertionError` is raised for what the checks found."""
    __tracebackhide__ = True
    with ExitStack() as stack:
        if asked.guards:
            from ampcheck.autocast.guards.guard import guard

            stack.enter_context(guard(*asked.guards, subject=item.nodeid))
        if asked.lock is not None:
            from ampcheck.autocast.locks.lock import lock_path, locked_calls

            folder, name = item.path.parent, item.nodeid.partition("::")[2]
            file = lock_path(folder / asked.lock, folder)
            stack.enter_context(locked_calls(f"{item.path.name}::{name}", file, device=asked.device or "cpu"))
        elif asked.device is not None:
            from ampcheck.autocast.emulate import emulate

            stack.enter_context(emulate(asked.device))
        if asked.checks is not None:
            from ampcheck.numerics.checks import OBSERVABLE
            from ampcheck.watch import watch

            stack.enter_context(watch(checks=asked.checks or OBSERVABLE, name=item.nodeid))
        yield
