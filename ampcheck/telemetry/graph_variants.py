"""One graph in two variants, plain and with its statistics; and comparisons of the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ampcheck.telemetry.accumulators import Accumulator
from ampcheck.torchtools.interception import Runnable
from ampcheck.torchtools.private import HigherOrderOperator, OpOverload
from ampcheck.torchtools.restore import save_random_state

OTHER_STRIDES = "graphs whose outputs have other strides when they are measured"

_COMPARED_BYTES = 1 << 30
"""Results of more bytes are not kept twice to compare them: that memory may not be there."""


class GraphVariants:
    """One graph twice: plain, and with its statistics. The first measured call runs both, to detect whether measuring
    changes a result.

    written: inputs that both variants write to. donated: inputs whose memory only the plain variant reuses.
    single_run: why the graph may run only once on the same inputs, "" where it may run again.
    """

    def __init__(
        self,
        plain: Runnable,
        measured: Runnable,
        written: frozenset[int] = frozenset(),
        donated: frozenset[int] = frozenset(),
        single_run: str = "",
    ) -> None:
        self.plain, self._measured = plain, measured
        self._written, self._donated = written, donated
        self.single_run = single_run
        self._differences: list[torch.Tensor] | None = None
        self.other_strides = False
        """True if the outputs of the measured variant have other strides; then only the plain one runs."""

    def run(self, inputs: list[Any], call: int, accumulator: Accumulator) -> Sequence[Any]:
        """Run with statistics; returns the graph's own outputs."""
        if self._differences is None and not self.single_run:
            return self._run_compared(inputs, call, accumulator)
        if self.other_strides:
            return self.plain(inputs)
        outputs = self._measured(inputs)
        accumulator.add(call, _own(outputs[-1]))
        return outputs[:-1]

    def release(self) -> None:
        """Keep only the plain graph."""
        self._measured = self.plain

    def difference(self) -> float | None:
        """The largest relative difference that measuring made to an output; None where both have not run."""
        return None if self._differences is None else max(map(float, self._differences), default=0.0)

    def unseen(self) -> list[str]:
        """Return what was not measured, and why."""
        return [text for text in (OTHER_STRIDES if self.other_strides else "", self.single_run) if text]

    def _run_compared(self, inputs: list[Any], call: int, accumulator: Accumulator) -> Sequence[Any]:
        """Run the plain variant twice, then the measured one. An output of which two plain runs differ already (sums by
        atomic additions) is not compared."""
        restore = save_random_state()
        if self._written and _on_device(inputs):  # a CUDA graph knows its inputs by their memory
            self.single_run = "graphs on a device that write to their inputs: not compared with the plain graph"
            return self.run(inputs, call, accumulator)
        plain: list[list[Any]] = []
        for _ in range(2):
            copies = copied_inputs(inputs, self._written | self._donated)
            plain.append([_own(value) if isinstance(value, torch.Tensor) else value for value in self.plain(copies)])
            restore()
            if sum(value.nbytes for value in plain[0] if isinstance(value, torch.Tensor)) > _COMPARED_BYTES:
                self.single_run = "graphs whose results are too large to be compared with those of the plain graph"
                del plain, copies
                return self.run(inputs, call, accumulator)
        self._differences = []
        outputs = list(self.run(inputs, call, accumulator))
        for number, (value, again, measured) in enumerate(zip(*plain, outputs, strict=True)):
            if isinstance(value, torch.Tensor) and value.numel():
                noise = _difference(value, again) > 0
                self._differences.append(torch.where(noise, 0.0, _difference(value, measured)))
                if value.stride() != measured.stride():
                    self.other_strides = True
                    outputs[number] = value
        return outputs


def written_inputs(module: fx.GraphModule) -> frozenset[int]:
    """The numbers of the inputs that a lowered graph writes to."""
    numbers = {node: i for i, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder")}
    return frozenset(
        numbers[value]
        for node in module.graph.nodes
        if isinstance(node.target, OpOverload)
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and value in numbers
    )


def runs_once(module: fx.GraphModule) -> str:
    """Why a graph may not be run twice on the same inputs; "" where it may.

    Ops of PyTorch's own namespaces have no side effects; a custom op may have any, and a collective that one rank runs
    again waits for the others forever.
    """
    for node in module.graph.nodes:
        target = node.target
        effects = isinstance(target, HigherOrderOperator) and "effects" in str(target)
        if effects or (isinstance(target, OpOverload) and target.namespace not in _PURE):
            return f"graphs with an op that may do more than compute, {target}: not run again to compare"
    return ""


_PURE = frozenset(
    ("aten", "prims", "inductor", "inductor_prims", "rngprims", "quantized", "quantized_decomposed", "mkldnn", "mkl")
)


def copied_inputs(inputs: Sequence[Any], changed: frozenset[int]) -> list[Any]:
    """The inputs for a run after which there is another: those that it changes are copied."""
    return [_copy(value) if number in changed else value for number, value in enumerate(inputs)]


def _copy(value: object) -> Any:
    """A copy with the strides of the tensor, on which compiled code relies; `clone` would close gaps."""
    if not isinstance(value, torch.Tensor):
        return value
    if any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)):
        return value  # no kernel writes to elements that share memory
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _own(packed: torch.Tensor) -> torch.Tensor:
    """On a device the memory may belong to a CUDA graph, whose next replay overwrites it."""
    return packed if packed.device.type == "cpu" else packed.clone()


def _difference(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The norm of the difference over the norm, in float64 and on the device; 0 exactly where all values agree."""
    if value.is_floating_point() and value.dtype.itemsize == 1:
        value, other = value.float(), other.float()  # float8 has no comparison
    same = (value == other) | ((value != value) & (other != other))
    if not (value.is_floating_point() or value.is_complex()):
        return (~same).any().double()
    wide = torch.complex128 if value.is_complex() else torch.float64
    error = torch.linalg.vector_norm(torch.where(same, 0.0, value.to(wide) - other.to(wide)))
    size = torch.linalg.vector_norm(torch.where(value.isfinite(), value.to(wide), 0.0))
    return torch.where(same.all(), 0.0, torch.where(size > 0, error / size, torch.inf)).nan_to_num(torch.inf, torch.inf)


def _on_device(inputs: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in inputs)
