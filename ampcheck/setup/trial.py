"""The command of the process that builds and runs candidates: the user's code, in a copy of the repository."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch
from torch import nn

from ampcheck.core.errors import as_result, brief
from ampcheck.core.process_memory import total_memory
from ampcheck.setup.inputs import proposed_inputs, runs

LARGE = 10_000_000
"""A model of more parameters is tried in a smaller size first."""

_TRIES = 60
"""So many proposed inputs are tried at most."""

_SLOW = 3.0
"""Seconds of a forward and backward pass; inputs of an example that take longer give way to proposed ones."""


class TrialTimeoutError(BaseException):
    """A candidate takes too long. `except Exception` of the user's code does not catch it."""


def _limit_memory() -> None:
    """Let an allocation of more than half of the machine's memory raise, where the system can do so."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        if (total := total_memory()) is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (total // 2, total // 2))


def build(paths: Sequence[str], attempts: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The attempt at a candidate that ran, with its inputs, or the first error.

    paths: for `sys.path`. attempts: the fields of `Attempt`. seconds: of CPU time for all of them.
    """
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv[1:] = ["init"]  # a module that reads the command line when it is imported fails here as under pytest
    _limit_memory()
    errors = list[str]()
    try:
        with _at_most(seconds):
            for attempt in sorted(attempts, key=_is_large):
                try:
                    return _run(attempt)
                except Exception as raised:  # noqa: BLE001, PERF203  # the user's code may raise anything
                    errors.append(brief(as_result(raised)))
    except TrialTimeoutError:
        errors.insert(0, f"it took longer than {seconds:g} s of CPU time")
    except SystemExit:
        errors.insert(0, "its module exits when it is imported, as scripts do that read their command line there")
    except BaseException as raised:  # noqa: BLE001
        errors.insert(0, brief(as_result(raised)))
    return {"error": errors[0]}


def _is_large(attempt: dict[str, Any]) -> bool:
    """Whether a model has more than `LARGE` parameters, counted without their memory."""
    try:
        namespace = _namespace(attempt)
        with torch.device("meta"):
            model = eval(attempt["code"], namespace)
        return bool(sum(parameter.numel() for parameter in model.parameters()) > LARGE)
    except Exception:  # noqa: BLE001  # it is built with memory next, which gives the reason
        return False


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def end(_signal: int, _frame: object) -> None:
        raise TrialTimeoutError

    if not hasattr(signal, "setitimer"):  # Windows: the parent's limit alone counts
        yield
        return
    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time: a busy machine changes no verdict
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _namespace(attempt: dict[str, Any]) -> dict[str, Any]:
    namespace: dict[str, Any] = {"torch": torch}
    for line in attempt["imports"]:
        exec(line, namespace)
    return namespace


def _run(attempt: dict[str, Any]) -> dict[str, Any]:
    namespace = _namespace(attempt)
    torch.manual_seed(0)
    model = eval(attempt["code"], namespace)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{attempt['code']} is a {type(model).__name__}, no nn.Module")
    error, slow = "", dict[str, Any]()
    own = attempt["inputs"]
    for inputs in (*([own] if own else []), *islice(proposed_inputs(model), _TRIES)):
        begin = time.monotonic()
        try:
            trains = runs(model, eval(inputs, namespace))
        except Exception as raised:  # noqa: BLE001
            error = error or f"no inputs found that it takes; with {inputs}: {brief(as_result(raised))}"
            continue
        if not trains:
            error = error or f"with {inputs} no parameter gets a gradient"
            continue
        took = time.monotonic() - begin
        count = sum(parameter.numel() for parameter in model.parameters())
        result = {**attempt, "inputs": inputs, "parameters": count, "seconds": took}
        if took <= _SLOW or inputs != own:
            return slow if slow and took > slow["seconds"] else result
        slow = result
    if slow:
        return slow
    raise ValueError(error or "no inputs found that it takes")
