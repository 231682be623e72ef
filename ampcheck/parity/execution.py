"""One execution of one side of a comparison: its results with their companions, and what is at fault in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from ampcheck.core.arm import Arm
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage
from ampcheck.facts.memory import has_companions, roundoff
from ampcheck.facts.sides import Change
from ampcheck.numerics import record
from ampcheck.numerics.measure import counted_results, judged_by, positive, unruled
from ampcheck.numerics.run import OWN_BACKWARD, RunPlan, run_subject
from ampcheck.parity.calls import LiveCall, NoBackwardError, Side, module_results, modules_of, raise_from
from ampcheck.parity.trail import Trail, is_opaque
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.results import Key, ResultError
from ampcheck.shadow.call import Call
from ampcheck.shadow.compare import compare_results, compare_shadowed, with_totals
from ampcheck.shadow.independent import ObservedShadow
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.reachable import reach
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.snapshot import preserved

RESULTS = ("module", "output", "written", "buffer", "gradient")
"""Kinds of results, in the order in which they are compared: of modules that are named, what a call returns, arguments
and buffers that it writes, gradients of arguments and parameters."""


class Reviser(Protocol):
    """Gives other companions to what some ops return."""

    def begin(self) -> None:
        """A run begins, perhaps once more."""

    def __call__(self, call: Call, shadow: ObservedShadow) -> None:
        """An op has run."""


@dataclass(slots=True)
class Execution(record.Execution):
    """Results of one execution of a side.

    errors: how far each result lies from its exact value. stats: what the checks of a run in low precision look at.
    opaque: ops that were not followed inside. trail: where it was asked for, with the record of each result in
    `records`. names: parameters and buffers that it has. arguments: as they were given. compiled_calls: calls of
    compiled code, which the shadow runs in eager mode; compiled: errors of the results of that code. notes: what else
    is to be known of the comparison. backward_raised: it was left out then.
    """

    side: Side = field(kw_only=True)
    errors: tuple[ResultError, ...] = ()
    stats: NumericsStats | None = None
    opaque: Counter[str] = field(default_factory=Counter)
    trail: Trail | None = None
    records: dict[Key, int] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    arguments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    compiled_calls: int = 0
    compiled: tuple[ResultError, ...] = ()
    notes: list[str] = field(default_factory=list)
    backward_raised: bool = False

    def is_behind_opaque(self, key: Key) -> bool:
        """True if an op that cannot be followed inside contributes to a result, or if the run has no trail."""
        if self.trail is None or key not in self.records:
            return bool(self.opaque)
        return self.trail.is_behind_opaque(self.records[key])


def execute(
    side: Side,
    *,
    trail: Trail | None = None,
    independent: bool = False,
    revise: Reviser | None = None,
    change: Change | None = None,
) -> Execution:
    """Run a side once under a shadow, on copies of its arguments, with equal seeds; its state is as before.

    trail: how values are recorded, in one of the run's own. independent: exact takes the decisions, and no run is
    judged. revise: gives other companions to what some ops returned. change: gives data other exact values. A backward
    pass that raises is left out with a note. Raises `UsageError` for a side that raises.
    """

    def once(side: Side) -> Execution:
        run = Execution(side=side, trail=trail and Trail(shapes=trail.shapes, bits=trail.bits))
        _follow(run, independent, revise, change)
        return run

    run = _restored(side, once)
    if run.compiled_calls and not independent:
        run.compiled = compare_results(run.results, run_plainly(run.side).values, run.freedom)
    return run


def run_plainly(side: Side) -> Execution:
    """Run a side without a shadow, on copies of its arguments. Raises `UsageError` if the side raises."""

    def once(side: Side) -> Execution:
        run = Execution(side=side)
        _run(run)
        return run

    return _restored(side, once)


def _restored(side: Side, once: Callable[[Side], Execution]) -> Execution:
    """Run a side with equal seeds, and restore its state; without gradients where its backward pass raises.

    Modules are restored wherever the side finds them, and other objects unless they are global variables.
    """
    reached = reach({"": side.function, "modules": modules_of(side.function)}, near=True)
    try:
        with seeded(), preserved_state(), preserved(reached, process=False):
            return once(side)
    except NoBackwardError as error:
        run = _restored(side.without_gradients(), once)
        run.notes.append(f"gradients are not compared: {side.name} raised {error}")
        run.backward_raised = True
        return run


def _run(run: Execution) -> dict[Key, torch.Tensor]:
    """Run the side of a record, and keep its results, which are returned as they live. Raises as `raise_from` does."""
    side, call, live = run.side, LiveCall(run.side), dict[Key, torch.Tensor]()

    def keep(key: Key, tensor: torch.Tensor) -> None:
        if key[1].endswith(OWN_BACKWARD):
            return
        live[key] = tensor
        with without_modes(), torch.no_grad():
            run.results[key] = run.copied(tensor.detach())
            if run.trail is not None and has_companions(tensor) and tensor.numel():
                run.records[key] = run.trail.number(tensor.detach())

    device = next((tensor.device.type for tensor in call.arguments.values()), "cpu")
    ambient = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    grad = side.grad and torch.is_grad_enabled()
    plan = RunPlan(device, side.dtype or ambient, grad=grad, signs=True, seeds=False)
    with module_results(side, call.prepared.root, keep):
        run_subject(call.prepared, plan, keep, run=run, leaves=call.leaves)
    if run.error is not None:
        raise_from(side, run.error, run.phase)
    for key, tensor in call.written().items():
        keep(key, tensor)
    run.results = {key: run.results[key] for key in sorted(run.results, key=lambda key: RESULTS.index(key[0]))}
    run.names, run.arguments = call.names, call.arguments
    return live


def _observe(run: Execution, revise: Reviser | None, shadow: ObservedShadow, call: Call) -> None:
    if is_opaque(call):
        run.opaque[call.traits.title] += 1
    if revise is not None:
        revise(call, shadow)
    if run.trail is not None:
        run.trail(call)


def _follow(run: Execution, independent: bool, revise: Reviser | None, change: Change | None) -> None:
    """Run a side under a shadow.

    How often values were rounded, by which kernels are judged, is known of a run that is judged alone.
    """
    side, judged = run.side, not independent or revise is not None
    module = side.function if isinstance(side.function, torch.nn.Module) else None
    shadow = ObservedShadow(module, independent=independent, judge=judged, freedom=True, change=change)
    shadow.observer = partial(_observe, run, revise, shadow)
    if run.trail is not None:
        run.trail.shadow = shadow
    if revise is not None:
        revise.begin()
    with shadow:
        run.shadow = shadow
        named = {key: t for key, t in _run(run).items() if has_companions(t)}
        of_backward = {str_of(key): t for key, t in named.items() if key[0] == "gradient"}
        shadow.reach({f"the {str_of(key)}": t for key, t in named.items() if key[0] != "gradient"}, of_backward)
    run.freedom, run.compiled_calls, run.shadow = shadow.freedom, shadow.compiled, None
    known = {
        key: result for key, result in run.results.items() if result.reference is not None and result.value.numel()
    }
    run.errors = tuple(with_totals(compare_shadowed(k, r.value, r.reference) for k, r in known.items() if r.reference))
    if judged:
        run.stats = _stats(run, shadow)


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
