"""The judge: the same model in float64, and how far it moves when its inputs and weights are rounded.

A low-precision run is held against float64, never against float32 or eager alone. How much error is honest follows from
the model itself: float64 is run again with every weight, and every input that the low-precision run rounds, moved by
one unit roundoff of the format. An error that such a change of the data explains belongs to the data (backward
stability, N. J. Higham, Accuracy and Stability of Numerical Algorithms, chapter 1); an error beyond it belongs to the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.core.subject import Call, Subject
from ampcheck.numerics.arms import Outcome, run_arm
from ampcheck.numerics.decisions import Decisions
from ampcheck.numerics.distance import errors_of
from ampcheck.numerics.equal_random import EqualRandom
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.low_casts import LowCasts
from ampcheck.numerics.ops import OpWatch
from ampcheck.numerics.stats import Raised
from ampcheck.torchtools.copying import Prepared, prepare
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.source import users_place
from ampcheck.torchtools.trace import Observer, OpEvent, Trace

Change: TypeAlias = Callable[[Prepared], None]
"""Something done to a prepared copy before it runs."""

SAMPLES = 2
"""Perturbed runs. Two random directions agree within a factor of two for all but the smallest tensors."""

_WRITES_IN_PLACE = frozenset(
    ("copy_", "__setitem__", "index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_")
)


_PROMOTED = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class WideRun:
    """One run in float64 or float32. nonfinite: the ops that made infinities or NaN, in order; draws: whether any op
    drew; low: how many results had 16 bits all the same, by casts of the model's own; inexact: integers that such casts
    lost."""

    outcome: Outcome
    decisions: Decisions
    nonfinite: tuple[OpFacts, ...]
    draws: bool
    low: int
    inexact: int

    @property
    def produced(self) -> frozenset[Where]:
        """Where infinities or NaN were made."""
        return frozenset(fact.where for fact in self.nonfinite)


@dataclass(slots=True)
class Reference:
    """The judge of a subject.

    how: `float64`; `float64, mixed operands promoted` where the model mixes its own float32 tensors in; `float32` where
    it does not run in float64. float32: what the model decides in float32. reached: the phase in which float32 raised,
    "" if it came to the end. finite_loss: the default loss leaves out what is not finite, since the model's own outputs
    are not all finite. float32_errors: how far float32 lies from the reference, by kind and name. raised: the exception
    of float32, at the model's own cast to 16 bits that causes it, where a float64 run that promotes mixed operands
    reaches the end.
    """

    how: str
    wide: WideRun
    float32: Decisions
    reached: str
    finite_loss: bool
    raised: Raised | None
    float32_errors: Mapping[tuple[str, str], float]
    _again: Callable[..., WideRun]
    _kept: dict[Any, Any] = field(default_factory=dict)

    def moved(
        self, dtype: torch.dtype, rounded_inputs: Collection[str], forced: Decisions | None = None
    ) -> list[WideRun]:
        """The reference again with weights and the named inputs moved by one unit roundoff of `dtype`, signs at random,
        and with random numbers as they are drawn in it. forced: decisions to take as another run took them."""
        key = ("moved", dtype, frozenset(rounded_inputs), id(forced))
        if key not in self._kept:
            roundoff = format_of(dtype).unit_roundoff
            samples = SAMPLES if dtype.itemsize <= 2 else 1
            changes = [partial(_move, roundoff, frozenset(rounded_inputs), seed) for seed in range(1, samples + 1)]
            runs = [self._again(change=change, draws_in=dtype, forced=forced) for change in changes]
            self._kept[key] = [run for run in runs if run.outcome.error is None or run.outcome.phase == "backward"]
        return cast("list[WideRun]", self._kept[key])

    def following(self, forced: Decisions) -> WideRun:
        """The reference again, taking the decisions of another run."""
        key = ("following", id(forced))
        if key not in self._kept:
            self._kept[key] = self._again(forced=forced)
        return cast(WideRun, self._kept[key])

    def repeated(self) -> WideRun:
        """The reference once more, with nothing changed: whether the model computes the same again."""
        if "repeated" not in self._kept:
            self._kept["repeated"] = self._again()
        return cast(WideRun, self._kept["repeated"])

    def observed(
        self,
        observer: Observer,
        dtype: torch.dtype | None = None,
        rounded_inputs: Collection[str] = (),
        *,
        seed: int = 1,
        forced: Decisions | None = None,
    ) -> WideRun:
        """The reference once more, seen by one observer more; with a `dtype` its data are moved as in `moved`."""
        change: Change | None = None
        if dtype is not None:
            change = partial(_move, format_of(dtype).unit_roundoff, frozenset(rounded_inputs), seed)
        return self._again(change=change, draws_in=dtype, forced=forced, observers=(observer,))

    def forget(self) -> None:
        """Free the runs that were kept for one low-precision dtype."""
        self._kept.clear()


class PromoteMixed(TorchFunctionMode):
    """Promote operands of several floating dtypes to float64: a model's own narrow tensors meet its float64 weights."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = {t.dtype for _, t in tensors((args, kwargs)) if t.dtype in _PROMOTED or t.dtype is torch.float64}
        name = getattr(func, "__name__", "")
        if len(found) > 1:
            if name in _WRITES_IN_PLACE:
                target = args[0].dtype
                rest = map_tensors(lambda t: t.to(target) if t.is_floating_point() else t, args[1:])
                args = (args[0], *rest)
            elif not name.endswith("_") and "out" not in kwargs and name not in ("to", "type_as", "__set__"):
                args, kwargs = map_tensors(lambda t: t.double() if t.dtype in _PROMOTED else t, (args, kwargs))
        return func(*args, **kwargs)


class WholeNumbers:
    """An observer of `Trace` that keeps integers whole: a cast to 16 bits that loses some is not made.

    Positions that the model itself rounds (`torch.arange(n).to(x.dtype)`) would be wrong in the judge as well.
    """

    def before(self, op: object, args: object, kwargs: object) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> Any:
        """Give the integers in float64 where 16 bits lose some."""
        if event.op == "aten::_to_copy" and out.is_floating_point() and out.dtype.itemsize <= 2:
            source = args[0]
            if not source.is_floating_point() and not source.is_complex() and source.dtype is not torch.bool:
                whole = source.to(torch.float64)
                return None if torch.equal(out.double(), whole) else whole
        return None


def measure_reference(subject: Subject, *, device: str = "cpu") -> Reference:
    """Run the subject in float64, or as wide as it goes.

    Raises `UsageError` when the model raises in float32 too, or its own loss does: there is nothing to judge.
    """

    def run(
        dtype: torch.dtype,
        promote: bool,
        finite_loss: bool,
        *,
        change: Change | None = None,
        draws_in: torch.dtype | None = None,
        forced: Decisions | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> WideRun:
        prepared = prepare(subject, device=device, to=dtype)
        if change is not None:
            change(prepared)
        decisions, ops, draws = Decisions(forced), OpWatch(shadow=False), EqualRandom(draws_in)
        ours: tuple[Observer, ...] = (decisions, ops, WholeNumbers()) if promote else (decisions, ops)
        around: list[AbstractContextManager[Any]] = [draws, Trace(prepared.root, observers=(*ours, *observers))]
        if promote:
            around.append(PromoteMixed())
        outcome = run_arm(prepared, device=device, loss=subject.loss, around=around, finite_loss=finite_loss)
        nonfinite = tuple(fact for fact in ops.facts() if fact.produced or fact.nan or fact.written)
        inexact = sum(fact.inexact for fact in ops.facts())
        return WideRun(outcome, decisions, nonfinite, draws.drew or outcome.drew, ops.low, inexact)

    casts = LowCasts()
    narrow = run(torch.float32, False, False, observers=(casts,))
    if (error := narrow.outcome.error) is not None and (narrow.outcome.phase == "forward" or subject.loss is not None):
        cast = casts.of_failure(error)
        wide = run(torch.float64, True, False) if cast is not None else None
        if cast is not None and wide is not None and wide.outcome.error is None:
            raised = Raised(cast, brief(error))
            again = partial(run, torch.float64, True, False)
            promoted = "float64, mixed operands promoted"
            return Reference(promoted, wide, wide.decisions, "", False, raised, {}, again)
        file, line = users_place(error)
        place = f" at {file}:{line}" if file else ""
        raise UsageError(
            f"{subject.name} raises in float32 too, in {narrow.outcome.phase}{place} ({brief(error)}); "
            "a model is judged in low precision once it runs in float32"
        ) from error
    # A mask of -inf in an output would make every gradient of the default loss NaN.
    finite_loss = not all(bool(t.isfinite().all()) for t in narrow.outcome.outputs.values())
    if finite_loss:
        narrow = run(torch.float32, False, True)
    reached = narrow.outcome.phase if narrow.outcome.error is not None else ""
    for how, promote in (("float64", False), ("float64, mixed operands promoted", True)):
        again = partial(run, torch.float64, promote, finite_loss)
        wide = again()
        if _usable(wide.outcome, narrow.outcome) and not (wide.inexact and not promote):
            # A float32 run that casts to 16 bits itself says nothing about what float32 can keep.
            errors = {} if narrow.low else errors_of(narrow.outcome, wide.outcome)
            return Reference(how, wide, narrow.decisions, reached, finite_loss, None, errors, again)
    again = partial(run, torch.float32, False, finite_loss)
    return Reference("float32", narrow, narrow.decisions, reached, finite_loss, None, {}, again)


def _usable(wide: Outcome, float32: Outcome) -> bool:
    """The wide run must reach as far as float32 does, and be finite where float32 is."""
    if wide.error is not None and (float32.error is None or wide.phase == "forward"):
        return False
    for path, narrow in float32.outputs.items():
        twin = wide.outputs.get(path)
        if twin is not None and bool(narrow.isfinite().all()) and not bool(twin.isfinite().all()):
            return False
    return True


def _move(unit_roundoff: float, inputs: Collection[str], seed: int, prepared: Prepared) -> None:
    """Move weights and the named inputs by one unit roundoff. Whole numbers (masks, counts, positions) are exact."""
    generator = torch.Generator().manual_seed(seed)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype) * 2 - 1
        return tensor * (1 + unit_roundoff * signs)

    with torch.no_grad():
        for parameter in prepared.root.parameters() if prepared.root is not None else ():
            if parameter.is_floating_point() and not isinstance(parameter, UninitializedParameter):
                parameter.copy_(move(parameter))
    calls = []
    for number, call in enumerate(prepared.calls):
        chosen = {name: t for name, t in input_names(call, number).items() if name in inputs}
        changed = {id(t): move(t) for t in chosen.values() if not bool((t == t.round()).all())}
        calls.append(Call(*map_tensors(partial(_replaced, changed), (call.args, dict(call.kwargs)))))
    prepared.calls = tuple(calls)


def _replaced(changed: dict[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return changed.get(id(tensor), tensor)


def input_names(call: Call, number: int) -> dict[str, torch.Tensor]:
    """The floating inputs of a call by a name that is the same in every copy of it."""
    named = tensors({"args": call.args, "kwargs": dict(call.kwargs)})
    return {f"{number}.{path}": tensor for path, tensor in named if tensor.is_floating_point()}
