"""One execution of one side of a comparison: its results with their companions, and what is at fault in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ampcheck.core.arm import Arm
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage
from ampcheck.core.subject import Subject, is_architecture, load_attribute, load_subject
from ampcheck.core.text import listed
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.numerics.measure import counted_results, judged_by, positive, unruled
from ampcheck.parity.trail import Trail, is_opaque
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.results import Key, ResultError
from ampcheck.shadow.call import Call
from ampcheck.shadow.compare import Result, compare_results, compare_shadowed, result_of, with_totals
from ampcheck.shadow.freedom import Freedom
from ampcheck.shadow.independent import ObservedShadow
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.source import users_place

RESULTS = ("module", "output", "written", "buffer", "gradient")
"""Kinds of results, in the order in which they are compared: of modules that are named, what a call returns, arguments
and buffers that it writes, gradients of arguments and parameters."""


@dataclass(frozen=True, slots=True)
class Side:
    """What runs: a function of these arguments, or what `build` makes inside the shadow, as `(function, args)`.

    name: `a` or `b` in findings. dtype: what autocast casts to; None leaves the caller's autocast as it is. modules: by
    the path of a module, the name under which its result and the gradients of its parameters are compared.
    """

    name: str
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[], Any] | None = None
    dtype: torch.dtype | None = None
    backward: bool = True
    modules: Mapping[str, str] = field(default_factory=dict)

    def made(self) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
        """The function and its arguments."""
        if self.function is not None:
            return self.function, self.args, self.kwargs
        assert self.build is not None
        subject = _raised_by(self, self.build)
        if not isinstance(subject, Subject):
            subject = Subject(subject, name=self.name)
        if len(subject.calls) != 1 or isinstance(subject.model, tuple):
            raise UsageError(
                f"side {self.name} must build (function or module, args) or (function or module, args, kwargs), one "
                f"call of it; found a subject of kind '{subject.kind.value}'"
            )
        return subject.model, subject.calls[0].args, subject.calls[0].kwargs


class NoBackwardError(Exception):
    """The backward pass of a side raises."""


def _raised_by(side: Side, call: Callable[[], Any]) -> Any:
    """Run code of the user. What it raises is a `UsageError` of its side; where only gradients prevent it,
    `NoBackwardError`."""
    try:
        return call()
    except UsageError:
        raise
    except BaseException as error:
        text = brief(as_result(error))
        if side.backward and isinstance(error, RuntimeError) and any(word in text for word in ("leaf", "grad")):
            raise NoBackwardError(text) from error
        file, line = users_place(error)
        place = f" at {file}:{line}" if file else ""
        raise UsageError(f"side {side.name} raised {text}{place}") from error


@dataclass(slots=True)
class Execution:
    """What one execution gave.

    results: by key. errors: how far each of them lies from its exact value. stats: what the checks of a run in low
    precision look at. opaque: ops that were not followed inside. trail: where it was asked for, with the record of each
    result in `records`. plain: what the call returned, where it returned no tensor. compiled: errors of the results of
    compiled code, which the shadow runs in eager mode. notes: what else is to be known of the comparison. raised: an
    exception.
    """

    side: Side
    results: dict[Key, Result] = field(default_factory=dict)
    errors: tuple[ResultError, ...] = ()
    stats: NumericsStats | None = None
    freedom: Freedom | None = None
    opaque: Counter[str] = field(default_factory=Counter)
    trail: Trail | None = None
    records: dict[Key, int] = field(default_factory=dict)
    plain: object = None
    compiled: tuple[ResultError, ...] = ()
    notes: list[str] = field(default_factory=list)


def execute(
    side: Side,
    *,
    trail: Trail | None = None,
    independent: bool = False,
    replace_opaque: Callable[[Call, ObservedShadow], None] | None = None,
) -> Execution:
    """Run a side once under a shadow, on copies of its arguments, with equal seeds; its state is as before.

    trail: records the values. independent: exact takes the decisions, and no run is judged. replace_opaque: gives
    companions to what an op that cannot be followed returned. A backward pass that raises is left out with a note.
    Raises `UsageError` for a side that raises.
    """
    run = Execution(side, trail=trail)
    observer = partial(_observe, run, replace_opaque)
    try:
        with seeded(), _restored(side.function):
            _execute(run, observer, independent)
    except NoBackwardError as error:
        again = None if trail is None else Trail(shapes=trail.shapes, bits=trail.bits)
        forward = execute(
            replace(side, backward=False), trail=again, independent=independent, replace_opaque=replace_opaque
        )
        forward.notes.append(f"gradients are not compared: {side.name} raised {error}")
        return forward
    return run


def _observe(
    run: Execution, replace_opaque: Callable[[Call, ObservedShadow], None] | None, shadow: ObservedShadow, call: Call
) -> None:
    if is_opaque(call):
        run.opaque[call.traits.title] += 1
        if replace_opaque is not None:
            replace_opaque(call, shadow)
    if run.trail is not None:
        run.trail(call)


def _execute(run: Execution, observer: Callable[[ObservedShadow, Call], None], independent: bool) -> None:
    side = run.side
    module = side.function if isinstance(side.function, torch.nn.Module) else None
    shadow = ObservedShadow(module, independent=independent, freedom=True)
    shadow.observer = partial(observer, shadow)
    if run.trail is not None:
        run.trail.shadow = shadow
    with shadow, nullcontext() if side.backward else torch.no_grad():
        live = _Call(side, *side.made())
        results = live.results()
        run.plain = live.plain
        named = {str_of(key): t for key, t in results.items() if has_companions(t)}
        of_backward = {name: t for name, t in named.items() if name.startswith("gradient")}
        shadow.reach({f"the {name}": t for name, t in named.items() if name not in of_backward}, of_backward)
        with without_modes(), torch.no_grad():
            run.results = {key: result_of(shadow, t.detach()) for key, t in results.items()}
            if run.trail is not None:
                run.records = {
                    k: run.trail.number(t.detach()) for k, t in results.items() if has_companions(t) and t.numel()
                }
    run.freedom = shadow.freedom
    known = {
        key: result for key, result in run.results.items() if result.reference is not None and result.value.numel()
    }
    run.errors = tuple(with_totals(compare_shadowed(k, r.value, r.reference) for k, r in known.items() if r.reference))
    run.stats = _stats(run, shadow)
    if shadow.compiled and not independent:
        run.compiled = _compiled(run)


class _Call:
    """One call of a function on copies of its arguments."""

    def __init__(
        self, side: Side, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        def copied(tensor: torch.Tensor) -> torch.Tensor:
            twin = tensor.detach().clone() if tensor.is_contiguous() and not tensor.storage_offset() else _like(tensor)
            return twin.requires_grad_() if side.backward and tensor.is_floating_point() else twin

        args, kwargs = map_tensors(copied, list(args)), map_tensors(copied, dict(kwargs))
        self._arguments = {path: t for path, t in tensors((list(args), kwargs)) if t.numel()}
        self._before = {path: t.detach().clone() for path, t in self._arguments.items()}
        module = function if isinstance(function, torch.nn.Module) else None
        named = {} if module is None else dict(module.named_parameters())
        self._parameters = {f"parameter {_renamed(name, side.modules)}": p for name, p in named.items()}
        self._buffers = {} if module is None else {_renamed(n, side.modules): b for n, b in module.named_buffers()}
        self._old = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}
        self.modules: dict[Key, torch.Tensor] = {}
        with _module_results(side, module, self.modules), _autocast(side, self._arguments.values()):
            returned = _raised_by(side, lambda: function(*args, **kwargs))
        self.outputs: dict[Key, torch.Tensor] = {("output", path, 0): t for path, t in tensors(returned)}
        self.plain = None if self.outputs else returned
        self._backward = side.backward

    def results(self) -> dict[Key, torch.Tensor]:
        """All results by key, in the order in which they are compared."""
        return self.modules | self.outputs | self._written() | self._changed_buffers() | self._gradients()

    def _written(self) -> dict[Key, torch.Tensor]:
        """The arguments that the call has written."""
        changed = {n: t for n, t in self._arguments.items() if not torch.equal(t.detach(), self._before[n])}
        return {("written", f"argument {name}", 0): t for name, t in changed.items()}

    def _changed_buffers(self) -> dict[Key, torch.Tensor]:
        """The buffers that it has written."""
        return {("buffer", n, 0): t for n, t in self._buffers.items() if not torch.equal(t, self._old[n])}

    def _gradients(self) -> dict[Key, torch.Tensor]:
        """The gradients of a sum of all outputs with random signs, which no norm takes out, and which are whole
        numbers."""
        roots = [t for t in self.outputs.values() if t.requires_grad and t.numel()]
        arguments = {f"argument {path}": t for path, t in self._arguments.items()}
        leaves = {name: t for name, t in (arguments | self._parameters).items() if t.requires_grad and t.is_leaf}
        if not (self._backward and roots and leaves):
            return {}
        signs = [_signs(tensor) for tensor in roots]
        try:
            given = torch.autograd.grad(roots, list(leaves.values()), signs, allow_unused=True)
        except RuntimeError as error:
            raise NoBackwardError(brief(error)) from error
        return {("gradient", name, 0): g for name, g in zip(leaves, given, strict=True) if g is not None}


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the layout of a tensor: its strides, its offset, and the memory around it."""
    memory = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return twin.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    """The name of a parameter or buffer in a comparison, by the longest path of a module that is named."""
    name = name.replace("_orig_mod.", "")  # of a compiled module
    paths = [path for path in modules if path == "" or name.startswith(f"{path}.")]
    if not paths:
        return name
    path = max(paths, key=len)
    inside = name[len(path) :].removeprefix(".")
    return f"{modules[path]}.{inside}".removeprefix(".")


@contextmanager
def _module_results(side: Side, root: torch.nn.Module | None, results: dict[Key, torch.Tensor]) -> Iterator[None]:
    """Keep the floating results of the modules that are named, in the order in which they run."""
    known = {} if root is None else dict(root.named_modules())
    if absent := [path for path in side.modules if path not in known]:
        have = listed(known) if known else "no modules, as it is a function"
        raise UsageError(f"modules must name modules of {side.name}; there is no {absent[0]!r}, but {have}")
    calls = Counter[str]()

    def keep(name: str, _module: object, _args: object, output: object) -> None:
        number = calls[name]
        calls[name] += 1
        title = f"{name} call {number}" if number else name
        for path, tensor in tensors(output):
            if tensor.is_floating_point():
                results["module", f"{title} {path}".strip(), 0] = tensor

    hooks = [known[path].register_forward_hook(partial(keep, name)) for path, name in side.modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _autocast(side: Side, arguments: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    if side.dtype is None:
        return nullcontext()
    device = next((tensor.device.type for tensor in arguments), "cpu")
    return torch.autocast(device, side.dtype)


def _signs(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tensor.numel())
    signs = torch.randint(0, 2, (tensor.numel(),), generator=generator).mul_(2).sub_(1)
    return signs.view(tensor.shape).to(tensor.dtype)


def str_of(key: Key) -> str:
    """A result in words: `output logits`."""
    return " ".join(key[:2]).strip()


def _stats(run: Execution, shadow: ObservedShadow) -> NumericsStats:
    """The record of the checks of a run in low precision."""
    judged, counts = judged_by(shadow)
    units = [error.unit for error in run.errors]
    dtypes = {roundoff(d): d for d in (torch.float32, torch.float16, torch.bfloat16)}
    form = next((d for unit, d in dtypes.items() if units and max(units) <= unit), torch.bfloat16)
    return NumericsStats(
        subject=run.side.name,
        arm=Arm(),
        format=format_of(form).name,
        device="cpu",
        errors=tuple(_of_outputs(run.errors)),
        no_backward="" if any(key[0] == "gradient" for key in run.results) else "no gradient was taken",
        coverage=Coverage(positive({**counts, **counted_results(run.errors)}), unruled(shadow)),
        **judged,
    )


def _of_outputs(errors: Iterable[ResultError]) -> Iterator[ResultError]:
    """The errors of what leaves a call; what it writes counts as an output."""
    for error in errors:
        if error.kind != "module":
            yield replace(error, key=("output", *error.key[1:])) if error.kind == "written" else error


def _compiled(run: Execution) -> tuple[ResultError, ...]:
    """The results of compiled code beside the exact values of the eager run."""
    return compare_results(run.results, run_plainly(run.side).values, run.freedom)


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a run without a shadow, by key. notes: what else is to be known."""

    values: Mapping[Key, torch.Tensor]
    notes: tuple[str, ...] = ()


def run_plainly(side: Side) -> Results:
    """Run a side as it is, on copies of its arguments. Raises `UsageError` where it raises."""
    notes: tuple[str, ...] = ()
    with seeded(), _restored(side.function):
        try:
            results = _run_once(side)
        except NoBackwardError as error:
            notes = (f"gradients are not compared: {side.name} raised {error}",)
            results = _run_once(replace(side, backward=False))
    return Results({key: tensor.detach() for key, tensor in results.items()}, notes)


def _run_once(side: Side) -> dict[Key, torch.Tensor]:
    with nullcontext() if side.backward else torch.no_grad():
        return _Call(side, *side.made()).results()


@contextmanager
def _restored(function: Callable[..., Any] | None) -> Iterator[None]:
    """Restore what the modules that a function is, or closes over, save: parameters and buffers."""
    saved = [
        (t, t.detach().clone()) for module in modules_of(function) for t in (*module.parameters(), *module.buffers())
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in saved:
                if tensor.shape == before.shape and not torch.equal(tensor, before):
                    tensor.copy_(before)


def modules_of(function: object) -> list[torch.nn.Module]:
    """The modules that a function is, is a method of, or closes over."""
    owner = getattr(function, "__self__", None)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    inside = [c for c in cells if c is not function and callable(c) and not isinstance(c, torch.nn.Module)]
    return [m for m in (function, owner, *cells) if isinstance(m, torch.nn.Module)] + [
        module for closed in inside for module in (modules_of(closed) if hasattr(closed, "__closure__") else ())
    ]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def side_of_target(target: str, name: str, **options: Any) -> Side:
    """The side that `file.py:function` names, which is called inside the shadow."""
    if not is_architecture(target):
        load_attribute(target)  # imported outside of it
    return Side(name, build=partial(load_subject, target), **options)
