"""One execution of one side of a comparison: its results with their companions, and what is at fault in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from ampcheck.core.arm import Arm
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.numerics.measure import counted_results, judged_by, positive, unruled
from ampcheck.parity.calls import LiveCall, NoBackwardError, Side, restored
from ampcheck.parity.trail import Trail, is_opaque
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.results import Key, ResultError
from ampcheck.shadow.call import Call
from ampcheck.shadow.compare import Result, compare_results, compare_shadowed, result_of, with_totals
from ampcheck.shadow.freedom import Freedom
from ampcheck.shadow.independent import ObservedShadow
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.seeds import seeded

RESULTS = ("module", "output", "written", "buffer", "gradient")
"""Kinds of results, in the order in which they are compared: of modules that are named, what a call returns, arguments
and buffers that it writes, gradients of arguments and parameters."""


class OpaqueJudge(Protocol):
    """Gives companions to what ops return that cannot be followed."""

    def begin(self) -> None:
        """A run begins, perhaps once more."""

    def __call__(self, call: Call, shadow: ObservedShadow) -> None:
        """An op has run that cannot be followed."""


@dataclass(slots=True)
class Execution:
    """What one execution gave.

    results: by key. errors: how far each of them lies from its exact value. stats: what the checks of a run in low
    precision look at. opaque: ops that were not followed inside. trail: where it was asked for, with the record of each
    result in `records`. plain: numbers, texts and None that the call returned, by path. names: parameters and buffers
    that it has. arguments: as they were given. compiled: errors of the results of compiled code, which the shadow runs
    in eager mode. notes: what else is to be known of the comparison. no_backward: its backward pass raises.
    """

    side: Side
    results: dict[Key, Result] = field(default_factory=dict)
    errors: tuple[ResultError, ...] = ()
    stats: NumericsStats | None = None
    freedom: Freedom | None = None
    opaque: Counter[str] = field(default_factory=Counter)
    trail: Trail | None = None
    records: dict[Key, int] = field(default_factory=dict)
    plain: Mapping[str, object] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    arguments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    compiled: tuple[ResultError, ...] = ()
    notes: list[str] = field(default_factory=list)
    no_backward: bool = False

    def is_behind_opaque(self, key: Key) -> bool:
        """Whether an op that cannot be followed inside may have made a result; True where no trail tells."""
        if self.trail is None or key not in self.records:
            return bool(self.opaque)
        return self.trail.is_behind_opaque(self.records[key])


def execute(
    side: Side,
    *,
    trail: Trail | None = None,
    independent: bool = False,
    replace_opaque: OpaqueJudge | None = None,
) -> Execution:
    """Run a side once under a shadow, on copies of its arguments, with equal seeds; its state is as before.

    trail: records the values. independent: exact takes the decisions, and no run is judged. replace_opaque: gives
    companions to what an op that cannot be followed returned. A backward pass that raises is left out with a note.
    Raises `UsageError` for a side that raises.
    """
    run = Execution(side, trail=trail)
    if replace_opaque is not None:
        replace_opaque.begin()
    observer = partial(_observe, run, replace_opaque)
    try:
        with seeded(), restored(side.function):
            compiled = _execute(run, observer, independent, judged=not independent or replace_opaque is not None)
        if compiled and not independent:
            run.compiled = _compiled(run)
    except NoBackwardError as error:
        again = None if trail is None else Trail(shapes=trail.shapes, bits=trail.bits)
        forward = execute(
            replace(side, backward=False), trail=again, independent=independent, replace_opaque=replace_opaque
        )
        forward.notes.append(f"gradients are not compared: {side.name} raised {error}")
        forward.no_backward = True
        return forward
    return run


def _observe(run: Execution, replace_opaque: OpaqueJudge | None, shadow: ObservedShadow, call: Call) -> None:
    if is_opaque(call):
        run.opaque[call.traits.title] += 1
        if replace_opaque is not None:
            replace_opaque(call, shadow)
    if run.trail is not None:
        run.trail(call)


def _execute(
    run: Execution, observer: Callable[[ObservedShadow, Call], None], independent: bool, *, judged: bool
) -> int:
    """Run a side; how often it called compiled functions.

    judged: how often values were rounded, by which kernels are judged, is known of such a run alone.
    """
    side = run.side
    module = side.function if isinstance(side.function, torch.nn.Module) else None
    shadow = ObservedShadow(module, independent=independent, judge=judged, freedom=True)
    shadow.observer = partial(observer, shadow)
    if run.trail is not None:
        run.trail.shadow = shadow
    with shadow, nullcontext() if side.backward else torch.no_grad():
        live = LiveCall(side)
        results = live.results()
        run.plain, run.names, run.arguments = live.plain, live.names, live.arguments
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
    if judged:
        run.stats = _stats(run, shadow)
    return shadow.compiled


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
    """The results of a run without a shadow, by key. plain: numbers, texts and None. notes: what else is to be
    known."""

    values: Mapping[Key, torch.Tensor]
    plain: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def run_plainly(side: Side) -> Results:
    """Run a side as it is, on copies of its arguments. Raises `UsageError` where it raises."""
    notes: tuple[str, ...] = ()
    with seeded(), restored(side.function):
        try:
            results, plain = _run_once(side)
        except NoBackwardError as error:
            notes = (f"gradients are not compared: {side.name} raised {error}",)
            results, plain = _run_once(replace(side, backward=False))
    return Results(results, plain, notes)


def _run_once(side: Side) -> tuple[dict[Key, torch.Tensor], Mapping[str, object]]:
    with nullcontext() if side.backward else torch.no_grad():
        live = LiveCall(side)
        kept = {key: tensor.detach().clone() for key, tensor in live.results().items()}  # before buffers are restored
        return kept, live.plain
