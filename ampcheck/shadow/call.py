"""One op of the run: what its schema says, its tensors, and the same call on companions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from ampcheck.core.run import Where
from ampcheck.shadow.companions import Companions, CompanionStore, Key, has_companions, view_of
from ampcheck.shadow.format_constants import wide_constant
from ampcheck.shadow.memory import values_of, with_values
from ampcheck.torchtools.pytree import map_tensors
from ampcheck.torchtools.source import op_name

MOVES = frozenset(
    "clone cat stack index index_select gather take repeat flip roll rot90 constant_pad_nd reflection_pad1d "
    "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d scatter scatter_ where "
    "masked_fill masked_fill_ masked_scatter masked_select index_put index_put_ _unsafe_index _unsafe_index_put "
    "embedding "
    "expand_copy permute_copy transpose_copy view_copy slice_scatter select_scatter diagonal_scatter slice_backward "
    "select_backward unfold_copy as_strided_copy as_strided_scatter t_copy squeeze_copy unsqueeze_copy split_copy "
    "unbind_copy neg neg_ abs tril triu diag_embed _reshape_copy pixel_shuffle pixel_unshuffle channel_shuffle "
    "index_fill index_fill_ index_copy index_copy_ relu relu_ threshold_backward contiguous tril_ triu_ fill_ zero_ "
    "zeros zeros_like ones ones_like new_zeros new_ones lift_fresh_copy copysign hardtanh".split()
)
"""Ops whose results are elements of their inputs, or constants: they round nothing that their dtype did not round."""

_RESETS = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ set_ _foreach_copy_ _foreach_zero_ masked_fill_ resize_".split()
)
"""Writes that do not build on the previous value."""

SHAPED = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())
"""Ops that take nothing but the shape and the format of a tensor."""

_EXACT = frozenset(
    "add sub rsub mul add_ sub_ mul_ arange linspace floor round ceil trunc cumsum sum max min amax amin maximum "
    "mm bmm mv dot addmm baddbmm "
    "minimum clamp clamp_min clamp_max sort topk _to_copy copy_ full full_like scalar_tensor range floor_divide".split()
)
"""Arithmetic that gives whole numbers for whole numbers."""

CONTRACTIONS = frozenset(
    "mm bmm mv dot addmm baddbmm addmv addbmm convolution _grouped_mm scaled_dot_product_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math".split()
)
"""Ops whose results have a ranking of their own: each is a sum over elements of the inputs."""

SUMS = frozenset("sum mean nansum".split())
"""Ops that make one measurement of many whole numbers."""

_UNSET = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize".split())
"""Ops whose results have no values yet."""

_KEEPS = frozenset("remainder_ fmod_ frac_ addbmm_ clamp_ clamp_min_ clamp_max_".split())
"""Ops whose rules need the argument that the op overwrites."""

_PROMOTES = frozenset("logsumexp _add_relu _add_relu_".split())
"""Ops that compute with integers in the default dtype, beside those that PyTorch tags as pointwise and foreach ops."""

_MASKS = frozenset(("condition", "mask"))
"""Arguments whose values choose between others."""

_UNSAID: dict[str, tuple[tuple[int, str], ...]] = {
    "native_batch_norm": ((3, "running_mean"), (4, "running_var")),
    "cudnn_batch_norm": ((3, "running_mean"), (4, "running_var")),
    "miopen_batch_norm": ((3, "running_mean"), (4, "running_var")),
    "batch_norm_update_stats": ((1, "running_mean"), (2, "running_var")),
}
"""Arguments that ops write although their schemas do not say so."""


class OpSchema:
    """What the schema of an overload says. writes: positions and names of the arguments that it writes. moves: see
    `MOVES`; adds: an argument lets it add up elements. exact: whole numbers give whole numbers. keeps: its rule needs
    the argument that it overwrites. checks: it returns integers that may come out otherwise on companions, such as
    pivots. composed: its kernel calls other ops, on which autocast acts. promotes: it computes with integers as with
    floating numbers. base: the name of the op without lists and not in place. title: as `op_name` has it."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        schema = op._schema
        self.namespace, _, name = schema.name.partition("::")
        short = self.name = name if self.namespace == "aten" else schema.name
        self.base = short.removeprefix("_foreach_").removesuffix("_")
        self.title = op_name(op)
        returns_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        self.view = returns_view or torch.Tag.inplace_view in op.tags
        writes = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        self.writes = (*writes, *_UNSAID.get(name, ()))
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self.moves = short in MOVES
        self.adds = any(a.name in ("accumulate", "reduce") for a in schema.arguments)
        self.unset = short in _UNSET
        self.resets = short in _RESETS
        self.exact = self.moves or short in _EXACT
        self.keeps = short in _KEEPS
        several = self.namespace != "aten" and len(schema.returns) > 1
        self.checks = several or short.lstrip("_").startswith("linalg_")
        overload: str = op.name()  # type: ignore[no-untyped-call]
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeExplicitAutograd")
        self.composed = bool(composite) and not (self.view or self.moves or self.unset)
        self.promotes = torch.Tag.pointwise in op.tags or short.startswith("_foreach_") or short in _PROMOTES


op_schema = cache(OpSchema)
"""The facts of one overload."""


_NOWHERE = Where()


@dataclass(slots=True)
class Call:
    """An op with its arguments, and its results once it ran.

    inputs: the floating tensors among the arguments; before: their companions, found before it ran; inherited: the
    faults in them. where: its place; index: its number in the run. results: every result, None where it is no floating
    tensor; fresh: those in memory of their own; written: the floating arguments that the op writes; kept: the first
    argument as it was before, where the rule needs it. Of a sparse or nested tensor all of them hold the tensor of its
    values. constants: numbers that it takes from its format, and those that float32 has instead. depths: how often the
    inputs were rounded before, see `Companions.depth`.
    """

    op: torch._ops.OpOverload
    schema: OpSchema
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    before: list[Companions] = field(default_factory=list)
    inherited: frozenset[Key] = frozenset()
    where: Where = _NOWHERE
    index: int = 0
    results: list[torch.Tensor | None] = field(default_factory=list)
    kept: torch.Tensor | None = None
    fresh: list[torch.Tensor] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)
    constants: dict[float, float] = field(default_factory=dict)
    depths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Short for an ATen op (`topk`), else with its namespace."""
        return self.schema.name

    @property
    def moves(self) -> bool:
        """Whether its results are elements of its inputs: not where the elements of one index are added up."""
        added = self.schema.adds and bool(self.argument("accumulate") or self.argument("reduce"))
        return self.schema.moves and not added

    @property
    def widens(self) -> bool:
        """Whether the op copies values to a format that has each of them."""
        if self.name not in ("_to_copy", "clone") or not self.inputs or not self.fresh:
            return False
        source, result = self.inputs[0].dtype, self.fresh[0].dtype
        return source is result or (
            1 < source.itemsize < result.itemsize and torch.promote_types(source, result) is result
        )

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        if name in self.kwargs:
            return self.kwargs[name]
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                return argument.default_value if argument.has_default_value() else default
        return default


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
        return view_of(tensor, companions.values.exact if self.name == "exact" else companions.values.moved)

    def _of_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor._is_zerotensor():
            return torch._efficientzerotensor(tensor.size(), dtype=self.lift_dtype(tensor.dtype), device=tensor.device)
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

    def _argument(self, call: Call, value: Any) -> Any:
        """An argument of the call as this side has it: a constant of a 16-bit format is that of float32."""
        if type(value) is not float:
            return self.lift(value)
        wide = wide_constant(value)
        if wide != value:
            call.constants[value] = wide
        return wide

    def run(self, call: Call, op: Callable[..., Any] | None = None) -> Any:
        """The call, or another op with its arguments, on the companions of this side."""
        args: list[Any] = [self._argument(call, value) for value in call.args]
        kwargs = {name: self._argument(call, value) for name, value in call.kwargs.items()}
        for position, name in call.schema.writes:
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
        made = next((t for t in leaves(call.out) if t.is_floating_point() or t.is_complex()), None)
        if made is None:
            return
        names = [argument.name for argument in call.op._schema.arguments]
        if "dtype" in names[len(args) :] and kwargs.get("dtype") is None:
            kwargs["dtype"] = self.lift_dtype(made.dtype)
        if call.schema.promotes:
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
    if isinstance(value, torch.Tensor):
        if has_companions(value):
            return [value]
        values = values_of(value) if value.is_floating_point() or value.is_complex() else None
        return [] if values is None else [values]
    tensors: list[torch.Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, (torch.Tensor, list, tuple)):
                tensors += floating_values(item)
    return tensors


def item_of(value: Any, number: int) -> Any:
    """The argument that belongs to one result of an op, which may take lists."""
    return value[number] if isinstance(value, (list, tuple)) and number < len(value) else value


def written_by(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op writes: tensors, lists of them, or None."""
    return [args[position] if position < len(args) else kwargs.get(name) for position, name in schema.writes]


def results_of(value: Any) -> list[torch.Tensor | None]:
    """The results of an op in order, nested lists flattened; None where one is no floating tensor with memory."""
    if isinstance(value, (list, tuple)):
        return [result for item in value for result in results_of(item)]
    if has_companions(value):
        return [value]
    return [next(iter(floating_values(value)), None)]


def leaves(value: object) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an op, which nest lists and tuples only."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


def decides_otherwise(out: Any, result: Any) -> bool:
    """Whether integers among the results of an op, such as pivots, differ from those of the run."""
    pairs = zip(leaves(out), leaves(result), strict=False)
    return any(
        not (real.is_floating_point() or real.is_complex()) and (real.shape != own.shape or not torch.equal(real, own))
        for real, own in pairs
    )
