"""Find compiled code that is out of date: what it runs changed after it was compiled, in a way that no guard sees."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Call, name_of
from ampcheck.facts.memory import dtype_name
from ampcheck.numerics.record import Execution, streams
from ampcheck.numerics.run import RunPlan, outputs_of, run_subject
from ampcheck.records.results import Key
from ampcheck.shadow import Shadow
from ampcheck.shadow.compare import Result, compare_results
from ampcheck.torchtools.contexts import Attributes, attributes, contexts_of, set_attributes
from ampcheck.torchtools.copying import Prepared, fresh_call
from ampcheck.torchtools.dynamo import reset
from ampcheck.torchtools.interception import CompiledCall
from ampcheck.torchtools.reachable import Reached, reach
from ampcheck.torchtools.snapshot import Snapshot, preserved

_CALLS = 4
"""Calls of one callable that are compared with eager mode: each after a change, which costs an eager run."""

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
            self._compare(call, old, eager, bits=False)
        for changed in self._suspected:
            with changed.established():
                reset()
                self._compare(changed.call, changed.old, changed.eager, bits=bool(changed.contexts))

    def _compare(self, call: CompiledCall, old: Execution, eager: Execution | None, *, bits: bool) -> None:
        if eager is None or (new := _compiled(call, gradients=bool(eager.gradients))) is None:
            return
        name, of_new = name_of(call.original), _apart(new, eager, bits=bits)
        apart = {key: error for key, error in _apart(old, eager, bits=bits).items() if key not in of_new}
        if old.random != eager.random == new.random:
            which = ("draw random numbers", "none") if old.random else ("draw no random numbers", "some")
            self.found[name] = f"{which[0]} where eager mode draws {which[1]}"
        elif _dtypes(old) != _dtypes(eager) == _dtypes(new):
            names = (", ".join(dict.fromkeys(map(dtype_name, _dtypes(run)))) for run in (old, eager))
            self.found[name] = "give {} where eager mode gives {}".format(*names)
        elif apart:
            self.found[name] = f"give a result that lies {max(apart.values()):.2g} away from eager mode"
        elif lost := _lost(old, eager) - _lost(new, eager):
            self.found[name] = f"give no gradient to {len(lost)} weights that get one in eager mode"


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

    def out_of_date(self) -> tuple[CompiledCall, Execution, Execution] | None:
        """The first call as the graphs that it has run it and in eager mode, if these differ.

        None where the callable changed after its last call: nobody calls its graphs any more.
        """
        if self.left != self.state():
            return None
        more = any(not any(weight is seen for seen in self.trained) for weight in _trained(self.call))
        old, eager = _compiled(self.call, gradients=more), _eager(self.call, gradients=more)
        if old is None or eager is None or not (_differ(old, eager) or _lost(old, eager)):
            return None
        return self.call, old, eager


@dataclass(slots=True)
class _Changed:
    """A call of a callable that changed since its call before: all that it runs, and its results in eager mode.

    Where it has contexts, results are compared bit by bit: with another dtype of a `torch.autocast` roundings alone may
    differ.
    """

    call: CompiledCall
    start: Snapshot
    functions: _Functions
    contexts: Attributes
    eager: Execution | None
    old: Execution

    @classmethod
    def before(cls, call: CompiledCall, known: _Known) -> _Changed:
        start = Snapshot(_reached(call))
        eager = _eager(call)
        functions, contexts = _functions(known.modules), attributes(known.contexts)
        return cls(call, start, functions, contexts, eager, Execution(begun=streams(call.device)))

    def differs(self, result: object) -> bool:
        """Return whether the result of the call differs from that of eager mode; None is that of a call that raised."""
        self.old.streams = streams(self.call.device)
        for path, tensor in outputs_of(result, self.old.unseen):
            self.old.keep(("output", path, 0), tensor)
        return self.eager is not None and _differ(self.old, self.eager, bits=bool(self.contexts))

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
    """Return whether the callable steps an optimizer or draws on an iterator, which cannot be repeated on a copy."""
    inside = reach({"": call.original})
    return bool(inside.optimizers or inside.scalers or inside.opaque)


def with_copies(call: CompiledCall) -> CompiledCall:
    """The call with copies of its arguments, which later steps may change."""
    fresh = fresh_call(Call(call.args, call.kwargs))
    return replace(call, args=fresh.args, kwargs=dict(fresh.kwargs))


def _reached(call: CompiledCall) -> Reached:
    """Return what the callable leads to, with its hooks, which may keep what they see in the user's containers."""
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
    """Code and settings of modules, without the values of their tensors: equal as long as nobody changes them."""

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
    """Return whether two are the same plain value; the elements of tensors are not compared."""
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


def _eager(call: CompiledCall, *, gradients: bool = False) -> Execution | None:
    """The call in eager mode, with the exact values of its results."""
    return _run(call, call.function, gradients=gradients, shadow=Shadow(freedom=True))


def _compiled(call: CompiledCall, *, gradients: bool) -> Execution | None:
    return _run(call, call.compile(call.function), gradients=gradients)


def _run(call: CompiledCall, function: Any, *, gradients: bool, shadow: Shadow | None = None) -> Execution | None:
    """The results of a call; None where it raises. What it changes is restored."""
    reached = _reached(call)
    root = torch.nn.ModuleList(reached.modules.values())
    prepared = Prepared(function, (fresh_call(Call(call.args, call.kwargs)),), root)
    plan = RunPlan(call.device, call.autocast, grad=call.grad, inputs=frozenset())
    plan = plan if gradients else replace(plan, no_backward="outputs alone are compared")
    with preserved(reached):
        run = run_subject(prepared, plan, keep=True, shadow=shadow)
    return run if run.error is None else None


def _outputs(run: Execution) -> dict[Key, Result]:
    return {key: result for key, result in run.results.items() if key[0] == "output"}


def _dtypes(run: Execution) -> list[torch.dtype]:
    return [result.value.dtype for result in _outputs(run).values()]


def _differ(old: Execution, eager: Execution, *, bits: bool = False) -> bool:
    """Return whether two runs differ; never where the shapes of the results do, as after a call that raised."""
    if [r.value.shape for r in _outputs(old).values()] != [r.value.shape for r in _outputs(eager).values()]:
        return False
    return old.random != eager.random or _dtypes(old) != _dtypes(eager) or bool(_apart(old, eager, bits=bits))


def _apart(run: Execution, eager: Execution, *, bits: bool) -> dict[Key, float]:
    """The outputs that are not those of eager mode up to rounding, or to the last of its bits, with their relative
    errors; none where a run draws random numbers."""
    outputs, values = _outputs(eager), run.values
    if run.random or eager.random:
        return {}
    errors = {error.key: error for error in compare_results(outputs, values, eager.freedom)}
    if bits:
        return {k: errors[k].apart for k, r in outputs.items() if k in values and not torch.equal(r.value, values[k])}
    return {key: error.apart for key, error in errors.items() if error.at_fault}


def _lost(run: Execution, eager: Execution) -> set[str]:
    """The weights that get a gradient but zero in eager mode alone; none where a run draws random numbers."""
    received = [{k[1] for k, r in e.results.items() if k[0] == "gradient" and r.value.any()} for e in (run, eager)]
    return set() if run.random or eager.random else received[1] - received[0]
