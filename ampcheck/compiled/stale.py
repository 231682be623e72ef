"""Find compiled code that is out of date: what it runs changed after it was compiled, in a way that no guard sees."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampcheck.core.errors import UsageError, as_result
from ampcheck.core.subject import name_of
from ampcheck.facts.memory import dtype_name
from ampcheck.torchtools.contexts import Attributes, attributes, contexts_of, set_attributes
from ampcheck.torchtools.dynamo import in_eager_mode, reset
from ampcheck.torchtools.interception import CompiledCall
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.reachable import Reached, reach
from ampcheck.torchtools.snapshot import Snapshot, preserved

_STALE = 0.02
"""The relative difference to eager mode from which graphs are out of date, where new graphs are ten times nearer."""

_ROUNDED = 2.0**-11
"""The same where a context changed, as an object of `torch.autocast` with another dtype: half an ULP of float16."""

_CALLS = 4
"""How many calls of one callable are compared with eager mode: each after a change, which costs an eager run."""

_Functions = dict[type, dict[str, object]]


class StaleGraphs:
    """Compares calls of compiled code with eager mode where the callable changed since its call before.

    A graph that was compiled before a hook was added, a method patched or an attribute replaced may pass its guards; in
    PyTorch 2.9 also one compiled before a weight required a gradient. A call is compared at its time: later all may be
    as it was, or changed once more without another call. found: what differs, by the name of the callable.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._known: dict[object, _Known] = {}
        self._suspected: list[_Changed] = []

    def begin(self, code: object, call: CompiledCall) -> Callable[[object], None] | None:
        """A call begins, of the code of a callable. Returns what gets its result; None where nothing is compared."""
        known = self._known.get(code)
        if known is None:
            if steps_or_draws(call):
                return None
            modules = [part for m in _reached(call).modules.values() for part in m.modules()]
            known = self._known[code] = _Known(with_copies(call), modules, _trained(call), contexts_of(call.original))
            return known.leave
        if call.original is not known.call.original:
            return None
        if known.compared == _CALLS or known.state() == known.left:
            return known.leave
        known.compared += 1
        try:
            changed = _Changed.before(with_copies(call), known)
        except UsageError:  # it cannot be copied
            return known.leave

        def end(result: object) -> None:
            if changed.differs(result):
                self._suspected.append(changed)
            known.leave(result)

        return end

    def compile_again(self) -> None:
        """After the last call, while its graphs are still there: run what is in doubt by new graphs, and compare."""
        last = [found for known in self._known.values() if (found := known.out_of_date()) is not None]
        for call, old, eager in last:
            reset()
            self._compare(call, old, eager)
        for changed in self._suspected:
            with changed.established():
                reset()
                self._compare(changed.call, changed.old, changed.eager, changed.limit)

    def _compare(self, call: CompiledCall, old: _Outcome | None, eager: _Outcome | None, limit: float = _STALE) -> None:
        if old is None or eager is None or (new := _compiled(call, eager.weights)) is None:
            return
        name, away = name_of(call.original), _distance(old, eager)
        if old.drawn != eager.drawn == new.drawn:
            which = ("draw random numbers", "none") if old.drawn else ("draw no random numbers", "some")
            self.found[name] = f"{which[0]} where eager mode draws {which[1]}"
        elif old.dtypes != eager.dtypes == new.dtypes:
            names = (", ".join(dict.fromkeys(map(dtype_name, outcome.dtypes))) for outcome in (old, eager))
            self.found[name] = "give {} where eager mode gives {}".format(*names)
        elif away > limit and away > 10 * _distance(new, eager):
            self.found[name] = f"give a result that lies {away:.2g} away from eager mode"
        elif lost := sum(n and was for n, was in zip(new.received, _lost(old, eager), strict=False)):
            self.found[name] = f"give no gradient to {lost} weights that get one in eager mode"


@dataclass(slots=True)
class _Known:
    """A callable: its first call, its modules, the weights that required a gradient then, the contexts that it has; how
    its last call left it."""

    call: CompiledCall
    modules: list[torch.nn.Module]
    trained: list[torch.nn.Parameter]
    contexts: list[object]
    left: object = None
    compared: int = 0

    def leave(self, result: object) -> None:
        self.left = self.state()

    def state(self) -> _State:
        return _State(self.modules, [value for _, values in attributes(self.contexts) for value in values.values()])

    def out_of_date(self) -> tuple[CompiledCall, _Outcome, _Outcome] | None:
        """The first call with its outcomes by the graphs that it has and in eager mode, if these differ.

        None where the callable changed after its last call: nobody calls its graphs any more.
        """
        if self.left != self.state():
            return None
        new_weights = [w for w in _trained(self.call) if not any(w is seen for seen in self.trained)]
        old, eager = _compiled(self.call, new_weights), _eager(self.call, new_weights)
        if old is None or eager is None or not (_apart(old, eager) or _lost(old, eager)):
            return None
        return self.call, old, eager


@dataclass(slots=True)
class _Outcome:
    """The floating results of a call and their dtypes, whether it drew random numbers, and which weights got a gradient
    but zero."""

    results: list[torch.Tensor]
    dtypes: list[torch.dtype]
    drawn: bool
    weights: Sequence[torch.nn.Parameter] = ()
    received: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class _Changed:
    """A call of a callable that changed since its call before: all that it runs, and its outcome in eager mode."""

    call: CompiledCall
    start: Snapshot
    functions: _Functions
    contexts: Attributes
    eager: _Outcome | None
    begun: list[torch.Tensor]
    old: _Outcome | None = None

    @classmethod
    def before(cls, call: CompiledCall, known: _Known) -> _Changed:
        start = Snapshot(_reached(call))
        eager = _eager(call)
        functions, contexts = _functions(known.modules), attributes(known.contexts)
        return cls(call, start, functions, contexts, eager, _random_state(call.device))

    @property
    def limit(self) -> float:
        return _ROUNDED if self.contexts else _STALE

    def differs(self, result: object) -> bool:
        """Whether the result of the call differs from that of eager mode; None is that of a call that raised."""
        drawn = not _same(self.begun, _random_state(self.call.device))
        self.old = _Outcome(*_floating(result), drawn)
        return self.eager is not None and _apart(self.old, self.eager, self.limit)

    @contextmanager
    def established(self) -> Iterator[None]:
        """Everything is as it was before the call."""
        now = attributes([context for context, _ in self.contexts])
        with preserved(_reached(self.call)), _with_functions(self.functions):
            self.start.restore()
            try:
                set_attributes(self.contexts)
                yield
            finally:
                set_attributes(now)


def steps_or_draws(call: CompiledCall) -> bool:
    """Whether the callable steps an optimizer or draws on an iterator, which cannot be repeated on a copy."""
    inside = reach({"": call.original})
    return bool(inside.optimizers or inside.scalers or inside.opaque)


def with_copies(call: CompiledCall) -> CompiledCall:
    """The call with copies of its arguments, which later steps may change."""
    return replace(call, args=map_tensors(_copied, call.args), kwargs=map_tensors(_copied, call.kwargs))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _reached(call: CompiledCall) -> Reached:
    """What the callable leads to, with its hooks, which may keep what they see in the user's containers."""
    original = call.original
    parts = original.modules() if isinstance(original, torch.nn.Module) else ()
    tables = [table for m in parts for name, table in vars(m).items() if name.endswith("_hooks") and table]
    return reach({"": original, "hooks": [hook for table in tables for hook in dict(table).values()]})


def _trained(call: CompiledCall) -> list[torch.nn.Parameter]:
    """The parameters of what is called that require a gradient now."""
    modules = reach({"": call.original}).modules.values()
    return list(dict.fromkeys(weight for m in modules for weight in m.parameters() if weight.requires_grad))


def _functions(modules: Sequence[torch.nn.Module]) -> _Functions:
    """The functions of the modules' classes, which compiled code assumes not to change."""
    kinds = {kind for m in modules for kind in type(m).__mro__ if kind not in (torch.nn.Module, object)}
    return {k: {n: f for n, f in vars(k).items() if isinstance(f, types.FunctionType)} for k in kinds}


class _State:
    """What modules run, without the values of their tensors: equal as long as nobody changes it."""

    def __init__(self, modules: Sequence[torch.nn.Module], more: Sequence[object]) -> None:
        functions = _functions(modules).values()
        values: list[object] = [*more, *(f for table in functions for f in (*table, *table.values()))]
        for module in modules:
            for content in vars(module).values():
                if not isinstance(content, dict):
                    values.append(content)
                elif content:  # parts, weights and hooks
                    values += [*content, *content.values()]
            values += [weight.requires_grad for weight in module._parameters.values() if weight is not None]
        self._values, self._identities = values, list(map(id, values))  # kept alive, so that each `id` is unique

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _State):
            return False
        if self._identities == other._identities:  # in almost every call
            return True
        pairs = zip(self._values, other._values, strict=False)
        return len(self._values) == len(other._values) and all(one is two or _is_equal(one, two) for one, two in pairs)


def _is_equal(one: object, other: object) -> bool:
    """Whether two are the same plain value; the elements of tensors are not compared."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return type(one) is type(other) and isinstance(one, (bool, int, float, str, type(None))) and one == other


@contextmanager
def _with_functions(functions: _Functions) -> Iterator[None]:
    """Inside, the classes have these functions."""
    restores: list[tuple[type, str, object]] = []
    try:
        for kind, wanted in functions.items():
            present = {n: f for n, f in vars(kind).items() if isinstance(f, types.FunctionType)}
            for name in {**present, **wanted}:
                if present.get(name) is not wanted.get(name):
                    restores.append((kind, name, present.get(name)))
                    _set(kind, name, wanted.get(name))
        yield
    finally:
        for kind, name, function in restores:
            _set(kind, name, function)


def _set(kind: type, name: str, function: object) -> None:
    if function is None:
        delattr(kind, name)
    else:
        setattr(kind, name, function)


def _eager(call: CompiledCall, weights: Sequence[torch.nn.Parameter] = ()) -> _Outcome | None:
    with in_eager_mode():
        return _outcome(call, call.function, weights)


def _compiled(call: CompiledCall, weights: Sequence[torch.nn.Parameter]) -> _Outcome | None:
    return _outcome(call, call.compile(call.function), weights)


def _outcome(call: CompiledCall, function: Any, weights: Sequence[torch.nn.Parameter]) -> _Outcome | None:
    """The outcome of a call; None where it raises. What it changes is restored."""
    repeated = with_copies(call)
    autocast = torch.autocast(call.device, call.autocast, enabled=call.autocast is not None)
    with preserved(_reached(call)), torch.set_grad_enabled(call.grad), autocast:
        begun = _random_state(call.device)
        try:
            result = function(*repeated.args, **repeated.kwargs)
            drawn = not _same(begun, _random_state(call.device))
            roots = [t for _, t in tensors(result) if t.is_floating_point() and t.requires_grad]
            gradients: Sequence[torch.Tensor | None] = [None] * len(weights)
            if roots and weights:
                seeds = [torch.ones_like(t) for t in roots]
                gradients = torch.autograd.grad(roots, weights, seeds, allow_unused=True)
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; it did not in its own run
            as_result(error)
            return None
        received = [g is not None and bool(g.any()) for g in gradients]
        return _Outcome(*_floating(result), drawn, weights, received)


def _floating(result: object) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    floating = [t for _, t in tensors(result) if t.is_floating_point()]
    return [t.detach().double().clone() for t in floating], [t.dtype for t in floating]


def _random_state(device: str) -> list[torch.Tensor]:
    """The state of PyTorch's random numbers, on the CPU and on the device of a call."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def _same(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, ones, others))


def _apart(old: _Outcome, eager: _Outcome, limit: float = _STALE) -> bool:
    """Whether two outcomes differ; never where the shapes of the results do, as after a call that raised."""
    alike = old.drawn == eager.drawn and old.dtypes == eager.dtypes
    return _shapes(old) == _shapes(eager) and not (alike and _distance(old, eager) <= limit)


def _shapes(outcome: _Outcome) -> list[torch.Size]:
    return [t.shape for t in outcome.results]


def _lost(old: _Outcome, eager: _Outcome) -> list[bool]:
    """For each weight whether it gets a gradient in eager mode alone; [] where it is all the same."""
    lost = [e and not o for o, e in zip(old.received, eager.received, strict=False)]
    return lost if any(lost) and not (old.drawn or eager.drawn) else []


def _distance(outcome: _Outcome, reference: _Outcome) -> float:
    """The largest difference of two results, relative to the largest element of each reference.

    0 where they draw random numbers, and where they have other shapes.
    """
    results, references = outcome.results, reference.results
    if outcome.drawn or reference.drawn or _shapes(outcome) != _shapes(reference):
        return 0.0
    pairs = ((t, r) for t, r in zip(results, references, strict=True) if r.numel() and bool(r.isfinite().all()))
    return max((float((t - r).abs().amax() / r.abs().amax().clamp_min(1e-30)) for t, r in pairs), default=0.0)
