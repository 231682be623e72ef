"""The mechanisms that decide verdicts, by name, and how a test switches one off: for `benchmarks/ablation.py`.

Nothing in `ampcheck` knows of this: `without` puts a stand-in wherever a module of the package, one of its tables, or a
class names the function. A mechanism acts where its function returns something else than its stand-in would.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any

import ampcheck
from ampcheck.core.run import Finding, Verdict

_REPORTED = (Verdict.FAIL, Verdict.WARN)


class Gives:
    """A stand-in that returns a fixed value; a list is made anew each time."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return list(self.value) if isinstance(self.value, list) else self.value


NOTHING, NO, NONE, ZERO, EMPTY = Gives(None), Gives(False), Gives([]), Gives(0), Gives("")


def argument(position: int) -> Callable[..., Any]:
    """A stand-in that returns one of its arguments; the first of a method is its object."""
    return lambda *args, **kwargs: args[position]


@dataclass(frozen=True)
class Mechanism:
    """purpose: a clause. places: `module:attribute` or `module:Class.method` below `ampcheck`, with what stands in.

    acts: of arguments, keyword arguments and result, for functions that act by changing something.
    """

    purpose: str
    places: Mapping[str, Any]
    acts: Callable[[Any, Any, Any], bool] | None = None

    @property
    def unseen(self) -> bool:
        """Whether nothing shows when it acts, as of a number or a function that returns nothing."""
        return not any(callable(off) for off in self.places.values()) or (
            self.acts is None and all(map(_returns_nothing, self.places))
        )


_SHADOW: dict[str, Mechanism] = {
    "own-errors": Mechanism("code that measures its own error", {"shadow.comparisons:own_error": EMPTY}),
    "restarts": Mechanism("slopes of own errors, which are zero in float64", {"shadow.comparisons:restarts": NO}),
    "nan-choices": Mechanism("ops that choose a NaN", {"shadow.decisions:chooses_nan": NO}),
    "taken-up": Mechanism("what compensated sums take up", {"shadow.increments:take_up": NO}),
    "missing-terms": Mechanism(
        "terms of sums that are zero throughout", {"shadow.found:Found.accuse_missing": NOTHING}
    ),
    "spread": Mechanism("honest errors that one sample does not show", {"shadow.spread:widened": NO}),
    "recurrence": Mechanism(
        "errors that must recur in long runs", {"shadow.recurrence:Recurrence.recurs": Gives(True)}
    ),
    "heals": Mechanism("overflows that the code's own loss scale mends", {"shadow.found:Found._heals": NO}),
    "ill": Mechanism("results that cancel and float32 keeps", {"shadow.cause:float32_keeps": NO}),
    "emptied-rows": Mechanism("rows that a safe softmax empties", {"shadow.suspects:emptied_rows": ZERO}),
    "vanished": Mechanism("zeros that exact does not have", {"shadow.suspects:vanished": NOTHING}),
    "origins": Mechanism("the blame of an op for where it began", {"shadow.suspects:Suspects.origin_of": argument(1)}),
    "collisions": Mechanism("whole numbers that became equal", {"shadow.integers:collisions_in": NOTHING}),
    "hidden-rankings": Mechanism("roundings that hide a ranking", {"shadow.ranking:hides_ranking": NO}),
    "decisions": Mechanism("decisions that exact makes otherwise", {"shadow.decisions:examine_decision": NOTHING}),
    "intervals": Mechanism("intervals that `bucketize` misses", {"shadow.decisions:_placed": NOTHING}),
    "format-constants": Mechanism(
        "constants taken from the format of the run",
        {"shadow.format_constants:wide_constant": argument(0)},
    ),
    "pooled-spread": Mechanism("the spread that all rows share", {"shadow.bounds:_pooled": Gives(0.0)}),
    "moved": Mechanism("the moved companion: the conditioning of the data", {"facts.moves:Moves.shake": argument(1)}),
    "chance": Mechanism("few numbers that cancel by chance", {"records.results:is_chance": NO}),
    "accumulators": Mechanism(
        "the bound of values that build on themselves", {"shadow.accumulators:_ACCUMULATES": 10**9}
    ),
    "bounds": Mechanism(
        "bounds of clamps that decide or cut off",
        {"shadow.guards:bound_that_decides": NOTHING, "shadow.guards:end_that_cuts": NOTHING},
    ),
    "flushed-8-bits": Mechanism("subnormals of 8 bits", {"shadow.bounds:_is_flushed": NO}),
    "nonfinite-exact": Mechanism("ops that make exact infinite or NaN", {"shadow.cause:makes_nonfinite": NO}),
    "lost-updates": Mechanism("what vanished from an update", {"shadow.updates:UpdateJudge._vanish": NOTHING}),
    "discarded": Mechanism("faults of results that nothing read", {"shadow.found:Found.discard": NOTHING}),
    "repeated": Mechanism(
        "results that are computed again in a wider format", {"shadow.reached:Reached.repeat": NOTHING}
    ),
    "tested": Mechanism("values that the run tests to be finite", {"shadow.reached:Reached.test": NOTHING}),
    "undetermined-gradients": Mechanism(
        "gradients that are zero by mathematics, in optimizers", {"shadow.norms:follow_noise": NOTHING}
    ),
    "freedom": Mechanism("decisions that other roundings may turn", {"shadow.freedom:with_call": argument(0)}),
}

_TRAINING: dict[str, Mechanism] = {
    "gradient-underflow": Mechanism("gradients that vanish", {"checks.training.gradient_underflow:check": NONE}),
    "scale-invariance": Mechanism("steps that depend on the scale", {"checks.training.scale_invariance:check": NONE}),
    "finite": Mechanism(
        "losses and weights that are not finite",
        {"checks.range.overflow:_of_losses": NONE, "checks.range.nonfinite_gradient:_of_weights": NONE},
    ),
    "loss-beside-exact": Mechanism("losses beside float64", {"checks.dtype.loss_dtype:nonfinite": NONE}),
    "loss-scale-window": Mechanism(
        "scales outside of the window", {"checks.training.loss_scale:_against_window": NONE}
    ),
    "collapse": Mechanism("scales that collapse", {"checks.training.loss_scale:_collapse": NONE}),
    "call-order": Mechanism(
        "the order of scaler calls", {"checks.training.scaler_protocol:_Order.breaches": Gives(())}
    ),
    "never-cleared": Mechanism("gradients that are never cleared", {"checks.training._order:never_cleared": Gives(())}),
    "stepped-first": Mechanism("schedulers that step first", {"checks.training._order:stepped_first": NOTHING}),
    "without-gradients": Mechanism("steps without gradients", {"records.protocol:without_gradients": NOTHING}),
    "refused-calls": Mechanism(
        "calls that GradScaler refuses", {"checks.training.scaler_protocol:_refused": Gives(())}
    ),
    "missing-scaler": Mechanism("float16 without a scaler", {"checks.training.scaler_protocol:_missing_scaler": NONE}),
    "scheduler-skip": Mechanism("schedulers of skipped steps", {"checks.training.scheduler_skip:check": NONE}),
    "checkpoints": Mechanism("checkpoints and when they are loaded", {"checks.training.resume:_of_calls": NONE}),
    "resume": Mechanism("runs that do not resume", {"checks.training.resume:_of_run": NONE}),
    "stagnation": Mechanism("updates that are lost", {"checks.training.stagnation:_of_role": Gives(())}),
    "forecast": Mechanism("where averages and sums stop", {"training.stagnation.forecast:stops": Gives({})}),
    "random-rounding": Mechanism("stochastic rounding", {"training.stagnation.updates:rounds_at_random": NO}),
    "running-sums": Mechanism("running sums in 16 bits", {"checks.training.reduce_precision:_sums": Gives(())}),
    "norms": Mechanism("norms in 16 bits", {"checks.training.reduce_precision:_norms": Gives(())}),
    "master-weights": Mechanism("weights without masters", {"checks.dtype.master_weights:check": NONE}),
    "optimizer-state": Mechanism("dtypes of optimizer state", {"checks.dtype.optimizer_state:check": NONE}),
    "vanished-moments": Mechanism(
        "second moments that vanish",
        {
            "training.state_dtypes.moments:MomentWatch._measured": NOTHING,
            "training.state_dtypes.moments:MomentWatch._foreseen": NOTHING,
        },
    ),
    "buffers": Mechanism("dtypes of buffers", {"checks.dtype.buffer_dtype:check": NONE}),
    "tf32": Mechanism("precision flags", {"checks.training.tf32:_of_machine": NONE}),
    "cut-operands": Mechanism("float32 operands whose bits are cut", {"checks.training.tf32:_of_operands": NONE}),
    "rank-sums": Mechanism("sums over ranks in 16 bits", {"checks.training.reduce_precision:_collectives": NONE}),
    "rank-states": Mechanism("ranks that differ", {"checks.autocast.autocast_state:_of_ranks": Gives(())}),
    "sharding-policies": Mechanism(
        "mixed-precision policies of FSDP", {"training.distributed.policies:FollowedPolicies.findings": Gives(())}
    ),
    "monitored-underflow": Mechanism("underflow of a monitor", {"training.monitor.judge:gradient_stats": NOTHING}),
    "monitored-scale": Mechanism("the scale of a monitor", {"training.monitor.judge:loss_scale_stats": NOTHING}),
    "monitored-updates": Mechanism("updates of a monitor", {"training.monitor.judge:stagnation_stats": NOTHING}),
}

_COMPILED: dict[str, Mechanism] = {
    "compiled-exceptions": Mechanism(
        "compiled code that raises", {"checks.compile.compiled_exception:_of_results": NONE}
    ),
    "compiled-dtypes": Mechanism("other dtypes of results", {"checks.compile.compiled_dtype:check": NONE}),
    "compiled-results": Mechanism("results that are worse than eager's", {"checks.compile:_worse": NONE}),
    "hidden-overflow": Mechanism(
        "infinities of eager mode alone", {"checks.compile.compiled_error:_hidden_overflow": NONE}
    ),
    "compiled-noise": Mechanism(
        "results that eager mode does not repeat", {"compiled.accuracy.comparison:_leave_out_noise": Gives({})}
    ),
    "stale-graphs": Mechanism("graphs that are out of date", {"compiled.own_code:_FirstCalls.stale": Gives(())}),
    "foreign-graphs": Mechanism(
        "compiled modules that run another", {"compiled.own_code:_FirstCalls.foreign": Gives(())}
    ),
    "compiled-overflow": Mechanism("overflows inside compiled graphs", {"checks.range.overflow:_compiled": NONE}),
    "compiled-gradients": Mechanism(
        "gradients of compiled graphs", {"checks.range.nonfinite_gradient:_compiled": NONE}
    ),
    "compiled-precision": Mechanism("digits lost in compiled graphs", {"checks.range.precision_loss:_compiled": NONE}),
    "graph-breaks": Mechanism("graph breaks", {"checks.compile.graph_break:check": NONE}),
    "recompiles": Mechanism("recompilations", {"checks.compile.recompile:check": NONE}),
    "fallbacks": Mechanism("frames that run eagerly", {"checks.compile.eager_fallback:check": NONE}),
    "artifacts": Mechanism("compile caches", {"checks.compile.cache_artifacts:check": NONE}),
    "cudagraphs": Mechanism("CUDA graphs", {"checks.compile.cudagraph:check": NONE}),
    "compiled-state": Mechanism("state that compiled code leaves", {"checks.autocast.autocast_state:_of_graphs": NONE}),
    "compile-errors": Mechanism("errors of the compiler", {"checks.compile.compiled_exception:_of_graphs": NONE}),
    "compiled-finite": Mechanism(
        "results of own code that are not finite", {"checks.compile.compiled_error:_of_graphs": NONE}
    ),
    "in-kernels": Mechanism("overflows inside Inductor kernels", {"checks.range.overflow:_inside_graphs": NONE}),
    "zero-in-kernels": Mechanism("zeros inside Inductor kernels", {"checks.range.silent_zero:_inside_graphs": NONE}),
}

_GUARDS: dict[str, Mechanism] = {
    f"guard-{name}": Mechanism(purpose, {f"checks.{place}": Gives(())})
    for name, purpose, place in (
        ("state", "a state that a call leaves", "autocast.autocast_state:_of_block"),
        ("scope", "backward and steps inside of a region", "autocast.autocast_scope:check"),
        ("cache", "cached casts that are stale or cut", "autocast.autocast_cache:check"),
        ("bypass", "in-place and out= ops that bypass autocast", "autocast.autocast_bypass:check"),
        ("thread", "threads without autocast", "autocast.autocast_thread:check"),
        ("checkpoint", "recomputations with another state", "autocast.autocast_checkpoint:check"),
        ("function", "autograd functions of two states", "autocast.autocast_function:check"),
        ("unregistered", "custom ops that no policy names", "policy.policy_unregistered:_of_block"),
        ("banned", "banned ops", "policy.policy_banned:_of_block"),
    )
}

MECHANISMS: Mapping[str, Mechanism] = MappingProxyType(_SHADOW | _TRAINING | _COMPILED | _GUARDS)
NAMES = tuple(MECHANISMS)


def located(place: str) -> tuple[Any, str]:
    """The module or class that holds a place, and the name of it there."""
    path, _, attribute = place.partition(":")
    holder: Any = importlib.import_module(f"ampcheck.{path}")
    *classes, name = attribute.split(".")
    for part in classes:
        holder = getattr(holder, part)
    if name not in vars(holder):
        raise AttributeError(f"{place} does not exist")
    return holder, name


def _returns_nothing(place: str) -> bool:
    holder, name = located(place)
    function = inspect.unwrap(vars(holder)[name])
    return inspect.isfunction(function) and inspect.signature(function).return_annotation in ("None", None)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch mechanisms off inside."""
    with _swapped({place: off for name in names for place, off in MECHANISMS[name].places.items()}):
        yield


@contextmanager
def recording() -> Iterator[set[str]]:
    """Fill a set with the names of the mechanisms that act inside; what nothing shows is in it from the start."""
    acted = {name for name, mechanism in MECHANISMS.items() if mechanism.unseen}
    by_place: dict[str, dict[str, Any]] = {}
    for name, mechanism in MECHANISMS.items():
        for place, off in mechanism.places.items():
            if callable(off):
                by_place.setdefault(place, {})[name] = off
    watched = {}
    for place, offs in by_place.items():
        holder, name = located(place)
        watched[place] = _watched(vars(holder)[name], offs, acted)
    with _swapped(watched):
        yield acted


@contextmanager
def _swapped(values: Mapping[str, Any]) -> Iterator[None]:
    """Put values in places, and wherever the package names what was there."""
    named: dict[int, tuple[Any, Any]] = {}  # by the id of a function that modules name: it, and what stands in
    held: list[tuple[Any, str, Any]] = []  # methods and constants
    for place, value in values.items():
        holder, name = located(place)
        old = vars(holder)[name]
        new = _one_of_a_kind(value) if callable(old) else value
        if isinstance(holder, type) or not callable(old):
            held.append((holder, name, old))
            setattr(holder, name, new)
        else:
            named[id(old)] = old, new
    _replace(named)
    try:
        yield
    finally:
        _replace({id(new): (new, old) for old, new in named.values()})  # also in modules that were imported meanwhile
        for holder, name, old in reversed(held):
            setattr(holder, name, old)


def _one_of_a_kind(value: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is no other place's stand-in, a method of a class; whoever reads frames takes it for ours."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs)

    stand_in.__code__ = stand_in.__code__.replace(co_filename=ampcheck.__file__)
    return stand_in


def _replace(named: Mapping[int, tuple[Any, Any]]) -> None:
    """Put functions in the place of others in all modules of the package, and in their tables."""
    for path, module in list(sys.modules.items()):
        if not named or path.partition(".")[0] != "ampcheck" or module is None:
            continue
        for name, value in list(vars(module).items()):
            if id(value) in named:
                setattr(module, name, named[id(value)][1])
            elif isinstance(value, (dict, MappingProxyType)) and any(id(item) in named for item in value.values()):
                swapped = {key: named[id(item)][1] if id(item) in named else item for key, item in value.items()}
                setattr(module, name, type(value)(swapped))


def _watched(function: FunctionType, offs: Mapping[str, Any], acted: set[str]) -> Callable[..., Any]:
    """A function that also notes which mechanisms act."""

    def watching(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if inspect.isgenerator(result):
            return _noting(result, offs, acted)
        for name, off in offs.items():
            acts = MECHANISMS[name].acts
            if name in acted:
                continue
            if acts(args, kwargs, result) if acts is not None else _differs(result, off(*args, **kwargs)):
                acted.add(name)
        return result

    watching.__code__ = watching.__code__.replace(co_filename=ampcheck.__file__)
    return watching


def _noting(items: Iterator[Any], offs: Mapping[str, Any], acted: set[str]) -> Iterator[Any]:
    for item in items:
        if _counts(item):
            acted.update(offs)
        yield item


def _differs(result: Any, off: Any) -> bool:
    """Whether a function acted: of findings, those that pass or skip are as good as none."""
    if isinstance(result, (list, tuple)) and not isinstance(off, tuple):
        return any(_counts(item) for item in result)
    if isinstance(result, (bool, int, float, str, tuple, dict)):
        return bool(result != off)
    return result is not off


def _counts(item: object) -> bool:
    return not isinstance(item, Finding) or item.verdict in _REPORTED
