"""The ladder from eager mode to Inductor: the same subject at each stage of the compiler, held against float64.

eager                               no compiler
aot_eager                           Dynamo and AOTAutograd trace and differentiate; eager kernels run the graphs
inductor + emulate_precision_casts  Inductor rounds to 16 bits wherever eager mode does
inductor                            as torch.compile runs by default

A `Bench` holds what every rung is judged by: float64 and eager mode, on the data as they are and on data nudged by a
rounding. `run_rung` runs one rung on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from ampcheck.compiled.accuracy.arms import Plan, Trajectory, nudge, nudged, run_plan
from ampcheck.compiled.accuracy.compare import Draw, deviations
from ampcheck.compiled.accuracy.stats import AOT_EAGER, EAGER, EMULATE, EMULATED, EQUAL_STREAMS, INDUCTOR, Deviation
from ampcheck.core.errors import brief, message_of
from ampcheck.core.formats import format_of
from ampcheck.core.subject import Subject
from ampcheck.numerics.compiled import eagerly, measure_graphs
from ampcheck.numerics.decisions import Decisions
from ampcheck.numerics.equal_random import EqualRandom
from ampcheck.numerics.ops import OpWatch
from ampcheck.numerics.reference import PromoteMixed, WholeNumbers
from ampcheck.numerics.rounding import REROUNDINGS, Rerounded
from ampcheck.torchtools.copying import Prepared, is_compiled_already, modules_of, prepare, recompiled
from ampcheck.torchtools.dynamo import configured
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.trace import Observer, Trace

DRAWS = 3
"""On how many data eager mode is measured: as they are, and nudged twice. Compiled code must be beyond its limit on all
of them, which chance does to a single number in one of a thousand cases, were it as good as eager mode."""


@dataclass(slots=True)
class Bench:
    """What the compiled arms of one subject are judged by.

    draws: eager mode and float64 on the same data, as they are and nudged; empty where nothing can be compared, and
    `incomparable` says why. hairs: float64 with its data rounded to float32, in other directions too where that is not
    finite. turned: float64 with those decisions taken otherwise that a rounding of the data turns, `near_ties` at most.
    rounded: eager mode with other roundings, see `measure_rounding`. Of these only runs that came to their end.
    how: what the reference is. options: of `torch.compile`. settings: of the compiler, in every compiled arm. random:
    whether the model draws.
    """

    subject: Subject
    plan: Plan
    dtype: torch.dtype
    options: Mapping[str, Any]
    eager: Trajectory
    how: str = ""
    incomparable: str = ""
    draws: tuple[Draw, ...] = ()
    hairs: tuple[Trajectory, ...] = ()
    turned: tuple[Trajectory, ...] = ()
    rounded: tuple[Trajectory, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    random: bool = False
    chain: int = 1
    reduction: int = 1
    near_ties: int = 0
    _nudged: tuple[Subject, ...] = ()
    _reroundings: int = 0
    _again: Callable[[Decisions], Trajectory] | None = None
    _plain: tuple[Decisions, Decisions] | None = None

    @property
    def masked(self) -> bool:
        """Whether weights are compared where their gradient is known alone."""
        return self.plan.optimizer is not None

    def data(self, draw: int) -> Subject:
        """The subject with the data of one draw."""
        return self._nudged[draw - 1] if draw else self.subject


@dataclass(frozen=True, slots=True)
class Climb:
    """One rung: the tensors against float64, the exception that ended it, and how many graphs were compiled."""

    rung: str
    deviations: tuple[Deviation, ...] = ()
    raised: str = ""
    graphs: int = 0
    unsupported: str = ""
    unseen: Mapping[str, int] = field(default_factory=dict)
    arm: Trajectory = field(default_factory=Trajectory, repr=False, compare=False)
    arms: tuple[Trajectory, ...] = field(default=(), repr=False, compare=False)


def measure_bench(subject: Subject, plan: Plan, dtype: torch.dtype, options: Mapping[str, Any] | None = None) -> Bench:
    """Run eager mode and float64.

    dtype: the narrowest format that the arm computes in. Where eager mode raises only it is kept, and where no wide run
    comes to its end, or random numbers cannot be made equal, `incomparable` says so.
    """
    decisions, ops, plain = Decisions(), OpWatch(shadow=False), EqualRandom()
    prepared = prepare(subject, device=plan.device)
    eager = run_plan(plan, prepared, around=[eagerly(), plain, Trace(prepared.root, observers=(decisions, ops))])
    bench = Bench(subject, plan, dtype, dict(options or {}), eager)
    bench.chain, bench.reduction = max(1, ops.longest_chain), ops.longest_reduction
    bench.random = plain.drew or eager.drew
    if bench.random:
        bench.settings[EQUAL_STREAMS] = True
        untouched = run_plan(plan, prepare(subject, device=plan.device), around=[eagerly()])
        if not _same(eager, untouched):
            bench.incomparable = f"random numbers in {format_of(dtype).name} are others than in float64"
    if eager.error is not None:
        return bench
    for bench.how, width, mode in _widths(dtype):
        turned = Decisions()
        wide = _wide(subject, plan, width, mode, turned)
        if wide.error is None and _as_finite(wide, eager):
            break
    else:
        bench.how, bench.incomparable = "", bench.incomparable or f"it does not run in float64: {_why(wide)}"
        return bench
    forced = [decisions] if turned.flips(decisions) else []
    draws = [Draw(eager, wide)]
    # Two unit roundoffs are one step of the format, which a weight that is kept in it cannot ignore.
    for seed in range(1, DRAWS):
        near = nudged(subject, 2 * format_of(dtype).unit_roundoff, seed)
        mine = Decisions()
        again = run_plan(plan, prepare(near, device=plan.device), around=[eagerly()])
        draw = Draw(again, _wide(near, plan, width, mode, mine))
        if draw.eager.error is None and draw.wide.error is None:
            draws.append(draw)
            bench._nudged = (*bench._nudged, near)
            forced += [mine] if turned.flips(mine) else []
    bench.draws, bench.near_ties = tuple(draws), max((len(turned.flips(other)) for other in forced), default=0)
    runs = [_wide(subject, plan, width, mode, Decisions(other)) for other in forced]
    bench.turned = tuple(run for run in runs if run.error is None)
    bench.hairs = tuple(_hairs(partial(_wide, subject, plan, width, mode), wide))
    bench._again, bench._plain = partial(_wide, subject, plan, width, mode), (decisions, turned)
    return bench


def measure_rounding(bench: Bench) -> bool:
    """Run eager mode with other roundings, a few times more on each call; False once there have been enough.

    Runs that take eager mode's decisions measure its usual errors (`Bench.rounded`); where another
    rounding turns a decision, that is a near tie (`Bench.turned`).
    """
    if bench._again is None or bench._plain is None or bench._reroundings >= max(REROUNDINGS):
        return False
    plain, wide = bench._plain
    enough = next(count for count in REROUNDINGS if count > bench._reroundings)
    while bench._reroundings < enough:
        bench._reroundings += 1
        mine, prepared = Decisions(), prepare(bench.subject, device=bench.plan.device)
        trace = Trace(prepared.root, observers=(Rerounded(bench._reroundings), mine))
        found = run_plan(bench.plan, prepared, around=[eagerly(), EqualRandom(), trace])
        if found.error is not None:
            continue
        if not plain.flips(mine):
            bench.rounded = (*bench.rounded, found)
        elif flips := wide.flips(mine):
            bench.near_ties = max(bench.near_ties, len(flips))
            turned = bench._again(Decisions(mine))
            bench.turned = (*bench.turned, turned) if turned.error is None else bench.turned
    return True


def _hairs(run: Callable[..., Trajectory], wide: Trajectory) -> Iterator[Trajectory]:
    """Float64 with its data rounded to float32: with random signs; where that leaves the domain, as of a root at zero,
    with all data moved up and all moved down."""
    roundoff = format_of("float32").unit_roundoff
    for amount, seed in ((roundoff, 1), (roundoff, None), (-roundoff, None)):
        found = run(Decisions(), change=partial(nudge, amount=amount, seed=seed))
        if found.error is None:
            yield found
            if _as_finite(found, wide):
                return


def run_rung(
    bench: Bench, rung: str = INDUCTOR, *, settings: Mapping[str, Any] | None = None, draws: Sequence[int] = (0,)
) -> Climb:
    """Run the subject at one rung of the ladder, under more settings of the compiler if any are given.

    draws: on which data, by number; the first must be 0. Dynamo is reset before and after.
    """
    changed = {**bench.settings, **(settings or {}), **({EMULATE: True} if rung == EMULATED else {})}
    options = dict(bench.options)
    if rung == AOT_EAGER:
        options = {k: v for k, v in options.items() if k not in ("mode", "options")} | {"backend": "aot_eager"}
    own = is_compiled_already(bench.subject) and rung != AOT_EAGER
    compiled = None if rung == EAGER else partial(_compiled, bench.subject if own else None, options)
    arms: list[Trajectory] = []
    climb = Climb(rung)
    for number in draws:
        prepared = prepare(bench.data(number), device=bench.plan.device)
        with ExitStack() as stack, measure_graphs() as graphs:
            stack.enter_context(configured(changed))
            around = [eagerly()] if rung == EAGER else []
            arms.append(run_plan(bench.plan, prepared, compiled=compiled, around=around))
        if not number:
            error = arms[0].error
            climb = replace(climb, raised=_describe(error), arm=arms[0])
            climb = replace(climb, graphs=graphs.count, unsupported=graphs.unsupported, unseen=graphs.unseen)
            if error is not None or not bench.draws or bench.incomparable:
                return climb
    return replace(climb, arms=tuple(arms), deviations=compared(bench, arms))


def compared(bench: Bench, arms: Sequence[Trajectory]) -> tuple[Deviation, ...]:
    """Every tensor of compiled arms, one for each draw of the data from the first on, judged by all that is known."""
    return deviations(bench.draws, arms, bench.hairs, bench.turned, bench.rounded, masked=bench.masked)


def _compiled(original: Subject | None, options: Mapping[str, Any], prepared: Prepared) -> Sequence[Any]:
    """The blocks compiled; `original`: of a subject that the user has compiled, as it is there."""
    if original is not None:
        return recompiled(original, prepared)
    return [torch.compile(block, **options) for block in prepared.blocks]


class _NarrowKernels(PromoteMixed):
    """Run what has no float64 kernel in float32, besides promoting mixed operands."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "double" not in message_of(error).lower():
                raise
            args, kwargs = map_tensors(_to(torch.float64, torch.float32), (args, kwargs or {}))
            return map_tensors(_to(torch.float32, torch.float64), func(*args, **kwargs))


def _to(given: torch.dtype, wanted: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(wanted) if tensor.dtype is given else tensor


_Mode: TypeAlias = "type[PromoteMixed] | None"


def _widths(dtype: torch.dtype) -> list[tuple[str, torch.dtype, _Mode]]:
    """What may judge, the widest first; float32 judges 16 bits."""
    found: list[tuple[str, torch.dtype, _Mode]] = [
        ("float64", torch.float64, None),
        ("float64, mixed operands promoted", torch.float64, PromoteMixed),
        ("float64, but for kernels that exist in float32 alone", torch.float64, _NarrowKernels),
    ]
    return [*found, ("float32", torch.float32, None)] if dtype.itemsize <= 2 else found


def _wide(
    subject: Subject,
    plan: Plan,
    width: torch.dtype,
    mode: _Mode,
    decisions: Decisions,
    *,
    change: Callable[[Prepared], None] | None = None,
) -> Trajectory:
    prepared = prepare(subject, device=plan.device, to=width)
    if change is not None:
        change(prepared)
    observers: tuple[Observer, ...] = (decisions, WholeNumbers()) if mode is not None else (decisions,)
    around: list[AbstractContextManager[Any]] = [eagerly(), EqualRandom(), Trace(prepared.root, observers=observers)]
    if mode is not None:
        around.append(mode())
    return run_plan(replace(plan, autocast=None, scale=1.0), prepared, around=around)


def _as_finite(wide: Trajectory, eager: Trajectory) -> bool:
    """Whether the wide run is finite wherever eager mode is."""
    for key, tensor in eager.values.items():
        twin = wide.values.get(key)
        if twin is not None and bool(tensor.isfinite().all()) and not bool(twin.isfinite().all()):
            return False
    return True


def _same(one: Trajectory, other: Trajectory) -> bool:
    if one.values.keys() != other.values.keys():
        return False
    return all(torch.equal(t.nan_to_num(), other.values[key].nan_to_num()) for key, t in one.values.items())


def _describe(error: BaseException | None) -> str:
    """An exception in one line; of a compiler's that wraps another, both."""
    if error is None:
        return ""
    inner = getattr(error, "inner_exception", None)
    return brief(error) + (f" {brief(inner)}" if isinstance(inner, Exception) else "")


def _why(wide: Trajectory) -> str:
    return brief(wide.error) if wide.error is not None else "its values are not finite there"


def holds_parameters(subject: Subject) -> bool:
    """Whether anything in the subject is trained."""
    return any(p.requires_grad for module in modules_of(subject.model) for p in module.parameters())


def floating_inputs(subject: Subject) -> bool:
    """Whether any input is floating."""
    return any(t.is_floating_point() for c in subject.calls for _, t in tensors((c.args, dict(c.kwargs))))
