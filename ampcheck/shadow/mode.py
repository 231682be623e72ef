"""`Shadow`: the dispatch mode that carries companions along and judges every result."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampcheck.core.errors import brief
from ampcheck.core.formats import format_of
from ampcheck.shadow import faults
from ampcheck.shadow.bounds import Examination, examine, is_within
from ampcheck.shadow.call import Call, Side, leaves, op_schema
from ampcheck.shadow.companions import Companions, CompanionStore, has_companions, roundoff, view_of
from ampcheck.shadow.faults import Fault, Key, Step, extended
from ampcheck.shadow.rules import RULES
from ampcheck.torchtools.origin import Origin, Origins
from ampcheck.torchtools.source import Scopes, op_name

_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
_ESCAPES = ("_local_scalar_dense", "is_nonzero", "equal")


class Shadow(TorchDispatchMode):
    """Carry float64 companions along with every floating tensor of the run, and record the ops that are at fault.

    model: the module whose paths faults have; without it, every module is followed by its path in the outermost one.
    judge: compare results with their companions; without it companions are only carried.

    The run itself is not changed: results, gradients and random state are those of a run without it. Companions are kept
    while their tensors live, also after the block.
    """

    supports_higher_order_operators = True

    def __init__(self, model: torch.nn.Module | None = None, *, judge: bool = True, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store = CompanionStore(seed)
        self.unruled: Counter[str] = Counter()
        self.escapes: Counter[str] = Counter()
        self.ops = self.judged = self.low = 0
        self._judging = judge
        self._sides = (Side(self.store, "exact"), Side(self.store, "moved"))
        self._faults: dict[Key, Fault] = {}
        self._scopes = Scopes(model, everywhere=model is None)
        self._origins = Origins(self._scopes)
        self._open = ExitStack()

    def __enter__(self) -> Shadow:
        self._open.enter_context(self._scopes.watched())
        try:
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            super().__exit__(*exc)  # type: ignore[no-untyped-call]
        finally:
            self._open.close()

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults, in the order in which they first happened."""
        return tuple(sorted(self._faults.values(), key=lambda fault: fault.index))

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """The exact companion of a tensor, float64."""
        with torch.no_grad(), _disable_current_modes():
            return self.store.exact(tensor)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The moved companion of a tensor, float32."""
        with torch.no_grad(), _disable_current_modes():
            return self.store.moved(tensor)

    def reaching(self, tensors: Iterable[torch.Tensor]) -> tuple[Fault, ...]:
        """The faults whose errors are still beyond their bounds in one of these tensors."""
        known = [self.store.known(t) for t in tensors if has_companions(t)]
        keys = frozenset().union(*(c.faults for c in known if c is not None))
        return tuple(fault for fault in self.faults if fault.key in keys)

    def trail(self, tensor: torch.Tensor) -> tuple[Step, ...]:
        """How the error of a tensor came about, from the op at fault to the tensor; empty for a tensor without fault."""
        companions = self.store.known(tensor)
        step = companions.trail if companions is not None else None
        steps: list[Step] = []
        while isinstance(step, Step):
            steps.append(step)
            step = step.before
        return tuple(reversed(steps))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            self.unruled[str(func)] += 1
            return func(*args, **kwargs)
        if any(t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types):
            return NotImplemented  # a subclass unwraps itself first; its inner ops come here
        schema = op_schema(func)
        if schema.view:
            return func(*args, **kwargs)
        call = Call(func, schema, args, kwargs)
        call.inputs = [t for t in leaves((args, tuple(kwargs.values()))) if has_companions(t)]
        before = [self.store.of(t) for t in call.inputs]  # before the op, which may overwrite them
        storages = {t.untyped_storage()._cdata for t in call.inputs}
        call.out = func(*args, **kwargs)
        for position, name in schema.writes:
            value = args[position] if position < len(args) else kwargs.get(name)
            call.written += [t for t in leaves(value) if has_companions(t)]
        call.fresh = [t for t in call.outputs() if has_companions(t) and t.untyped_storage()._cdata not in storages]
        if not call.fresh and not call.written:
            if schema.name in _ESCAPES and before:
                self._escape(call, before)
            return call.out
        self.ops += 1
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            origin = self._origins.current(sys._getframe(1))
            inherited = frozenset().union(*(c.faults for c in before)) if before else frozenset()
            ruled = self._follow(call, before)
            if self._judging:
                self._judge(call, origin, before, inherited, ruled)
        return call.out

    def _escape(self, call: Call, before: list[Companions]) -> None:
        origin = self._origins.current(sys._getframe(2))
        self.escapes[f"{origin.file}:{origin.line}"] += 1

    def _follow(self, call: Call, before: list[Companions]) -> bool:
        """Bring the companions of all results up to date; False where they restart from the real results."""
        schema = call.schema
        unit = max([c.unit for c in before], default=0.0)
        whole = bool(before) and all(c.whole for c in before) and not schema.random
        for tensor in call.written:
            companions = self.store.of(tensor)
            companions.own()
            companions.unit = max(unit, roundoff(tensor.dtype))
            companions.written = True
            companions.updates = 0 if schema.resets else companions.updates + 1
        rule = RULES.get(schema.name)
        if schema.unset or (schema.random and rule is None):
            self._restart(call, moves=not schema.unset)
            return False
        if schema.name in ("_to_copy", "clone") and self._share(call):
            return True
        try:
            results = [self._run(rule, call, side) for side in self._sides]
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            self.unruled[f"{op_name(call.op)}: {brief(error)}"] += 1
            self._restart(call)
            return False
        sides = [list(_results(result)) for result in results]
        for tensor, exact, moved in zip(_results(call.out), *sides, strict=True):
            if tensor is None or not any(tensor is t for t in call.fresh):
                continue
            if exact is None or moved is None or exact.shape != tensor.shape:
                self.store.of(tensor, moves=False)
            else:
                own = max(unit, roundoff(tensor.dtype))
                self.store.assign(tensor, exact, moved, own).whole = whole or not before
        return True

    @staticmethod
    def _run(rule: Any, call: Call, side: Side) -> Any:
        return rule(call, side) if rule is not None else side.run(call)

    def _share(self, call: Call) -> bool:
        source, result = call.args[0], call.fresh[0] if call.fresh else None
        if result is None or not has_companions(source) or not call.inputs:
            return False
        if source.dtype is not result.dtype and call.name == "clone":
            return False
        return self.store.share(result, source) is not None

    def _restart(self, call: Call, moves: bool = False) -> None:
        for tensor in call.fresh:
            self.store.of(tensor, moves=moves)
        for tensor in call.written:
            self.store.lift(tensor, moves=moves)

    def _judge(
        self, call: Call, origin: Origin, before: list[Companions], inherited: frozenset[Any], ruled: bool
    ) -> None:
        if not ruled or (call.schema.moves and not inherited and not call.schema.writes):
            return
        statistics = call.name.startswith("native_") and not call.name.endswith("backward")
        results = call.written + (call.fresh[:1] if statistics else call.fresh)
        for tensor in results:
            self.judged += 1
            companions = self.store.of(tensor)
            self.low += tensor.dtype.itemsize <= 2
            exact, moved = view_of(tensor, companions.exact.values), view_of(tensor, companions.moved.values)
            if not tensor.numel() or (not tensor.is_complex() and is_within(tensor, exact, moved, companions.unit)):
                companions.faults, companions.trail = frozenset(), None
                continue
            real = format_of(tensor.dtype) if not tensor.is_complex() else format_of(torch.float32)
            seen = examine(tensor, exact, moved, companions.unit, real.flushes_at)
            if not seen.beyond:
                companions.faults, companions.trail = frozenset(), None
                continue
            where = origin.where(op_name(call.op))
            if inherited:
                companions.faults = inherited
                worst = next((c.trail for c in before if c.faults and isinstance(c.trail, Step)), None)
            else:
                fault = self._fault(call, tensor, exact, seen, where)
                self._faults[fault.key] = self._faults[fault.key] + fault if fault.key in self._faults else fault
                companions.faults = frozenset([fault.key]) if fault.kind != faults.MASK else frozenset()
                worst = None
            companions.trail = extended(where, torch.inf if seen.lost else seen.error, worst)

    def _fault(
        self, call: Call, tensor: torch.Tensor, exact: torch.Tensor, seen: Examination, where: Any
    ) -> Fault:
        written = {t.untyped_storage()._cdata for t in call.written}
        sources = [t for t in call.inputs if t.untyped_storage()._cdata not in written]
        return Fault(
            self._kind(call, tensor, seen, bool(written)),
            where,
            str(tensor.dtype).removeprefix("torch."),
            seen,
            tuple(tensor.shape),
            amax_in=max(map(_amax, sources), default=0.0),
            amax_out=_amax(tensor),
            exact_amax=_amax(exact),
            elements=seen.lost or seen.zeroed,
            index=self.ops,
        )

    def _kind(self, call: Call, tensor: torch.Tensor, seen: Examination, written: bool) -> str:
        if seen.lost:
            return faults.MASK if seen.masked else faults.OVERFLOW
        if seen.flushed > 0.5:
            return faults.ZERO if seen.emptied else faults.FLUSH
        if written:
            return faults.DRIFT
        return faults.ROUNDING if self._rounds(call, tensor, seen) else faults.CANCELLATION

    def _rounds(self, call: Call, tensor: torch.Tensor, seen: Examination) -> bool:
        """Whether the op itself loses the digits: float64 on the same inputs gives something else."""
        try:
            alone = _Alone(self.store).run(call)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return True
        same = [r for r in leaves(alone) if r.shape == tensor.shape and r.is_complex() == tensor.is_complex()]
        wide = tensor.to(same[0].dtype) if same else None
        if wide is None:
            return True
        own = min(float(torch.linalg.vector_norm(wide - r)) for r in same)
        size = min(float(torch.linalg.vector_norm(r)) for r in same)
        return not own <= 0.3 * seen.impact * size


class _Alone(Side):
    """The real inputs of one op, converted to float64."""

    def __init__(self, store: CompanionStore) -> None:
        super().__init__(store, "exact")

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.convert(tensor)


def _results(out: Any) -> Iterable[Any]:
    """The results of an op in order, nested lists flattened; `None` where a rule gives none."""
    if isinstance(out, (list, tuple)):
        for item in out:
            yield from _results(item)
    else:
        yield out if isinstance(out, torch.Tensor) else None


def _amax(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    if not tensor.numel():
        return 0.0
    magnitude = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    return float(torch.where(magnitude.isfinite(), magnitude, 0.0).amax())


