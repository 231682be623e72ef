"""Float32 weights that something rounds to 16 bits between two steps: `model.half()` for an evaluation, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ampcheck.catalog.training import STAGNATION
from ampcheck.core.check import Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Where
from ampcheck.core.text import listed
from ampcheck.torchtools.storage import local
from ampcheck.training.protocol.events import Event, Rounded

_NARROW = (torch.bfloat16, torch.float16)
"""In this order: values of bfloat16 fit into float16 where they are neither large nor small."""

_SAMPLE = 256
"""Elements that tell a float32 weight from a rounded one, but for a few that the rest must tell."""

_ROUNDS = 2
"""A checkpoint that is loaded rounds weights once."""

_LISTED = 3


@dataclass(slots=True)
class _Kept:
    """A weight before a step, all of whose values are 16-bit numbers. changed: the elements that the step changed."""

    parameter: torch.Tensor
    dtype: torch.dtype
    values: torch.Tensor
    changed: torch.Tensor | None = None


class RoundedWeights:
    """Compares the weights before each step with those before and after the last one."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def before(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Rounded]:
        """Each weight that was rounded since the last step. names: of weights, by their `id`."""
        for parameter in _wide(optimizer):
            values, kept = local(parameter.detach()), self._kept.pop(id(parameter), None)
            dtype = next((dtype for dtype in _NARROW if _fits(values, dtype)), None)
            if dtype is None:
                continue
            if kept is not None and kept.changed is not None and kept.dtype is dtype:
                moved = int(kept.changed.count_nonzero())
                lost = int((kept.changed & (values == kept.values)).count_nonzero())
                if moved:
                    name = names.get(id(parameter), "?")
                    yield Rounded(name, str(dtype).removeprefix("torch."), moved, lost)
            self._kept[id(parameter)] = _Kept(parameter, dtype, values.clone())

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which elements the step changed."""
        for parameter in _wide(optimizer):
            if (kept := self._kept.get(id(parameter))) is not None:
                kept.changed = local(parameter.detach()) != kept.values


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
        "step had changed were again what they were before it"
    )
    hint = (
        f"cast a copy for an evaluation or a forward (copy.deepcopy(model).to(torch.{weight.dtype}), torch.autocast), "
        "and leave the weights that the optimizer steps in float32"
    )
    where = Where("update", file=event.file, line=event.line, step=event.step)
    shown = Evidence(where=where, observed=lost / moved, limit=limits.stagnation, unit="of the updates", hint=hint)
    return [STAGNATION.fail(subject, message, **shown)]


def _wide(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype is torch.float32 and parameter.layout is torch.strided and parameter.numel():
                yield parameter


def _fits(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are numbers of a 16-bit dtype, and not all zero."""
    sample = values.reshape(-1)[:_SAMPLE]
    return all(bool((part.to(dtype) == part).all()) for part in (sample, values)) and bool(values.any())
