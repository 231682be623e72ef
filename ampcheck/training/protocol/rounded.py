"""Float32 weights that something rounds to 16 bits between steps: `model.half()` for an evaluation, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ampcheck.catalog.training import STAGNATION
from ampcheck.core.check import Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.text import listed
from ampcheck.shadow.memory import dtype_name
from ampcheck.torchtools.storage import is_transformed, local, placements
from ampcheck.training.loop import parameters_of
from ampcheck.training.protocol.events import Event, Rounded

_NARROW = (torch.bfloat16, torch.float16)
"""In this order: values of bfloat16 fit into float16 where they are neither large nor small."""

_SAMPLE = 256
"""Elements that are read first: a float32 weight that is not rounded shows it among them."""

_BOUNDS = 2
"""A weight that is clamped takes at most so many values that it had neither before nor after its step."""

_ROUNDS = 2
"""A checkpoint that is loaded rounds weights once."""

_APART = 12
"""Steps over which a weight is compared with its last 16-bit values: one that is rounded less often is not judged."""

_LISTED = 3


@dataclass(slots=True)
class _Values:
    """All elements of a weight whose values were 16-bit numbers of `dtype` before its last steps.

    before: in `dtype`. steps: how many since. changed: whether they changed an element. after: what a cast to `dtype`
    makes of the weight after them.
    """

    dtype: torch.dtype
    before: torch.Tensor
    steps: int = 0
    changed: torch.Tensor | None = None
    after: torch.Tensor | None = None


@dataclass(slots=True)
class _Step:
    """A weight around a step.

    before, after: its first elements, in float32; narrow: those that were 16-bit numbers before this step or an earlier
    one, the last. was_cast: whether a cast was recognized before an earlier step.
    values: None where the weight was no 16-bit weight before the last steps.
    """

    shape: torch.Size
    device: torch.device
    was_cast: bool
    before: torch.Tensor
    values: _Values | None
    narrow: torch.Tensor | None
    after: torch.Tensor | None = None

    def is_of(self, weight: torch.Tensor) -> bool:
        return weight.shape == self.shape and weight.device == self.device


class RoundedWeights:
    """Compares weights of 16-bit numbers with what the last step left, and with their last 16-bit numbers before.

    A clamp, or a restored state, can also undo steps and leave 16-bit numbers (1.0, 0.5). A weight was cast where each
    element is the rounded value of what the step left, and, at least once, some took values that neither a clamp nor
    an earlier state explains.
    """

    def __init__(self) -> None:
        self._steps: MutableMapping[torch.Tensor, _Step] = WeakTensorKeyDictionary()

    def before(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Rounded]:
        """Each weight that was rounded since the last step. names: of weights, by their `id`."""
        for parameter in parameters_of(optimizer):
            last = self._steps.pop(parameter, None)
            if (weight := _readable(parameter)) is None:
                continue
            dtype = next((dtype for dtype in _NARROW if _fits(weight, dtype)), None)
            was_cast = False
            if last is not None and last.is_of(weight):
                was_cast = last.was_cast or (dtype is not None and _is_cast(last, weight, dtype))
                if was_cast and last.values is not None and last.values.dtype is dtype:
                    yield from _rounded(last.values, weight, names.get(id(parameter), "?"))
            first = _first(weight).clone()
            values, narrow = (last.values, last.narrow) if last is not None and last.is_of(weight) else (None, None)
            if dtype is not None:
                values, narrow = _Values(dtype, weight.to(dtype)), first
            elif values is not None and values.steps == _APART:
                values = None
            self._steps[parameter] = _Step(weight.shape, weight.device, was_cast, first, values, narrow)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what the step left."""
        for parameter in parameters_of(optimizer):
            step = self._steps.pop(parameter, None)
            weight = None if step is None else _readable(parameter)
            if step is None or weight is None or not step.is_of(weight):
                continue
            step.after = _first(weight).clone()
            if (values := step.values) is not None:
                values.changed, values.after = weight != values.before, weight.to(values.dtype)
                values.steps += 1
            self._steps[parameter] = step


def check_rounded(
    events: Sequence[Event], subject: str, limits: Limits, reported: Collection[str] = ()
) -> list[Finding]:
    """`stagnation`: no weight in float32 is rounded back to what it was before its step, again and again.

    reported: weights that are known to stand still.
    """
    rounded = [(event, weight) for event in events for weight in event.rounded if weight.name not in reported]
    moved, lost = sum(weight.moved for _, weight in rounded), sum(weight.lost for _, weight in rounded)
    if len({event.step for event, _ in rounded}) < _ROUNDS or lost <= limits.stagnation * moved:
        return []
    event, weight = rounded[0]
    names = tuple(dict.fromkeys(weight.name for _, weight in rounded))
    message = (
        f"weights in float32 must stay what a step made of them; those of {listed(names, _LISTED)} were rounded to "
        f"{weight.dtype} before the next step, {len(rounded):,} times, and {lost / moved:.0%} of the elements that the "
        "steps since the last time had changed were again what they were before them"
    )
    hint = (
        f"cast a copy for an evaluation or a forward (copy.deepcopy(model).to(torch.{weight.dtype}), torch.autocast), "
        "back weights up in float32, and leave the weights that the optimizer steps in float32"
    )
    observed, limit = lost / moved, limits.stagnation
    shown = Evidence(where=event.where, observed=observed, limit=limit, unit="of the updates", hint=hint)
    return [STAGNATION.fail(subject, message, **shown)]


def _readable(parameter: torch.Tensor) -> torch.Tensor | None:
    """The elements in float32 that this process has; None where they cannot be read, as while a CUDA graph captures."""
    if type(parameter) not in (torch.Tensor, torch.nn.Parameter) and not placements(parameter):
        return None  # a subclass may lack any of the ops
    if parameter.dtype is not torch.float32 or parameter.layout is not torch.strided or is_transformed():
        return None
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialized and torch.cuda.is_current_stream_capturing():
        return None
    weight = local(parameter)
    if type(weight) is not torch.Tensor or weight.is_meta or not weight.numel():
        return None
    return weight if weight.untyped_storage().nbytes() else None  # FSDP frees the memory of weights out of use


def _first(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(-1)[:_SAMPLE]


def _fits(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are numbers of a 16-bit dtype, and not all zero."""
    return all(bool((part.to(dtype) == part).all()) for part in (_first(weight), weight)) and bool(weight.any())


def _is_cast(last: _Step, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether only a cast explains the first elements: all are rounded, to more new values than a clamp has bounds."""
    if last.after is None:
        return False
    values = _first(weight)
    if not bool((last.after.to(dtype) == values).all()):
        return False
    known = (state for state in (last.after, last.before, last.narrow) if state is not None)
    new = values[torch.stack([values != state for state in known]).all(0)]
    return len(set(new.tolist())) > _BOUNDS


def _rounded(last: _Values, weight: torch.Tensor, name: str) -> Iterator[Rounded]:
    """What was lost of the steps since, where each element is the rounded value of what they left."""
    if last.changed is None or last.after is None or not bool((weight == last.after).all()):
        return
    if moved := int(last.changed.count_nonzero()):
        lost = int((last.changed & (weight == last.before)).count_nonzero())
        yield Rounded(name, dtype_name(last.dtype), moved, lost)
