"""The traits of one overload of an op: by its schema and its tags, and by its row in the table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import attrgetter

import torch

from ampcheck.ops.added import added_traits
from ampcheck.ops.table import ROWS
from ampcheck.torchtools.private import OpOverload, has_kernel, has_kernel_for
from ampcheck.torchtools.source import op_name


@dataclass(frozen=True, slots=True)
class Traits:
    """Effect of an overload on values.

    >>> op = traits(torch.ops.aten.addmm.default)
    >>> op.contracts, op.factors, op.linear
    (True, (1, 2), ('beta',))
    >>> traits(torch.ops.aten.sub_.Tensor).writes
    ((0, 'self'),)

    All variants of an op have its traits (in place, with `out=`, on lists), unless a comment says otherwise.
    """

    namespace: str
    name: str  # `mul_`; of an op that is not ATen's, with its namespace
    base: str  # `mul` for `mul_` and `_foreach_mul_` alike
    title: str  # with the overload, as findings show it: `aten::mul_.Tensor`
    foreach: bool  # it does the same to each tensor of lists
    writes: tuple[tuple[int, str], ...]  # positions and names of the arguments that it writes
    view: bool  # it returns a view, or makes one of its argument
    random: bool  # it draws numbers
    shaped: bool  # of a tensor it takes the shape and the format alone
    accumulates: bool  # an argument lets it add up the elements that it moves
    checks: bool  # it returns integers that may come out otherwise on companions, such as pivots
    composed: bool  # its kernel calls other ops, on which autocast acts
    promotes: bool  # it computes with integers as with floating numbers
    pointwise: bool  # an element of the result depends on the elements at its place
    reduces: bool  # an element of the result depends on many of an argument
    moves: bool  # results are elements of arguments, up to the sign, or constants: only their dtype rounds
    places: bool  # it moves elements to other places, and does nothing else
    whole: bool  # whole numbers give whole numbers
    contracts: bool  # results are sums of products, with a ranking of their own
    terms: str  # what gives the length of its sums: the "last" dimension of an argument, the one that an argument names
    # ("dim"), a "kernel", the last two of a query ("heads"), or "": the elements that go into one of the result
    resets: bool = False  # what it writes does not build on the values before
    keeps: bool = False  # in place: its rule, or the judge, needs the argument that it overwrites
    unset: bool = False  # its results have no values yet
    copies: int | None = None  # the position of the argument that it copies, to any format
    fills: str = ""  # with zeros or ones ("units"), a "number" or a "range"; a number in "part" of the result
    adds: bool = False  # it adds up arguments element by element
    sums: bool = False  # it makes one measurement of many terms
    linear: tuple[str, ...] = ()  # by position, the factor with which an argument enters the element at the same place:
    # a number, an option, or the `other` argument. On arguments without one the result may depend in any way
    factors: tuple[int, ...] = ()  # positions of the two arguments whose product it takes
    divides: tuple[str, ...] = ()  # names of the arguments that it divides by
    rescues: bool = False  # code keeps elements from being zero by it: if they still are, it is this that failed
    decides: str = ""  # of the functional op: an "order", "equality", "identity" or "bin" of numbers, whether they are
    # "finite", the "best" or "extreme" place, a "selection", the "support", an "integer" (of a "quotient", of a "cast")
    kink: str = ""  # of the functional op: its derivative by the last floating argument jumps at "zero" or at a "pixel"
    lifts: bool = False  # it is smooth at zero, and makes no zero of it
    jumps: bool = False  # floating results are decisions, and companions take those of the run
    leaves: bool = False  # a number leaves the run
    degree: float | None = None  # to the power of which a factor of its argument comes out of it
    limits: bool = False  # each element of the result is one of several arguments, which may be numbers
    autocast: str = ""  # the op that reaches autocast, and becomes this one


@cache
def traits(op: OpOverload) -> Traits:
    """Return the traits of an overload; those of an op without a row follow from its schema and its tags."""
    schema, tags = op._schema, op.tags
    namespace, _, short = schema.name.partition("::")
    name = short if namespace == "aten" else schema.name
    foreach, base = name.startswith("_foreach_"), name.removeprefix("_foreach_").removesuffix("_")
    row = {
        "pointwise": torch.Tag.pointwise in tags,
        "promotes": torch.Tag.pointwise in tags or foreach,
        "reduces": getattr(torch.Tag, "reduction", None) in tags,  # since PyTorch 2.10
        "places": torch.Tag.view_copy in tags,
        "moves": False,
        "contracts": "scaled_dot_product" in base,
        "terms": "heads" if "attention" in base else "",
        **(ROWS.get(base) or (added_traits().get(base, {}) if "::" in base else {})),
    }
    row["moves"] |= row["places"]
    row.setdefault("whole", row["moves"])
    if name != base:
        row |= {"decides": "", "kink": ""}
    if name != f"{base}_":
        row["keeps"] = False
    unsaid = row.pop("updates", ())  # although the schema does not say so
    written = [bool(a.alias_info and a.alias_info.is_write) or a.name in unsaid for a in schema.arguments]
    shared = [r.alias_info for r in schema.returns if r.alias_info]
    view = torch.Tag.inplace_view in tags or not all(map(attrgetter("is_write"), shared))
    overload: str = op.name()  # type: ignore[no-untyped-call]
    kernels = has_kernel(overload)  # an op of TorchScript alone, on numbers, has none
    composite = kernels and has_kernel_for(overload, "CompositeExplicitAutograd")
    return Traits(
        namespace, name, base, op_name(op), foreach,
        writes=tuple([(i, a.name) for i, a in enumerate(schema.arguments) if written[i]]),
        view=view,
        random=torch.Tag.nondeterministic_seeded in tags,
        shaped=base.endswith("_like") or base.startswith("new_"),
        accumulates=bool({"accumulate", "reduce"}.intersection([a.name for a in schema.arguments])),
        checks=(namespace != "aten" and len(schema.returns) > 1) or short.lstrip("_").startswith("linalg_"),
        composed=bool(composite) and not (view or row["moves"] or row.get("unset") or "copies" in row),
        **row,
    )  # fmt: skip
