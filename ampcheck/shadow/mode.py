"""`Shadow`: the dispatch mode that carries companions along with every tensor of the run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampcheck.core.errors import brief
from ampcheck.core.run import Where
from ampcheck.shadow.call import Call, Side, leaves, op_schema
from ampcheck.shadow.companions import Companions, CompanionStore, has_companions, roundoff
from ampcheck.shadow.faults import Fault, Step
from ampcheck.shadow.judge import Judge
from ampcheck.shadow.reference import Reference
from ampcheck.shadow.rules import RULES
from ampcheck.torchtools.origin import Origins
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import Scopes, op_name

_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
_LEAVES = ("_local_scalar_dense", "is_nonzero", "equal")
_FAILURES = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


class Shadow(TorchDispatchMode):
    """Carry float64 companions along with every floating tensor of the run, and record the ops that are at fault.

    model: the module whose paths faults have; without it, every module is followed by its path in the outermost one.
    judge: compare results with their companions; without it companions are only carried. seed: of the moves of data.

    Nothing of the run is changed: results, gradients and random state are those of a run without it. Companions are
    kept while their tensors live, also after the block. Ops inside higher-order ops and ops that have neither a rule
    nor a float64 kernel restart from their real results; `unruled` counts them. `failed` is the place of the op
    that raised, None where the last op succeeded.
    """

    supports_higher_order_operators = True

    def __init__(self, model: torch.nn.Module | None = None, *, judge: bool = True, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store = CompanionStore(seed)
        self.unruled: Counter[str] = Counter()
        self.escapes: Counter[str] = Counter()
        self.judge = Judge(self.store) if judge else None
        self.ops = 0
        self.failed: Where | None = None
        self._sides = (Side(self.store, "exact"), Side(self.store, "moved"))
        self._model = model
        self._scopes = Scopes(model, everywhere=model is None, on_step=self._before_step, on_output=self._after_root)
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
        if self._model is None and self.judge is not None:
            self._reach_ends()

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults, in the order in which they first happened."""
        return self.judge.faults if self.judge is not None else ()

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """The exact companion of a tensor, float64."""
        with _aside():
            return self.store.exact(tensor)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The moved companion of a tensor, float32."""
        with _aside():
            return self.store.moved(tensor)

    def renew(self, tensor: torch.Tensor) -> None:
        """Let a tensor enter anew with its present values, as data; the error that it had is forgotten."""
        with _aside():
            updates = self.store.of(tensor).updates
            self.store.forget(tensor)
            self.store.of(tensor).updates = updates

    def reference(self, tensor: torch.Tensor) -> Reference:
        """A copy of the companions of a tensor, with which other runs of the same call can be compared."""
        with _aside():
            return Reference(
                self.store.exact(tensor).clone(), self.store.moved(tensor).clone(), self.store.of(tensor).unit
            )

    def reach(self, outputs: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Record which faults are left in outputs (results, weights, buffers), and in gradients of one step.

        The error of a gradient counts by its share of the norm of all `gradients` together.
        """
        if self.judge is not None:
            with _aside():
                self.judge.reach(outputs, gradients or {})

    def _reach_ends(self) -> None:
        """Record what is left in the modules that ran, and in values that no op has used."""
        for root in self._scopes.roots:
            parameters = dict(root.named_parameters())
            self.reach({**parameters, **dict(root.named_buffers())}, _gradients(parameters))
        if self.judge is not None:
            self.judge.reach_ends()

    def _after_root(self, module: torch.nn.Module, output: object) -> None:
        results = {path: t for path, t in tensors(output) if t.is_floating_point()}
        self.reach({f"the output {path} of {type(module).__name__}": t for path, t in results.items()})

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        names = {id(p): name for root in self._scopes.roots for name, p in root.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.reach({}, _gradients({names.get(id(p), f"parameter {i}"): p for i, p in enumerate(parameters)}))

    def trail(self, tensor: torch.Tensor) -> tuple[Step, ...]:
        """How the error of a tensor came about, from the op at fault on; empty for a tensor without fault."""
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
            self.unruled[f"what runs inside {func}"] += 1
            return func(*args, **kwargs)
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)  # a DTensor that works out the shape of a result
        if any(t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types):
            return NotImplemented  # a subclass unwraps itself first; its inner ops come here
        schema = op_schema(func)
        if schema.view:
            return self._call(func, args, kwargs)
        call = Call(func, schema, args, kwargs)
        call.inputs = [t for t in leaves((args, tuple(kwargs.values()))) if has_companions(t)]
        before = [self.store.of(t) for t in call.inputs]  # before the op, which may overwrite them
        storages = {t.untyped_storage()._cdata for t in call.inputs}
        call.out = self._call(func, args, kwargs)
        for position, name in schema.writes:
            value = args[position] if position < len(args) else kwargs.get(name)
            call.written += [t for t in leaves(value) if has_companions(t)]
        call.fresh = [t for t in call.outputs() if has_companions(t) and t.untyped_storage()._cdata not in storages]
        decides = bool(before) and self.judge is not None and self.judge.decides(call)
        leaves_run = bool(before) and schema.name in _LEAVES
        if not (call.fresh or call.written or decides or leaves_run):
            return call.out
        self.ops += 1
        for companions in before:
            companions.used = True
            companions.consumed |= bool(call.fresh or call.written)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST), torch.inference_mode(False), torch.no_grad():
            origin = self._origins.current(sys._getframe(1))
            inherited = frozenset[Any]().union(*(c.faults for c in before))
            ruled = self._follow(call, before) if call.fresh or call.written else True
            if ruled and call.fresh:
                _follow_accumulators(call, origin.where(op_name(func)), before, self.store)
            if leaves_run:
                self.escapes[f"{origin.file}:{origin.line}"] += 1
            if self.judge is not None:
                try:
                    self.judge.judge(call, origin, before, inherited, ruled, self.ops)
                except _FAILURES as error:  # what we cannot judge must not pose as a failure of the run
                    self.unruled[f"{op_name(func)} is not judged: {brief(error)}"] += 1
        return call.out

    def _call(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.failed = None
        try:
            return func(*args, **kwargs)
        except BaseException:
            self.failed = self._origins.current(sys._getframe(2)).where(op_name(func))
            raise

    def _follow(self, call: Call, before: list[Companions]) -> bool:
        """Bring the companions of all results up to date; False where they restart from the real results."""
        schema = call.schema
        unit = max([c.unit for c in before], default=0.0)
        whole = all(c.whole for c in before) and (bool(before) or not schema.random)
        whole = whole and not any(isinstance(v, float) and not v.is_integer() for v in call.args)
        for tensor in call.written:
            companions = self.store.of(tensor)
            companions.own()
            companions.unit = max(unit, roundoff(tensor.dtype))
            companions.whole = companions.whole and whole
            companions.consumed = companions.used = False
            companions.updates = 0 if schema.resets else companions.updates + 1
        rule = RULES.get(schema.name)
        if schema.unset or (schema.random and rule is None):
            self._restart(call, moves=not schema.unset)
            return False
        if schema.name in ("_to_copy", "clone") and self._share(call):
            return True
        try:
            results = [rule(call, side) if rule is not None else side.run(call) for side in self._sides]
        except _FAILURES as error:
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
                self.store.assign(tensor, exact, moved, own).whole = whole and schema.exact
        return True

    def _share(self, call: Call) -> bool:
        source, result = call.args[0], call.fresh[0] if call.fresh else None
        if result is None or not has_companions(source):
            return False
        return self.store.share(result, source) is not None

    def _restart(self, call: Call, moves: bool = False) -> None:
        for tensor in call.fresh:
            self.store.of(tensor, moves=moves)
        for tensor in call.written:
            self.store.lift(tensor, moves=moves)


def _follow_accumulators(call: Call, where: Where, before: list[Companions], store: CompanionStore) -> None:
    """Count how often a statement such as `total = total * 0.9 + x` built on its own result.

    The result of its last op is passed on by the ops of the same line to the same op of the next iteration.
    """
    result = call.fresh[0]
    if result.dtype.itemsize > 2:
        return
    sources = [c for t, c in zip(call.inputs, before, strict=True) if c.site and t.shape == result.shape]
    same_line = [c for c in sources if c.site and (c.site.file, c.site.line) == (where.file, where.line)]
    companions = store.of(result)
    if not same_line:
        companions.site = where
        return
    source = max(same_line, key=lambda c: c.updates)
    companions.site, companions.updates = source.site, source.updates + (source.site == where)


def _gradients(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


@contextmanager
def _aside() -> Iterator[None]:
    """Compute with companions outside of any mode."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def _results(out: Any) -> Iterator[Any]:
    """The results of an op in order, nested lists flattened; `None` where a rule gives none."""
    if isinstance(out, (list, tuple)):
        for item in out:
            yield from _results(item)
    else:
        yield out if isinstance(out, torch.Tensor) else None
