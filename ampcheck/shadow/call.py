"""One op of the run with its companions, and the same call on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ampcheck.core.run import Where
from ampcheck.facts.history import Key
from ampcheck.facts.memory import has_companions, values_of, view_of, with_values
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.ops.traits import Traits
from ampcheck.shadow.format_constants import wide_constant
from ampcheck.stream.ops import OpCall
from ampcheck.stream.ops import leaves as leaves
from ampcheck.torchtools.private import OpOverload, efficient_zeros
from ampcheck.torchtools.pytree import map_tensors

_MASKS = frozenset(("condition", "mask"))
"""Arguments whose values choose between others."""

_NOWHERE = Where()


class Call(OpCall):
    """An op of the run with what its companions need.

    followed: its companions followed it, and did not restart from its results. inputs: the floating tensors among the
    arguments; before: their companions, found before it ran; inherited: the faults in them; after: the companions of
    what it wrote, and of fresh results. where: its place; index: its number in the run. results: every result, None
    where it is no floating tensor; fresh: those in memory of their own; written: the floating arguments that the op
    writes; kept: the first argument as it was before, where the rule needs it. Of a sparse or nested tensor all of them
    hold the tensor of its values. constants: numbers that it takes from its format, and those that float32 has instead.
    depths: how often the inputs were rounded before, see `Companions.depth`. moves: whether its results are elements of
    its inputs: not where the elements of one index are added up.
    """

    __slots__ = (
        "after", "before", "constants", "depths", "followed", "fresh", "index", "inherited", "inputs", "kept", "moves",
        "results", "where", "written",
    )  # fmt: skip

    def __init__(self, op: OpOverload, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self.traits, self.args, self.kwargs, self.name, self.out = op, traits, args, kwargs, traits.name, None
        self.inputs: list[torch.Tensor] = []
        self.before: list[Companions] = []
        self.after: list[Companions] = []
        self.inherited: frozenset[Key] = frozenset()
        self.where, self.index, self.followed = _NOWHERE, 0, True
        self.results: list[torch.Tensor | None] = []
        self.kept: torch.Tensor | None = None
        self.fresh: list[torch.Tensor] = []
        self.written: list[torch.Tensor] = []
        self.constants: dict[float, float] = {}
        self.depths: tuple[int, ...] = ()
        added = traits.accumulates and (self.argument("accumulate") or self.argument("reduce"))
        self.moves = traits.moves and not added

    @property
    def widens(self) -> bool:
        """True if the op copies values to a format that has each of them."""
        if self.traits.copies != 0 or not self.inputs or not self.fresh:
            return False
        source, result = self.inputs[0].dtype, self.fresh[0].dtype
        return source is result or (
            1 < source.itemsize < result.itemsize and torch.promote_types(source, result) is result
        )


class Side:
    """One side of the companions: `exact` in float64 or `moved` in float32."""

    def __init__(self, store: CompanionStore, name: str) -> None:
        self.store, self.name = store, name
        self.dtype = torch.float64 if name == "exact" else torch.float32
        self.now: dict[int, Companions] = {}  # by id, of the tensors of the call that is followed
        self._complex = torch.complex128 if name == "exact" else torch.complex64

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The companion of a floating tensor; a tensor that can have none is converted."""
        companions = self.now.get(id(tensor))
        if companions is None:
            if not has_companions(tensor):
                return self._of_layout(tensor)
            companions = self.store.of(tensor)
        values = companions.held or companions.values
        return view_of(tensor, values.exact if self.name == "exact" else values.moved)

    def _of_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor._is_zerotensor():
            return efficient_zeros(tensor.size(), dtype=self.lift_dtype(tensor.dtype), device=tensor.device)
        values = values_of(tensor)
        if values is not None:
            return with_values(tensor, self.of(values))
        if tensor.layout is not torch.strided:
            raise NotImplementedError(f"a tensor of layout {tensor.layout} has no companions")
        return self.convert(tensor)

    def convert(self, tensor: torch.Tensor) -> torch.Tensor:
        """The present values of a tensor in the format of this side."""
        if tensor.is_complex():
            return tensor.to(self._complex)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def convert_value(self, value: Any) -> Any:
        """The present values of a tensor; a number unchanged."""
        return self.convert(value) if isinstance(value, torch.Tensor) else value

    def lift_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of this side that stands for a dtype of the run."""
        return self.dtype if dtype.is_floating_point else self._complex if dtype.is_complex else dtype

    def lift(self, value: Any) -> Any:
        """A value as this side has it: companions for tensors, lifted dtypes, all else unchanged."""
        if isinstance(value, torch.Tensor):
            return self.of(value) if value.is_floating_point() or value.is_complex() else value
        if isinstance(value, torch.dtype):
            return self.lift_dtype(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.lift(item) for item in value)
        return value

    def _constant(self, call: Call, value: float) -> float:
        """A number as this side has it: a constant of a 16-bit format is that of float32."""
        wide = wide_constant(value)
        if wide != value:
            call.constants[value] = wide
        return wide

    def run(self, call: Call, op: Callable[..., Any] | None = None) -> Any:
        """The call, or another op with its arguments, on the companions of this side."""
        args = [self._constant(call, v) if type(v) is float else self.lift(v) for v in call.args]
        kwargs = dict(call.kwargs)
        for name, value in kwargs.items():
            kwargs[name] = self._constant(call, value) if type(value) is float else self.lift(value)
        for position, name in call.traits.writes:
            if position < len(args):
                args[position] = map_tensors(_scratch, args[position])
            elif name in kwargs:
                kwargs[name] = map_tensors(_scratch, kwargs[name])
        if not call.inputs:
            self._set_dtype(call, args, kwargs)
        return (op or call.op)(*args, **kwargs)

    def _set_dtype(self, call: Call, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Let an op that makes floating numbers of integers alone, such as a quotient, a range or a constant, make them
        in the format of this side, and not in the default dtype, which belongs to the threads of the user as well."""
        made = next(iter([t for t in leaves(call.out) if t.is_floating_point() or t.is_complex()]), None)
        if made is None:
            return
        names = [argument.name for argument in call.op._schema.arguments]
        if "dtype" in names[len(args) :] and kwargs.get("dtype") is None:
            kwargs["dtype"] = self.lift_dtype(made.dtype)
        if call.traits.promotes:
            widened = partial(map_tensors, lambda integers: integers.to(self.dtype))
            args[:] = [v if n in _MASKS else widened(v) for n, v in zip(names, args, strict=False)]
            kwargs.update({n: v if n in _MASKS else widened(v) for n, v in kwargs.items()})


class SideOf(Side):
    """A side with other values for the tensors of an op: what a function makes of each."""

    def __init__(self, store: CompanionStore, values: Callable[[torch.Tensor], torch.Tensor], name: str = "exact"):
        super().__init__(store, name)
        self._values = values

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value for a floating tensor."""
        return self._values(tensor)


def _scratch(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for the op to write, which is none of integers of the run: only the run itself writes those."""
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.clone()


def floating_values(value: object) -> list[torch.Tensor]:
    """The floating tensors among the arguments or results of an op; of sparse and nested ones those of the values."""
    tensors: list[torch.Tensor] = []
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if has_companions(item):
            tensors.append(item)
        elif isinstance(item, torch.Tensor):
            values = values_of(item) if item.is_floating_point() or item.is_complex() else None
            tensors += [] if values is None else [values]
        elif isinstance(item, (list, tuple)):
            tensors += floating_values(item)
    return tensors


def item_of(value: Any, number: int) -> Any:
    """The argument that belongs to one result of an op, which may take lists."""
    return value[number] if isinstance(value, (list, tuple)) and number < len(value) else value


def results_of(value: Any) -> list[torch.Tensor | None]:
    """The results of an op in order, nested lists flattened; None where one is no floating tensor with memory."""
    if isinstance(value, (list, tuple)):
        return [result for item in value for result in results_of(item)]
    if has_companions(value):
        return [value]
    return [next(iter(floating_values(value)), None)]


def decides_otherwise(out: Any, result: Any) -> bool:
    """Return whether integers among the results of an op, such as pivots, differ from those of the run."""
    pairs = zip(leaves(out), leaves(result), strict=False)
    return any(
        not (real.is_floating_point() or real.is_complex()) and (real.shape != own.shape or not torch.equal(real, own))
        for real, own in pairs
    )
