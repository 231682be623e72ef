"""`Shadow`: carries companions along with every tensor of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, methodcaller
from time import perf_counter
from typing import Any

import torch

from ampcheck.core.errors import OP_ERRORS, EnoughSteps, brief
from ampcheck.core.run import Where
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.facts.values import CompanionStore
from ampcheck.records.faults import Fault
from ampcheck.shadow.accumulators import follow_accumulators
from ampcheck.shadow.call import Call, Side, floating_values, leaves, results_of
from ampcheck.shadow.escapes import (
    eager_cond,
    eager_flex_attention,
    exports_of_the_user,
    literals_by_ops,
    watched_escapes,
)
from ampcheck.shadow.exchange import Exchange, communicates
from ampcheck.shadow.follower import Follower
from ampcheck.shadow.freedom import Freedom, with_call
from ampcheck.shadow.increments import follow_lineage
from ampcheck.shadow.judge import Judge
from ampcheck.shadow.reached import LEFT
from ampcheck.shadow.result import Reference
from ampcheck.shadow.rowwise import RowCall, row_call
from ampcheck.shadow.rules import HIGHER, composed
from ampcheck.shadow.steps import Steps, gradients_of
from ampcheck.shadow.threads import watched_threads
from ampcheck.shadow.wraps import is_integer
from ampcheck.stream.calls import subscribed
from ampcheck.stream.ops import OpEvent, OpSubscriber
from ampcheck.torchtools.dynamo import in_eager_mode
from ampcheck.torchtools.modes import AUTOCAST, aside, autocast_of_caller
from ampcheck.torchtools.origin import Origins
from ampcheck.torchtools.patching import traces_unseen
from ampcheck.torchtools.private import (
    TRACERS,
    DispatchKey,
    DispatchKeySet,
    backward_task,
    below_autograd,
    excluding_keys,
    has_kernel_for,
    mode_of_kind,
)
from ampcheck.torchtools.process_groups import process_rank
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import Scopes, op_name
from ampcheck.torchtools.storage import local, unwrapped

_ABOVE = AUTOCAST | DispatchKeySet(DispatchKey.ADInplaceOrView)
"""Dispatch keys below which companions are computed, together with autograd."""
_NOTHING, _STORAGE, _NUMBER = nullcontext(), methodcaller("untyped_storage"), attrgetter("_cdata")
_WATCHED = 1 << 24
"""Bytes of an array of NumPy that is compared with what it was before each use, at the most."""


class Shadow(OpSubscriber):
    """Carry float64 companions along with every floating tensor of the run, and record the ops that are at fault.

    model: the module whose paths faults have; without it, every module is followed by its path in the outermost one.
    judge: compare results with their companions; without it companions are only carried. freedom: also measure which
    decisions other roundings may turn, and of the place of each op whether it took or gave values of 16 bits
    (`in_16_bits`). renews: without a model, let weights of 32 bits begin each step of an optimizer
    with their real values.

    Nothing of the run is changed: results, gradients and random state are those of a run without it. PyTorch itself
    takes other formulas under any dispatch mode in a few places: the backward of `prod` with zeros, `_foreach_max`,
    `ormqr`, and `linalg.cond`, `matrix_norm`, `matrix_rank` and `norm` with `out=`. Compiled functions run in eager
    mode, where ops can be followed and `torch.compiler.is_compiling()` is False; `compiled` counts their calls. What
    was compiled before the block is used again after it.

    Companions are kept while their tensors live, also after the block. Ops that have neither a rule nor a float64
    kernel restart from their real results; `unruled` counts them by name, and ops of threads that are started inside,
    whose results enter as data. Large matrices are followed by the rows that ops have read, the others restart;
    `partly` counts such ops. `escapes` counts by line the numbers that leave the run (`item`, `tolist`, `numpy`,
    pickles): what comes back is data. `whole` counts ops without floating results, which round nothing. `failed` is the
    place of the op that raised, None where the last succeeded. Past `until` of `perf_counter`, ops raise `EnoughSteps`.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        judge: bool = True,
        freedom: bool = False,
        renews: bool = True,
    ) -> None:
        self.store = CompanionStore(process_rank())  # other data on other ranks move otherwise
        self.freedom = Freedom() if freedom else None
        self.in_16_bits: dict[Where, bool] = {}
        self.unruled: Counter[str] = Counter()
        self.escapes: Counter[str] = Counter()
        self.partly: Counter[str] = Counter()
        self.judge = Judge(self.store, dropped=model is None) if judge else None
        self.ops = self.compiled = self.whole = 0
        self._in_higher, self.until = False, float("inf")
        self.failed: Where | None = None
        self._sides = (Side(self.store, "exact"), Side(self.store, "moved"))
        self._follower = Follower(self.store, self._sides, self.unruled)
        self._model, self._renews = model, renews
        self._steps = Steps(self.store, lambda: self._scopes.roots, self.reach, self.renew)
        self._scopes = Scopes(
            model,
            everywhere=model is None,
            on_evaluation=self._steps.evaluate if renews else None,
            on_output=self._after_root,
        )
        self._origins, self._exchange = Origins(self._scopes), Exchange(self.store)

    def around(self) -> Iterator[AbstractContextManager[Any]]:
        """The scopes of modules, and what follows ops that are no calls of the dispatcher or run elsewhere."""
        yield self._scopes.watched()
        yield subscribed(optimizer_step=self._step) if self._model is None else _NOTHING
        yield literals_by_ops()
        yield watched_escapes(self._escaped, self._entered)
        yield exports_of_the_user()
        yield traces_unseen(self._traced)
        yield watched_threads(self, self.store, self.unruled)
        yield from (in_eager_mode(self._ran_eagerly), eager_flex_attention(), eager_cond(_traces))

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._left()

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults, in the order in which they first happened."""
        return self.judge.faults if self.judge is not None else ()

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """The exact companion of a tensor, float64."""
        return self._companion(tensor, self._sides[0])

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The moved companion of a tensor, float32."""
        return self._companion(tensor, self._sides[1])

    def _companion(self, tensor: torch.Tensor, side: Side) -> torch.Tensor:
        with aside():
            if tensor._is_zerotensor():  # zeros without memory, as forward-mode derivatives have
                return torch.zeros(tensor.shape, dtype=side.lift_dtype(tensor.dtype), device=tensor.device)
            return side.of(tensor)

    def renew(self, tensor: torch.Tensor) -> None:
        """Make the present values of a tensor data, as if it entered the block now; forget its error."""
        with aside():
            known = self.store.of(tensor)
            self.store.forget(tensor)
            self.store.of(tensor).updates = known.updates

    def reference(self, tensor: torch.Tensor) -> Reference:
        """A copy of the companions of a tensor, with which other runs of the same call can be compared."""
        with aside():
            known = self.store.of(tensor).unit if has_companions(tensor) else roundoff(tensor.dtype)
            return Reference(self.exact(tensor).clone(), self.moved(tensor).clone(), known)

    def reach(self, outputs: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Record which faults are left in outputs (results, weights, buffers), and in gradients of one step.

        The error of a gradient counts by its share of the norm of all `gradients` together.
        """
        if self.judge is not None:
            weights = {name for name, tensor in outputs.items() if isinstance(tensor, torch.nn.Parameter)}
            with aside():
                results, grads = ({name: local(t) for name, t in (e or {}).items()} for e in (outputs, gradients))
                self.judge.reach(results, grads, weights)

    def _left(self) -> None:
        """The block ended."""
        self.reach_ends()

    def reach_ends(self) -> None:
        """Without a model, record what is left in the modules that ran, and in values that no op has used."""
        if self._model is not None or self.judge is None:
            return
        for root in self._scopes.roots:
            parameters = dict(root.named_parameters())
            self.reach({**parameters, **dict(root.named_buffers())}, gradients_of(parameters))
        self.judge.reach_ends()

    def _step(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> Iterator[None]:
        self._steps.begin(optimizer)
        with self._scopes.updating():
            yield
        if self._renews:
            self._steps.end(optimizer)

    def _after_root(self, module: torch.nn.Module, output: object) -> None:
        results = {path: unwrapped(t) for path, t in tensors(output) if t.is_floating_point()}
        self.reach({f"the output {path} of {type(module).__name__}": t for path, t in results.items()})

    def see(self, event: OpEvent) -> Any:
        """Follow an op. A subclass unwraps itself first; its inner ops come here."""
        if event.fake or any(map(mode_of_kind, TRACERS)):
            return event.run()  # no values: a graph, or a DTensor that works out the shape of a result
        if perf_counter() > self.until:
            raise EnoughSteps
        if event.higher:
            return self._inside(event)
        if event.wrapped:
            return NotImplemented
        op = event.traits
        below = self._in_higher or torch.is_inference_mode_enabled()
        if below and has_kernel_for(event.op._name, "CompositeImplicitAutograd"):
            # Elsewhere autograd divides such an op; whole, `to` and `reshape` pass for views though they copy.
            return composed(event, "CompositeImplicitAutograd")
        if op.view:
            return self._run(event)
        if op.namespace == "fsdp":
            return composed(event, event.tensors[0].device.type.upper())
        if op.namespace != "aten" and communicates(op):
            return self._communicate(event)
        return self._compute(event)

    def _compute(self, event: OpEvent) -> Any:
        """An op that computes with the values of this rank."""
        op = event.traits
        call = Call(event.op, op, event.args, event.kwargs)
        if self._exchange.settles and self._exchange.repeats(call):
            return self._run(event)
        if self._steps.due is not None and self._scopes.phase == "update" and backward_task() == -1:
            with aside():
                self._steps.meet_gradients()
        call.inputs = floating_values(event.tensors)
        storages = set(map(_NUMBER, map(_STORAGE, call.inputs)))
        rows = self._prepare(call)
        out = call.out = self._run(event)
        if rows is not None:
            with aside():
                call = rows.ran(out)
            storages = set(map(_NUMBER, map(_STORAGE, call.inputs)))
        self._find_results(call, storages)
        out = call.out if rows is None else out
        if self.judge is not None and len(event.tensors) > len(call.inputs):
            self.judge.wraps.see(event, call, self._origins, self.ops)
        if not (call.fresh or call.written or (call.before and self._reads(call))):
            self.whole += 1
            return out
        self.ops += 1
        # What inference mode makes could not be written outside of it.
        outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING
        with outside, below_autograd(), excluding_keys(_ABOVE):
            self._follow(call, self._origins.current(call.traits.title, event.line))
            if rows is not None:
                self.partly[op.title] += rows.write_back(out)
        return out

    def _prepare(self, call: Call) -> RowCall | None:
        """Note the companions of the inputs of an op before it may overwrite them; the op by rows, see `row_call`."""
        op = call.traits
        call.before += map(self.store.of, call.inputs)
        if op.keeps or (op.writes and is_integer(call.args[0])):
            call.kept = call.args[0].clone()
        for companions in call.before if op.writes else ():
            if companions.source is not None and companions.rows is None:
                companions.fill()
        if self.store.by_rows or op.name == "embedding_dense_backward":
            with aside():
                return row_call(call, self.store)
        return None

    def _find_results(self, call: Call, storages: Collection[int]) -> None:
        """Note what an op that ran has written and returned. storages: those of its inputs."""
        if self.store.watches:
            for tensor, companions in zip(call.inputs, call.before, strict=True):
                if companions.bytes is not None:  # the op itself may have written
                    self.store.watch_memory(tensor, companions)
        written = call.written_values() if call.traits.writes else []
        if written:
            call.written = floating_values(written)
            for tensor in leaves(written):
                if not tensor.is_floating_point() and not tensor.is_complex():
                    with torch.inference_mode(False), torch.no_grad():
                        self.store.write_integers(tensor, call.args[1] if call.name == "copy_" else None)
        call.results = results_of(call.out)
        call.fresh = [t for t in call.results if t is not None and t.untyped_storage()._cdata not in storages]

    def _reads(self, call: Call) -> bool:
        """Return whether an op without floating results decides upon floating values, or lets them leave the run."""
        return call.traits.leaves or (self.judge is not None and bool(call.traits.decides))

    def _follow(self, call: Call, where: Where) -> None:
        """Bring the companions of the results of an op up to date, and judge them."""
        call.where, call.index = where, self.ops
        if where.phase == "backward":
            self._steps.due = self._steps.stepping
        for companions in call.before:
            companions.consumed |= bool(call.fresh or call.written)
            call.inherited |= companions.faults
        call.followed = not (call.fresh or call.written) or self._follower.follow(call)
        call.after = list(map(self.store.of, (*call.written, *call.fresh)))
        if call.followed and call.fresh:
            follow_accumulators(call)
        if call.before and call.traits.leaves:
            self.escapes[f"{where.file}:{where.line}"] += 1
        if self.judge is None:
            return
        try:
            self.judge.judge(call, call.followed)
            if self.freedom is not None:
                self.freedom = with_call(self.freedom, call, self.store)
                self._note_precision(call)
        except OP_ERRORS as error:  # what we cannot judge must not pose as a failure of the run
            self.unruled[f"{op_name(call.op)} is not judged: {brief(error)}"] += 1
        if call.written or call.traits.adds or call.traits.copies is not None:
            follow_lineage(call, self.store)

    def _inside(self, event: OpEvent) -> Any:
        """A higher-order op. Where a rule can call what it calls, every op inside is followed."""
        run = HIGHER.get(str(event.op))
        if run is not None:
            outer, self._in_higher = self._in_higher, True
            try:
                with event.again():
                    return run(*event.args, **event.kwargs)
            finally:
                self._in_higher = outer
        self.unruled[f"what runs inside {event.op}"] += 1
        tensors = [(t, t._version) for t in floating_values(event.tensors) if not t.is_inference()]
        out = event.run()
        with aside():
            self.store.lift_known(tensor for tensor, version in tensors if tensor._version != version)
        return out

    def _communicate(self, event: OpEvent) -> Any:
        """A collective: the companions of all ranks that have a shadow travel with it."""
        call = Call(event.op, event.traits, event.args, event.kwargs)
        if not floating_values(event.tensors):
            return self._run(event)
        with aside():
            begun = self._exchange.begin(call)
            call.before = [self.store.of(t) for t in begun[0].gives] if begun is not None else []
            for companions in call.before:
                companions.consumed = True
        call.out = self._run(event)
        with aside():
            inherited = self._exchange.end(call, begun)
            if inherited is None:
                self.unruled[f"{op_name(call.op)}: the companions of other ranks are not known"] += 1
                return call.out
            self.ops += 1
            if self.judge is not None and call.written:
                call.where, call.index = self._origins.current(call.traits.title, event.line), self.ops
                call.inherited, call.after = inherited, list(map(self.store.of, call.written))
                self.judge.judge(call, True)
        return call.out

    def _note_precision(self, call: Call) -> None:
        narrow = any(t.dtype.itemsize <= 2 for t in (*call.inputs, *call.fresh, *call.written))
        self.in_16_bits[call.where] = narrow or self.in_16_bits.get(call.where, False)

    def _escaped(self, tensor: torch.Tensor, shared: bool) -> None:
        """Count numbers that leave the run without an op; memory that they leave with may be written from outside."""
        with aside():
            for values in floating_values(tensor):
                if shared:
                    self.store.watch_memory(values, self.store.of(values))
                where = self._origins.current()
                self.escapes[place := f"{where.file}:{where.line}"] += 1
                if self.judge is not None:
                    self.judge.reach_values([self.store.of(values)], LEFT.format(place), reported=True)

    def _traced(self, module: object) -> None:
        """Go on with the values of a module that ran unseen."""
        with aside():
            self.store.lift_known(module.state_dict().values() if isinstance(module, torch.nn.Module) else ())

    def _ran_eagerly(self) -> None:
        self.compiled += 1

    def _entered(self, tensor: torch.Tensor) -> None:
        """Follow an array that NumPy may write later; not where comparing it before every use takes long."""
        if has_companions(tensor) and tensor.untyped_storage().nbytes() <= _WATCHED:
            with aside():
                self.store.watch_memory(tensor, self.store.of(tensor))

    def _run(self, event: OpEvent) -> Any:
        self.failed = None
        try:
            with autocast_of_caller() if event.traits.composed else _NOTHING:
                return event.run()
        except BaseException:
            self.failed = self._origins.current(event.traits.title, event.line)
            raise


def _traces() -> bool:
    """Return whether ops are traced (`FakeTensorMode`, `make_fx`, export): without values, or to be recorded."""
    return any(map(mode_of_kind, TRACERS))
