"""One graph in its variants: plain, with the lean statistics, with the full ones; and two of them on equal inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from ampcheck.core.errors import brief
from ampcheck.torchtools.interception import Runnable

_RINGS = 3

_COMPARED_BYTES = 1 << 30
"""Results of more bytes are not held twice to compare them: that memory may not be there."""


class Account(Protocol):
    """Where the packed statistics of a call go."""

    def keep(self, call: int, packed: torch.Tensor, *, full: bool) -> None:
        """The statistics of one call, lean or full."""

    def rings(self, packed: torch.Tensor) -> bool:
        """Whether lean statistics leave something open, as far as that can be told without waiting for the device."""


class Twins:
    """One graph three times: plain, with the lean statistics, and, once these leave something open, with the full ones.

    On the CPU the call in which the lean statistics ring is run again with the full ones, on equal inputs and random
    numbers; on a device the next measured call is. A graph that rings again and again is measured in full from then on.
    The first measured call also runs the plain variant, to tell whether measuring changes a result.
    """

    def __init__(
        self,
        plain: Runnable,
        lean: Runnable,
        full: Callable[[], Runnable],
        written: frozenset[int] = frozenset(),
        donated: frozenset[int] = frozenset(),
        alone: str = "",
        aside: bool = False,
    ) -> None:
        """written: inputs that every variant writes to; donated: inputs whose memory only the plain one reuses; alone:
        why the graph may run only once on the same inputs, "" where it may run again; aside: results always come from
        the plain graph, and the statistics from a run beside it."""
        self.plain, self._lean, self._make_full = plain, lean, full
        self._written, self._donated = written, donated
        self._full: Runnable | None = None
        self._differences: list[torch.Tensor] | None = None
        self._rang = 0
        self._due = False
        self.failure = ""
        self.alone = alone
        self.aside = aside
        self.elsewhere = False
        """Whether the outputs of the measured variant lie otherwise in memory; then only the plain one runs."""

    def run(self, inputs: list[Any], call: int, account: Account) -> Sequence[Any]:
        """Run with statistics; gives the graph's own outputs."""
        if self.aside and not self.alone:
            return self._beside(inputs, call, account)
        if self._differences is None and not self.alone:
            return self._compared(inputs, call, account)
        if self.elsewhere:
            return self.plain(inputs)
        if (self._due or self._rang >= _RINGS) and (full := self._compiled_full()) is not None:
            self._due = False
            return self._kept_of(full(inputs), call, account, full=True)
        again, states = None, _random_states(inputs)
        if not self.alone and not any(device for device, _ in states):  # else they only keep memory alive
            again = self._copied(inputs, self._written)
        outputs = self._lean(inputs)
        packed = _own(outputs[-1])
        if account.rings(packed):
            self._rang += 1
            if again is None:
                self._due = True
            elif (full := self._compiled_full()) is not None:
                _restore(states)
                self._kept_of(full(again), call, account, full=True)
                return outputs[:-1]
        account.keep(call, packed, full=False)
        return outputs[:-1]

    def _beside(self, inputs: list[Any], call: int, account: Account) -> Sequence[Any]:
        states = _random_states(inputs)
        packed = _own(self._lean(self._copied(inputs, self._written))[-1])
        _restore(states)
        full = self._compiled_full() if account.rings(packed) else None
        if full is not None:
            packed = _own(full(self._copied(inputs, self._written))[-1])
            _restore(states)
        account.keep(call, packed, full=full is not None)
        return self.plain(inputs)

    def _compiled_full(self) -> Runnable | None:
        if self._full is None and not self.failure:
            try:
                self._full = self._make_full()
            except Exception as error:  # noqa: BLE001  # the user's run goes on with what the lean statistics tell
                self.failure = brief(error)
        return self._full

    @staticmethod
    def _kept_of(outputs: Sequence[Any], call: int, account: Account, *, full: bool) -> Sequence[Any]:
        account.keep(call, _own(outputs[-1]), full=full)
        return outputs[:-1]

    def release(self) -> None:
        """Keep only the plain graph."""
        self._lean, self._full, self._make_full = self.plain, None, _released

    def difference(self) -> float | None:
        """The largest relative difference that measuring made to an output; None where both have not run."""
        if self._differences is None:
            return None
        return max((float(d) for d in self._differences), default=0.0)

    def _compared(self, inputs: list[Any], call: int, account: Account) -> Sequence[Any]:
        """Twice the plain variant, then the measured one. Where two plain runs differ already (sums by atomic
        additions), nothing can be told of an output."""
        states = _random_states(inputs)
        if self._written and any(device for device, _ in states):  # a CUDA graph knows its inputs by their memory
            self.alone = "graphs on a device that write to their inputs: not run beside their plain twin"
            return self.run(inputs, call, account)
        plain: list[list[Any]] = []
        for _ in range(2):
            given = self._copied(inputs, self._written | self._donated)
            plain.append([_own(one) if isinstance(one, torch.Tensor) else one for one in self.plain(given)])
            _restore(states)
            if sum(one.nbytes for one in plain[0] if isinstance(one, torch.Tensor)) > _COMPARED_BYTES:
                self.alone = "graphs whose results are too large to be held beside those of their plain twin"
                del plain, given
                return self.run(inputs, call, account)
        self._differences = []
        outputs = list(self.run(inputs, call, account))
        for place, (one, again, measured) in enumerate(zip(*plain, outputs, strict=True)):
            if isinstance(one, torch.Tensor) and one.numel():
                noise = _difference(one, again) > 0
                self._differences.append(torch.where(noise, 0.0, _difference(one, measured)))
                if one.stride() != measured.stride():
                    self.elsewhere = True
                    outputs[place] = one
        return outputs

    @staticmethod
    def _copied(inputs: Sequence[Any], changed: frozenset[int]) -> list[Any]:
        """The inputs for a run after which there is another: those that it changes are copied."""
        return [_twin(one) if place in changed else one for place, one in enumerate(inputs)]


def _released() -> Runnable:
    raise RuntimeError("the watch is over")


def written_inputs(module: fx.GraphModule) -> frozenset[int]:
    """The places of the inputs that a lowered graph writes to."""
    places = {node: i for i, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder")}
    found: set[int] = set()
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and given in places:
                found.add(places[given])
    return frozenset(found)


def runs_once(module: fx.GraphModule) -> str:
    """Why a graph may not be run twice on the same inputs; "" where it may.

    Ops of PyTorch's own namespaces compute and no more; a custom op may do anything, and a collective that one rank
    runs again waits for the others for ever.
    """
    for node in module.graph.nodes:
        target = node.target
        effects = isinstance(target, torch._ops.HigherOrderOperator) and "effects" in str(target)
        if effects or (isinstance(target, torch._ops.OpOverload) and target.namespace not in _PURE):
            return f"graphs with an op that may do more than compute, {target}: not run again to compare"
    return ""


_PURE = frozenset(
    ("aten", "prims", "inductor", "inductor_prims", "rngprims", "quantized", "quantized_decomposed", "mkldnn", "mkl")
)


def _twin(value: Any) -> Any:
    """A copy that lies in memory as the tensor does, on which compiled code relies; `clone` would close gaps."""
    if not isinstance(value, torch.Tensor):
        return value
    if any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)):
        return value  # no kernel writes to elements that share memory
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _own(packed: torch.Tensor) -> torch.Tensor:
    """On a device the memory may belong to a CUDA graph, whose next replay overwrites it."""
    return packed if packed.device.type == "cpu" else packed.clone()


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The norm of the difference over the norm, in float64 and on the device; 0 exactly where all values agree."""
    if one.is_floating_point() and one.dtype.itemsize == 1:
        one, other = one.float(), other.float()  # float8 compares with nothing
    same = (one == other) | ((one != one) & (other != other))
    if not (one.is_floating_point() or one.is_complex()):
        return (~same).any().double()
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = torch.where(same, 0.0, one.to(wide) - other.to(wide))
    size = torch.linalg.vector_norm(torch.where(one.isfinite(), one.to(wide), 0.0))
    found = torch.linalg.vector_norm(apart)
    return torch.where(same.all(), 0.0, torch.where(size > 0, found / size, torch.inf)).nan_to_num(torch.inf, torch.inf)


def _random_states(inputs: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    states = [("", torch.get_rng_state())]
    kinds = {one.device for one in inputs if isinstance(one, torch.Tensor) and one.device.type == "cuda"}
    return states + [(str(device), torch.cuda.get_rng_state(device)) for device in sorted(kinds, key=str)]


def _restore(states: Sequence[tuple[str, torch.Tensor]]) -> None:
    for device, state in states:
        if device:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
