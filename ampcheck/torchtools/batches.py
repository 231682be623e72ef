"""The batches of a training loop that takes its data from a loader: kept once, and played again by their number."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.subject import Subject
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.reachable import reach
from ampcheck.torchtools.snapshot import generators_only, preserved


class Playback:
    """`step(batch)` as a function of the number of the step.

    Each call gets a copy, so that a step may change its batch. After the last batch the first one comes again.
    """

    def __init__(self, step: Callable[[Any], Any], batches: list[Any]) -> None:
        self.step, self.batches = step, batches

    def __call__(self, number: int) -> Any:
        """The result of the step with this number."""
        with without_modes():
            batch = copy.deepcopy(self.batches[number % len(self.batches)])
        return self.step(batch)


def played(subject: Subject, steps: int) -> Subject:
    """A training loop whose `step(i)` plays the first `steps` batches of its `"data"`; without data the loop itself.

    A loader that ends before is begun again, as for the next epoch. Random generators, those of the loader included,
    are restored afterwards. Raises `UsageError` for data that are no iterable, end too early, raise or cannot be
    copied, and for a step that does not take one argument.
    """
    shape: Mapping[str, Any] = subject.shape
    if "data" not in shape:
        return subject
    step = shape["step"]
    _require_one_argument(step, subject.name)
    batches = _kept(shape["data"], steps, subject.name)
    parts = {key: value for key, value in shape.items() if key != "data"}
    return replace(subject, shape={**parts, "step": Playback(step, batches)})


def _require_one_argument(step: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a builtin
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise UsageError(
            f"with 'data', the step of {name} is called as step(batch), with one argument; found step{signature}"
        ) from error


def _kept(data: Any, count: int, name: str) -> list[Any]:
    """Copies of the first batches: a loader may fill the same memory again."""
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise UsageError(f"data of {name} must be an iterable of batches; found {type(data).__name__}")
    batches: list[Any] = []
    with preserved(generators_only(reach(_parts(data)))):
        while len(batches) < count:
            before = len(batches)
            try:
                for batch in islice(data, count - before):
                    batches.append(_copied(batch, name, len(batches)))
            except UsageError:
                raise
            except BaseException as error:  # the user's loader may raise anything
                raise UsageError(
                    f"data of {name} raised {brief(as_result(error))} after {len(batches)} batches"
                ) from error
            if len(batches) == before:
                ended = f"ended after {before} of {count} batches, and began no second time" if before else "is empty"
                raise UsageError(
                    f"data of {name} {ended}: pass an iterable that can begin again, such as a DataLoader, a longer "
                    "one, or fewer steps (--steps)"
                )
    return batches


def _copied(batch: Any, name: str, number: int) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception as error:
        raise UsageError(
            f"batch {number} of data of {name} cannot be copied, and so not be played again: {brief(error)}"
        ) from error


def _parts(data: Any) -> dict[str, Any]:
    """The data and what may hold their random generators: data set, samplers."""
    parts: dict[str, Any] = {"data": data}
    for path in ("", "sampler", "batch_sampler"):
        owner = getattr(data, path, None) if path else data
        parts |= {f"{path}.{key}": value for key, value in getattr(owner, "__dict__", {}).items()}
    return parts
