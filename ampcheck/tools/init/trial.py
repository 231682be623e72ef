"""The commands of the process that tries models, locks and scripts: the user's code, in a copy of the repository."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ampcheck.autocast.locks.lock import DEVICES, LockTarget, write_lock
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.process_memory import total_memory
from ampcheck.core.run import Verdict
from ampcheck.core.settings import Target
from ampcheck.target import audit_target
from ampcheck.tools.init.inputs import elements, proposed_inputs, runs, smaller_inputs

LARGE = 10_000_000
"""A model of more parameters is tried in a smaller size first."""

_RAISED = re.compile(r"^the code must run to its end, but it |: later code was not checked$")

_STEPS = 2
"""Steps of a training script that are tried."""

_TRIES = 60
"""So many proposed inputs are tried at most."""

_SLOW = 1e10
"""FLOPs of a forward and backward pass, some 0.3 seconds of a core in float32. An audit runs some fifty of them, those
in 16 bits up to forty times as slow on a CPU without such instructions: inputs of more give way to smaller ones."""

_HEAVY = 2e10
"""FLOPs of a pass above which the tests leave to an audit what takes minutes."""

_PER_WEIGHT = 300
"""FLOPs that take as long as what each weight costs whatever the inputs: copies, and comparisons of its gradient in
float64. The tests of an MLP of 135 million weights and four rows took as long as 500 each."""

_MANY = 200_000
"""Elements of inputs above which smaller ones are tried first."""


class TrialTimeoutError(BaseException):
    """A candidate takes too long. `except Exception` of the user's code does not catch it."""


def _limit_memory() -> None:
    """Let an allocation of more than half of the machine's memory raise, where the system can do so."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        if (total := total_memory()) is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (total // 2, total // 2))


def build(paths: Sequence[str], attempts: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Fields of `Tried`: of the attempt at a candidate that ran, with its number, or the first error.

    paths: for `sys.path`. attempts: the fields of `Attempt`. seconds: of CPU time for all of them.
    """
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv[1:] = ["init"]  # a module that reads the command line when it is imported fails here as under pytest
    _limit_memory()
    errors = list[str]()
    try:
        with _at_most(seconds):
            for number, attempt in sorted(enumerate(attempts), key=lambda each: _is_large(each[1])):
                try:
                    return {"number": number, **_run(attempt)}
                except Exception as raised:  # noqa: BLE001, PERF203  # the user's code may raise anything
                    errors.append(brief(as_result(raised)))
    except TrialTimeoutError:
        errors.insert(0, _took_longer(seconds))
    except SystemExit:
        errors.insert(0, "its module exits when it is imported, as scripts do that read their command line there")
    except BaseException as raised:  # noqa: BLE001
        errors.insert(0, brief(as_result(raised)))
    return {"error": errors[0]}


def lock(target: str, seconds: float) -> str:
    """Write the policy lock of a factory next to its file: why it could not be written, "" where it was."""
    try:
        with _at_most(seconds):
            write_lock(LockTarget.of(target), DEVICES, ("float16", "bfloat16"))
    except TrialTimeoutError:
        return _took_longer(seconds)
    except Exception as raised:  # noqa: BLE001  # the user's code may raise anything
        return brief(as_result(raised))
    return ""


def rehearse(target: str, device: str, seconds: float) -> str:
    """Train two steps of a target: why it trained none, "" where it did."""
    file = os.path.abspath(target.rpartition(":")[0])
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == file]:
        del sys.modules[name]  # an earlier version of the file
    try:
        with _at_most(seconds):
            run = audit_target(Target(target, device=device, compile=False, steps=_STEPS))
    except TrialTimeoutError:
        return f"two steps take longer than {seconds:g} s of CPU time"
    except UsageError as error:
        return brief(error)
    if run is None or run.coverage.seen.get("steps"):
        return ""
    reasons = [finding.message for finding in run.by("coverage") if finding.verdict is not Verdict.PASS]
    reason = next(iter(reasons), "it stepped no optimizer")
    return _RAISED.sub("", reason)


def _took_longer(seconds: float) -> str:
    return f"it took longer than {seconds:g} s of CPU time"


def _is_large(attempt: dict[str, Any]) -> bool:
    """Return whether a model has more than `LARGE` parameters, counted without their memory."""
    try:
        namespace = _namespace(attempt)
        with torch.device("meta"):
            model: Any = _built(attempt, namespace)
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
    model = _built(attempt, namespace)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{attempt['code']} is a {type(model).__name__}, no nn.Module")
    errors = list[str]()
    own = attempt["inputs"]
    first = (*(smaller_inputs(own) if own and elements(own) > _MANY else ()), *([own] if own else ()))
    proposed = islice(proposed_inputs(model), _TRIES)
    found = next(_running(model, chain(first, proposed), namespace, errors), None)
    if found is None:
        raise ValueError(errors[0] if errors else "no inputs found that it takes")
    if found[1] > _SLOW:
        found = next(_running(model, smaller_inputs(found[0]), namespace, errors), found)
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"inputs": found[0], "parameters": count, "heavy": found[1] + _PER_WEIGHT * count > _HEAVY}


def _running(
    model: nn.Module, proposed: Iterable[str], namespace: dict[str, Any], errors: list[str]
) -> Iterator[tuple[str, int]]:
    """The inputs from which the model trains, each with the FLOPs of the pass. errors: gets why others do not."""
    for inputs in proposed:
        try:
            trains = runs(model, eval(inputs, namespace))
        except Exception as raised:  # noqa: BLE001  # the user's code may raise anything
            errors.append(f"no inputs found that it takes; with {inputs}: {brief(as_result(raised))}")
            continue
        if trains:
            yield inputs, _flops(model, eval(inputs, namespace))
        else:
            errors.append(f"with {inputs} no parameter gets a gradient")


def _flops(model: nn.Module, inputs: object) -> int:
    """FLOPs of a pass, which a busy machine does not change; those that were counted where a mode breaks the model."""
    counter = FlopCounterMode(display=False)
    with suppress(Exception), counter:
        runs(model, inputs)
    return counter.get_total_flops()


def _built(attempt: dict[str, Any], namespace: dict[str, Any]) -> object:
    for line in attempt["setup"]:
        exec(line, namespace)
    return eval(attempt["code"], namespace)
