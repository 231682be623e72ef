"""Follow an op on large matrices by those of their rows that it reads or writes, and that have companions.

The op is put as the same op on small tensors, the rows: rules and judge see this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ampcheck.facts.rows import is_large, is_large_size
from ampcheck.facts.values import CompanionStore
from ampcheck.ops.traits import Traits
from ampcheck.shadow.call import Call, leaves

_READS = frozenset(("embedding", "index_select"))
_GRADIENT = "embedding_dense_backward"


def row_call(call: Call, store: CompanionStore) -> RowCall | None:
    """The op by rows, before it runs; None for an op without large matrices, and for one that needs all of their rows.

    What such an op overwrites gets companions for all rows here, while its values are as they were.
    """
    large = [c for c in call.before if c.rows is not None]
    plan = None
    if call.name in _READS and len(large) == 1 and call.before[0] is large[0]:
        plan = _reading(call, store)
    elif call.name == _GRADIENT and not large:
        plan = _gradient(call, store)
    elif large and call.traits.pointwise:
        plan = _elementwise(call, store)
    if plan is None and call.traits.writes:
        for companions in large:
            companions.fill()
    return plan


class RowCall:
    """The op on rows. index: the rows; call: the op on them.

    results: whether the results are such rows as well. elementwise: every row of the results comes from these rows.
    """

    def __init__(
        self, call: Call, store: CompanionStore, index: torch.Tensor, *, results: bool, elementwise: bool = False
    ) -> None:
        self.store, self.index, self.whole = store, index, call
        self.results, self.elementwise = results, elementwise
        self._rows: dict[int, torch.Tensor] = {}
        self.call = Call(call.op, call.traits, call.args, dict(call.kwargs))

    def put(self, *args: Any) -> RowCall:
        """Set the arguments; of tensors of the original op that are large, the rows are put in their place."""
        self.call.args = tuple(self.of(value) for value in args)
        self.call.kwargs = {name: self.of(value) for name, value in self.whole.kwargs.items()}
        self.call.inputs = [self.of(tensor) for tensor in self.whole.inputs]
        self.call.before = [self.store.of(tensor) for tensor in self.call.inputs]
        return self

    def of(self, value: Any) -> Any:
        """The rows of a large matrix, with their companions; any other value unchanged."""
        if not isinstance(value, torch.Tensor) or not is_large(value):
            return value
        if id(value) not in self._rows:
            rows = self._rows[id(value)] = value.detach()[self.index]
            if value.is_floating_point():
                companions = self.store.of(value)
                assert companions.rows is not None
                exact, moved = companions.rows.read(value.detach(), self.index)
                self.store.assign(rows, exact, moved, companions.unit).inherit(companions)
        return self._rows[id(value)]

    def ran(self, out: Any) -> Call:
        """The op on rows, after the op itself has run with these results."""
        self.call.out = out
        if not self.results:
            return self.call
        if self.elementwise:
            self._add_lost(out)
        for tensor in self.whole.inputs:
            if id(tensor) in self._rows:
                self._rows[id(tensor)].copy_(tensor.detach()[self.index])  # as the op has left it
        for tensor in leaves(out):
            if is_large(tensor):
                if id(tensor) not in self._rows:
                    self._rows[id(tensor)] = tensor.detach()[self.index]
                self.call.out = self._rows[id(tensor)]
        return self.call

    def _add_lost(self, out: Any) -> None:
        """Add the rows in which a result is not finite.

        Of those that the op has overwritten, zero stands for a finite value that is not known.
        """
        lost = [~tensor.isfinite().all(dim=1) for tensor in _matrices(out) if not _is_finite(tensor)]
        if not lost:
            return
        added = torch.stack(lost).any(dim=0)
        added[self.index] = False
        for tensor in _matrices(out):
            companions = self.store.known(tensor)
            if companions is not None and companions.rows is not None:
                values = tensor.detach()[added].to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
                companions.rows.write(added.nonzero().squeeze(1), values, values.to(torch.float32))
        self._rows.clear()
        self.index = torch.cat([self.index, added.nonzero().squeeze(1)])
        self.put(*self.whole.args)

    def write_back(self, out: Any) -> int:
        """Give the large matrices that the op wrote or returned the companions of the rows; how many they are."""
        matrices = 0
        for tensor in leaves(out):
            rows = self._rows.get(id(tensor))
            if rows is None or not tensor.is_floating_point():
                continue
            companions = self.store.known(tensor) or self.store.enter_rows(tensor, moves=False)
            if companions.rows is None:
                continue
            companions.rows.write(self.index, self.store.exact(rows), self.store.moved(rows))
            companions.inherit(self.store.of(rows))
            matrices += 1
            if companions.rows.many:
                companions.fill()
        return matrices


def is_constant(op: Traits, results: Sequence[torch.Tensor | None]) -> bool:
    """Return whether an op that makes zeros or ones makes a large matrix."""
    return not op.writes and len(results) == 1 and results[0] is not None and is_large(results[0])


def _reading(call: Call, store: CompanionStore) -> RowCall | None:
    """Rows that are looked up."""
    if len(call.args) < 2 + (call.name == "index_select"):  # arguments by name
        return None
    weight = call.args[0]
    dim, index = (0, call.args[1]) if call.name == "embedding" else call.args[1:3]
    if dim % weight.dim() or not is_large(weight):
        return None
    rows, inverse = torch.unique(index, return_inverse=True)
    if not len(rows) or len(rows) * 4 > len(weight):
        return None
    plan = RowCall(call, store, rows, results=False)
    return plan.put(weight, inverse) if call.name == "embedding" else plan.put(weight, dim, inverse)


def _gradient(call: Call, store: CompanionStore) -> RowCall | None:
    """The gradient of a table: zero but for the rows that were looked up."""
    if len(call.args) < 5 or not is_large_size(call.args[2] * call.args[0].shape[-1]):
        return None
    gradient, index, count, padding, scale = call.args
    rows, inverse = torch.unique(index, return_inverse=True)
    if not len(rows) or len(rows) * 4 > count:
        return None
    absent = (inverse[index == padding][:1]).tolist()
    plan = RowCall(call, store, rows, results=True)
    return plan.put(gradient, inverse, len(rows), absent[0] if absent else -1, scale)


def _elementwise(call: Call, store: CompanionStore) -> RowCall | None:
    """The rows that have companions in any of the operands, of tables that ops have read before.

    The other rows are taken to be exact: float32 rounds them too little to matter, and 16 bits are followed whole. Of
    constants no row has companions, such as the moments of an optimizer before its first step.
    """
    operands = [t for value in (*call.args, *call.kwargs.values()) for t in leaves(value)]
    matrices = [t for t in operands if t.numel() != 1]
    known = [c.rows for c in call.before if c.rows is not None]
    filled = [t for t, c in zip(call.inputs, call.before, strict=True) if c.rows is None and t.numel() != 1]
    if len({t.shape for t in matrices}) != 1 or filled or not all(is_large(t) for t in matrices):
        return None
    if len(call.op._schema.returns) != 1 or call.kwargs.get("dtype") is not None:
        return None
    if any(t.is_floating_point() and t.itemsize < 4 for t in operands):
        return None
    index = torch.unique(torch.cat([rows.index for rows in known]))
    entered = not index.numel() and any(rows.move is not None for rows in known)  # data that no op has looked up
    if entered or (call.traits.writes and not all(_is_finite(t) for t in matrices)):
        return None
    return RowCall(call, store, index, results=True, elementwise=True).put(*call.args)


def _matrices(out: Any) -> list[torch.Tensor]:
    """The floating results that are large matrices."""
    return [tensor for tensor in leaves(out) if is_large(tensor) and tensor.is_floating_point()]


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, and so is their sum: the sum needs no memory."""
    return not tensor.is_floating_point() or math.isfinite(tensor.detach().sum().item())
