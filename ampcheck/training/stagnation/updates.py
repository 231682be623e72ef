"""What a training step does to narrow tensors that live across steps, op by op, against float64.

Each op that changes such a tensor runs a second time on float64 twins. A step's update is what the twins say it would
have been without rounding; an element whose update is not zero and which holds the same value afterwards has lost it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.formats import format_of
from ampcheck.torchtools.source import op_name, users_line
from ampcheck.torchtools.storage import Region
from ampcheck.torchtools.storage import region as region_of
from ampcheck.training.loop import Resident, Role
from ampcheck.training.stagnation.calls import (
    CONSTANT,
    BoundCall,
    Form,
    Operand,
    added,
    combine,
    itself,
    leaves,
    mixed,
    scaled,
)
from ampcheck.training.stagnation.shadows import NARROW, Shadows, spacing

_FUSED_DECAYS = {"exp_avgs": "beta1", "exp_avg_sqs": "beta2"}


_NOISY = 0.1
"""In spacings, between an update that gets lost and the quarter that noise for rounding has on average."""


@dataclass(slots=True)
class Scaling:
    """A tensor was multiplied by a number just below 1 and rounded, with nothing added: a decay on its own.

    looked: its nonzero elements. stuck: those that hold the same value afterwards.
    """

    factor: float
    looked: int
    stuck: int
    op: str


@dataclass(slots=True)
class VanishedConstant:
    """A constant that is zero in the format of what it is added to.

    origins: the regions of the tensors that this is made of; of: their names. zeros: how many results were exactly
    zero. option: which option of an optimizer has this value (`eps`); empty where none.
    """

    constant: float
    dtype: str
    origins: frozenset[Region]
    op: str
    file: str
    line: int | None
    zeros: int = 0
    of: tuple[str, ...] = ()
    option: str = ""


@dataclass(slots=True)
class Written:
    """What was seen of one tensor within a step: the last op that wrote to it, and where the first one did."""

    op: str = ""
    file: str = ""
    line: int | None = None
    scalings: list[Scaling] = field(default_factory=list)


class UpdateWatch(TorchDispatchMode):
    """Follow the narrow ones among `residents` through what runs inside.

    Ops that record a graph for autograd, and autograd's own, are not followed unless they concern such a tensor (a
    counter in a forward, an optimizer that steps in backward). What a random op, a collective or a trick with bits
    writes is taken as it is. `shadows` holds the twins afterwards.

    Inside compiled code no op is seen: what changed there is not in `shadows`.
    """

    supports_higher_order_operators = True

    def __init__(self, residents: Sequence[Resident]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shadows = Shadows()
        self.vanished: dict[tuple[float, str], VanishedConstant] = {}
        self.unseen: Counter[str] = Counter()
        self.written: dict[Region, Written] = {}
        self._roles: dict[Region, Role] = {}
        self._sizes: set[int] = set()
        for resident in residents:
            region = region_of(resident.tensor)
            if resident.tensor.dtype in NARROW and region is not None:
                self._sizes.add(resident.tensor.numel())
                if resident.role is not Role.GRADIENT:
                    self._roles[region] = resident.role
        self._storages = {region[0] for region in self._roles}
        self._own = {region[0] for region, role in self._roles.items() if role is not Role.PARAMETER}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # a DTensor that works out the shape of a result
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a DTensor runs its ops on the local shard, and those come here
        if not isinstance(func, torch._ops.OpOverload):
            self.unseen[f"what runs inside {func}"] += 1
            return func(*args, **kwargs)
        tensors = list(leaves((*args, *kwargs.values())))
        out = self._run(func, args, kwargs, tensors)
        if torch.Tag.nondeterministic_seeded in func.tags or (
            any(map(self.shadows.is_drawn, tensors)) and (torch.Tag.pointwise in func.tags or _is_cast(func))
        ):
            for one in leaves(out):
                self.shadows.draw(one)
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        if not any(one.dtype in NARROW or self.shadows.touches(one) for one in tensors):
            return func(*args, **kwargs)
        call = BoundCall(func, args, kwargs)
        if call.is_view:
            return func(*args, **kwargs)
        with torch.no_grad():
            if not self._followed(call, tensors):
                out = func(*args, **kwargs)
                for one in call.written:
                    self.shadows.drop(one)
                return out
            return self._write(call) if call.written else self._derive(call)

    def _followed(self, call: BoundCall, tensors: list[torch.Tensor]) -> bool:
        if not call.repeatable or call.into_integers or any(one.is_complex() for one in tensors):
            return False
        if call.batch_norm:
            return True
        recorded = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        if not recorded and torch._C._current_graph_task_id() == -1:  # private: whether autograd's engine runs
            return True
        return any(
            self.shadows.touches(one) or self._storage(one) in self._own or (written and one.dtype in NARROW)
            for one in tensors
            for written in (any(one is other for other in call.written) and self._storage(one) in self._storages,)
        )

    @staticmethod
    def _storage(tensor: torch.Tensor) -> int:
        region = region_of(tensor)
        return -1 if region is None else region[0]

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.shadows.holds(tensor):
            return self.shadows.value(tensor)
        return tensor.detach().to(torch.float64, copy=True)

    def _form(self, tensor: torch.Tensor) -> Form:
        if self.shadows.holds(tensor):
            return self.shadows.form(tensor)
        region = region_of(tensor)
        if region is None or region[0] not in self._storages:
            return CONSTANT
        fresh = self.shadows.fresh(region)
        return fresh if region in self._roles else mixed((fresh, *map(itself, self._within(region))))

    def _within(self, region: Region) -> Iterator[Region]:
        begin, end = region[1], region[1] + region[2]
        return (one for one in self._roles if one[0] == region[0] and one[1] < end and begin < one[1] + one[2])

    def _write(self, call: BoundCall) -> Any:
        """An op that writes to its arguments: the twins first, since the op itself changes what it reads."""
        carried = any(self._form(one).origins for one in leaves((*call.args, *call.kwargs.values())))
        for one in call.written:
            if one.dtype in NARROW or (carried and one.is_floating_point()):
                for region in self._within(region_of(one) or (-1, 0, 0)):
                    self.shadows.seed(one.as_strided((region[2],), (1,), region[1]))
                self.shadows.seed(one)
        targets = [(number, one) for number, one in enumerate(call.written) if self.shadows.holds(one)]
        forms = {number: self._results(call, number, one) for number, one in targets}
        befores = {
            number: one.detach().clone()
            for number, one in targets
            if 0.0 < (factor := forms[number][1]) < 1.0 and region_of(one) in self._roles and factor != 1.0
        }
        rounds_at_random = self._rounds_at_random(call)
        followed = False
        with suppress(Exception):  # what cannot run in float64 is taken as it is
            call.again(self._wide)
            followed = True
        out = call.op(*call.args, **call.kwargs)
        for number, one in targets:
            self._note(call, one)
            form, factor = forms[number]
            if number in befores:
                self._scaled(call, one, befores[number], factor)
            if not followed:
                self.shadows.drop(one)
                continue
            self._constant(call, number, one, one)
            if rounds_at_random or self._overwrites(one, form):
                self.shadows.value(one).copy_(one)  # what is given a value anew has lost nothing by rounding it
                form = CONSTANT
            self.shadows.rewrite(one, form)
        return out

    def _overwrites(self, target: torch.Tensor, form: Form) -> bool:
        """Whether a tensor that lives across steps is given a value that does not depend on the one it had."""
        region = region_of(target)
        if region is None or region[0] not in self._storages:
            return False
        return form.origins.isdisjoint((region, *self._within(region)))

    def _rounds_at_random(self, call: BoundCall) -> bool:
        """Whether a cast into a narrow tensor rounds by noise that was added before: stochastic rounding.

        Such noise spreads over a whole spacing of the format; on random numbers in a small update it is not taken.
        """
        target, source = call.argument("self"), call.argument("src")
        if call.base != "copy" or call.foreach or not self.shadows.is_drawn(source) or source.dtype in NARROW:
            return False
        if target.dtype not in NARROW or target.shape != source.shape or not target.numel():
            return False
        old = target.to(torch.float64)
        distance = (source.to(torch.float64) - old).abs() / spacing(old, format_of(target.dtype))
        return float(distance.clamp(max=0.5).mean()) > _NOISY

    def _derive(self, call: BoundCall) -> Any:
        """An op that makes new tensors: they get twins where they could be a new value of a resident."""
        out = call.op(*call.args, **call.kwargs)
        made = list(leaves(out))
        if not any(one.is_floating_point() and one.numel() in self._sizes for one in made):
            return out
        with suppress(Exception):
            wide = list(leaves(call.again(self._wide)))
            for number, (one, value) in enumerate(zip(made, wide, strict=True)):
                if one.is_floating_point() and value.dtype is torch.float64 and not self.shadows.touches(one):
                    form = self._combined(call, call.operands(number, self._form))
                    self._constant(call, number, one, None)
                    self.shadows.put(one, value, form)
        return out

    def _results(self, call: BoundCall, number: int, target: torch.Tensor) -> tuple[Form, float]:
        """The form of what is written, and the factor if it is nothing but a multiple of what was there; else NaN."""
        none = float("nan")
        here = self.shadows.form(target)
        if call.batch_norm:
            kept = added(scaled(here, 1.0 - call.momentum), CONSTANT)
            return kept, none
        if call.fused:
            return self._fused(call, target, here), none
        operands = call.operands(number, self._form)
        form = self._combined(call, operands)
        region = region_of(target)
        if region is None or not operands:
            return form, none
        if call.base == "copy" or not any(one is target for one in leaves(call.given[0][1])):  # assigned, as by out=
            gain, now = form.gain(region), here.gain(region)
            return form, gain / now if form.pure and gain and now else none
        relative = self._combined(call, [Operand(itself(region)), *operands[1:]])
        return form, (relative.gain(region) or none) if relative.pure else none

    @staticmethod
    def _combined(call: BoundCall, operands: list[Operand]) -> Form:
        if call.argument("rounding_mode") is not None or (call.base == "index_put" and not call.argument("accumulate")):
            return mixed([operand.form for operand in operands])
        base = "index_add" if call.base == "index_put" else call.base
        return combine(base, operands, call.number("alpha"), call.number("beta"))

    def _fused(self, call: BoundCall, target: torch.Tensor, here: Form) -> Form:
        """A fused optimizer mixes all, but its kernels are known to decay the moments by their betas."""
        for argument, value in call.given:
            if argument.name in _FUSED_DECAYS and any(one is target for one in leaves(value)):
                return added(scaled(here, call.number(_FUSED_DECAYS[argument.name])), CONSTANT)
        return mixed((here,))

    def _note(self, call: BoundCall, target: torch.Tensor) -> None:
        region = region_of(target)
        if region not in self._roles:
            return
        if region not in self.written:
            file, line = ("", None) if self._roles[region] is Role.PARAMETER else users_line(sys._getframe())
            self.written[region] = Written(file=file, line=line)
        self.written[region].op = op_name(call.op)

    def _scaled(self, call: BoundCall, target: torch.Tensor, before: torch.Tensor, factor: float) -> None:
        region = region_of(target)
        if region is None:
            return
        nonzero = before != 0
        stuck = int((nonzero & (target == before)).sum())
        self.written[region].scalings.append(Scaling(factor, int(nonzero.sum()), stuck, op_name(call.op)))

    def _constant(self, call: BoundCall, number: int, result: torch.Tensor, target: torch.Tensor | None) -> None:
        """Note a constant that guards (an eps) and is zero in the format of what it is added to."""
        if call.base not in ("add", "sub", "clamp", "clamp_min", "maximum") or result.dtype not in NARROW:
            return
        if target is not None and region_of(target) in self._roles:
            return
        operands = call.operands(number, self._form)
        constant = operands[1].value if len(operands) > 1 else None
        constant = constant * call.number("alpha") if constant is not None else None
        origins = operands[0].form.origins
        if constant is None or not 0 < abs(constant) <= format_of(result.dtype).flushes_at or not origins:
            return
        file, line = users_line(sys._getframe())
        name = str(result.dtype).removeprefix("torch.")
        kept = self.vanished.setdefault(
            (constant, name), VanishedConstant(constant, name, origins, op_name(call.op), file, line)
        )
        kept.origins |= origins
        kept.zeros += int((result == 0).sum())


def _is_cast(op: torch._ops.OpOverload) -> bool:
    return op is torch.ops.aten._to_copy.default
