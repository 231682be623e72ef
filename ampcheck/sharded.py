"""A sharded training step compared with one process on the whole batch: a missing division is in every shard alike."""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not to type checkers
from torch.multiprocessing.spawn import spawn

from ampcheck.checks.training.reduce_precision import CHECK as REDUCE_PRECISION
from ampcheck.core.arguments import parse_integer
from ampcheck.core.errors import UsageError
from ampcheck.core.exit import exit_without_teardown
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Run, merge
from ampcheck.facts.memory import roundoff
from ampcheck.outcome.raising import verify
from ampcheck.parity.circumstances import Circumstance, Function
from ampcheck.records.reductions import CollectiveStats
from ampcheck.torchtools.storage import local, placements
from ampcheck.training.distributed.collectives import CollectiveWatch
from ampcheck.training.distributed.policies import FollowedPolicies
from ampcheck.training.distributed.ranks import gather, gather_runs
from ampcheck.training.distributed.sums import compare_sums
from ampcheck.watch import watched

_TURNED = 2.0
"""Where a share `unit` of the decisions turns between two runs, their gradients part by its square root."""


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """A training step as user code. Functions of modules, so that other processes can import them.

    model: returns the plain module, the same on every rank. batch: `batch(rank, ranks)` is the batch of one of `ranks`
    processes; `batch(0, 1)` the whole. step: `step(model, batch)` leaves reduced gradients in `.grad`. shard: wraps or
    parallelizes the module; None where `step` reduces by hand.
    """

    model: Callable[[], torch.nn.Module]
    batch: Callable[[int, int], Any]
    step: Callable[[torch.nn.Module, Any], object]
    shard: Callable[[torch.nn.Module], torch.nn.Module] | None = None


@dataclass(frozen=True, slots=True)
class Gradients:
    """Exact gradients of a step, whole, float64, by name. unit: the coarsest unit roundoff in their making."""

    exact: Mapping[str, torch.Tensor]
    unit: float


@dataclass(frozen=True, slots=True)
class Ranks(Circumstance):
    """Circumstance of `assert_parity`: so many processes leave the gradients that one leaves of the whole batch.

    assert_parity(ShardedStep(model, batch, step, DistributedDataParallel), Ranks(2))
    """

    count: int = 2
    judges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        parse_integer(self.count, "count of Ranks", 2)

    def _title(self) -> str:
        return f"{self.count} ranks"

    def applied(self, function: Function) -> Function:
        """Raise `UsageError`: `judge` starts processes of its own."""
        raise UsageError("Ranks compares a ShardedStep, whose parts other processes can import")

    def judge(self, subject: Any, name: str) -> Run:
        """The run of `assert_sharded`."""
        if not isinstance(subject, ShardedStep):
            raise UsageError(
                f"a must be a ShardedStep(model, batch, step, shard) where b is Ranks; found {type(subject).__name__}"
            )
        return judge_sharded(subject, ranks=self.count, name=name)


def judge_sharded(step: ShardedStep, *, ranks: int = 2, limits: Limits | None = None, name: str = "") -> Run:
    """Run a step on `ranks` processes on gloo, each watched, and compare its exact gradients with those of one process
    on the whole batch with the plain module.

    The watch finds what goes beyond a format (`overflow`, `flush`). `reduce-precision` finds a factor or a weighting
    that a shadow shares with its run, a sum over ranks in 16 bits that loses the digits that it has in float32, and
    parameters that do not compute, or gradients that are not reduced, in the dtypes of the `MixedPrecisionPolicy` of
    FSDP2. Sums are compared in up to 256 elements of each call. The step must be
    deterministic: dropout, and BatchNorm without synchronization, differ between the two by design.

    Raises `UsageError` for less than two ranks, and for functions that another process cannot import; what a rank
    raises propagates.
    """
    parse_integer(ranks, "ranks", 2)
    subject = name or getattr(step.step, "__name__", "step")
    try:
        pickle.dumps(step)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        required = "functions of a ShardedStep must stand at the top of a module, where other processes find them"
        raise UsageError(f"{required}: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        whole, sharded = (_spawned(step, count, subject, limits, Path(folder)) for count in (1, ranks))
    run: Run = Run.from_json(sharded["run"])
    compared = check_whole(sharded["gradients"], whole["gradients"], ranks, subject)
    return merge([run, Run(findings=(compared, *sharded["found"]))])


def assert_sharded(step: ShardedStep, *, ranks: int = 2, limits: Limits | None = None, name: str = "") -> None:
    """Assert that `judge_sharded` finds no failure; arguments and errors as there."""
    __tracebackhide__ = True
    verify(judge_sharded(step, ranks=ranks, limits=limits, name=name))


def check_whole(sharded: Gradients, whole: Gradients, ranks: int, subject: str) -> Finding:
    """`reduce-precision`: the exact gradients of a sharded step are those of one process."""
    if not whole.exact:
        return REDUCE_PRECISION.skip(subject, "the step left no gradient in one process")
    missing = [name for name in whole.exact if name not in sharded.exact]
    norm = math.sqrt(sum(float(g.square().sum()) for g in whole.exact.values())) or 1.0
    apart = {name: _relative(sharded.exact[name], g, norm) for name, g in whole.exact.items() if name not in missing}
    worst = max(apart, key=lambda name: apart[name], default="")
    limit = _TURNED * math.sqrt(max(sharded.unit, whole.unit))
    if missing:
        text = f"{missing[0]} has no gradient on {ranks} ranks ({len(missing)} of {len(whole.exact)} parameters)"
        return REDUCE_PRECISION.fail(subject, f"{_REQUIRED}; {text}", hint=_HINT)
    if not apart[worst] <= limit:
        factor = _factor(sharded.exact, whole.exact)
        multiple = f"; all together they are {factor:.3g} times as large" if abs(factor - 1) > limit else ""
        hint = _HINT
        if 1 < len(factors := _factors(sharded.exact, whole.exact, limit)) <= ranks:
            multiple = (
                f"; ranks multiply their shards by factors of their own: {', '.join(f'{f:.3g}' for f in factors)}"
            )
            hint = _NORM
        text = f"{_REQUIRED}; on {ranks} ranks that of {worst} is off by {apart[worst]:.2g} in float64{multiple}"
        return REDUCE_PRECISION.fail(
            subject, text, observed=apart[worst], limit=limit, unit="relative distance", hint=hint
        )
    text = f"the exact gradients of {len(apart)} parameters on {ranks} ranks are those of one process"
    return REDUCE_PRECISION.passed(
        subject, text, len(apart), observed=apart[worst], limit=limit, unit="relative distance"
    )


_REQUIRED = "gradients of a sharded step must be those of one process on the whole batch"
_HINT = (
    "divide a sum of gradients by the number of ranks, and weight means over local batches of different sizes: "
    "divide the sum of losses by the number of samples on all ranks"
)

_NORM = (
    "clip by the norm of all shards, as torch.nn.utils.clip_grad_norm_ does with DTensors: all_reduce the squares of "
    "the norms of local shards before the root"
)

_REDUCE = (
    "cast gradients and partial sums to float32 before they are summed over ranks: MixedPrecisionPolicy(reduce_dtype="
    "torch.float32) under FSDP2, no compressing communication hook under DDP"
)


def check_sums(sums: Sequence[CollectiveStats], subject: str) -> list[Finding]:
    """`reduce-precision`: sums over ranks in 16 bits keep the digits that the same sums in float32 have."""
    findings = []
    for total in sums:
        form = format_of(total.format)
        limit = _TURNED * math.sqrt(form.unit_roundoff)
        if form.bits <= 16 and total.lost > limit:
            text = (
                f"a sum over ranks must keep the digits that it has in float32; {total.where.op} over {total.world} "
                f"ranks in {total.format} loses {total.lost:.2g} of its result to rounding: the addends nearly cancel"
            )
            failure = REDUCE_PRECISION.fail(
                subject, text, where=total.where, hint=_REDUCE, observed=total.lost, limit=limit, unit="relative error"
            )
            findings.append(failure)
    return findings


def _relative(sharded: torch.Tensor, whole: torch.Tensor, norm: float) -> float:
    """Distance of two gradients; one that is a small part of all counts by its share."""
    return float((sharded - whole).norm()) / max(float(whole.norm()), norm * 1e-3)


def _factor(sharded: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> float:
    products = sum(float((sharded[name] * g).sum()) for name, g in whole.items())
    return products / (sum(float(g.square().sum()) for g in whole.values()) or 1.0)


def _factors(sharded: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], limit: float) -> list[float]:
    """The factors between elements of two gradients, each of several elements; none where some has its own."""
    pairs = [(sharded[name].flatten(), gradient.flatten()) for name, gradient in whole.items()]
    ratios = torch.cat([(mine / theirs)[theirs != 0] for mine, theirs in pairs]).sort().values
    if not ratios.numel() or not bool(ratios.isfinite().all()):
        return []
    steps = (ratios.diff() > limit * ratios[:-1].abs()).nonzero().flatten() + 1
    parts = ratios.tensor_split(steps)
    return [float(part.median()) for part in parts] if all(len(part) > 1 for part in parts) else []


def _spawned(step: ShardedStep, ranks: int, subject: str, limits: Limits | None, folder: Path) -> dict[str, Any]:
    """Return what rank 0 of a group of new processes reports."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = folder / f"{ranks}.pt"
    spawn(  # type: ignore[no-untyped-call]
        _on_rank, (ranks, store.port, step, subject, limits, str(result)), nprocs=ranks
    )
    report: dict[str, Any] = torch.load(result, weights_only=False)
    return report


def _on_rank(
    rank: int, ranks: int, port: int, step: ShardedStep, subject: str, limits: Limits | None, result: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    try:
        torch.manual_seed(0)
        model = step.model()
        if step.shard is not None and ranks > 1:
            model = step.shard(model)
        batch = step.batch(rank, ranks)
        sums = CollectiveWatch()
        with FollowedPolicies(model, sums) as policies, sums, watched(name=subject, limits=limits) as seen:
            step.step(model, batch)
        gradients = _gradients(model, seen)
        run, compared = gather_runs(seen.run), compare_sums(gather(sums.calls), None)
        if rank == 0:
            assert run is not None
            found = [*policies.findings(subject), *check_sums(compared, subject)]
            torch.save({"run": run.to_json(), "gradients": gradients, "found": found}, result)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    exit_without_teardown(0)


def _gradients(model: torch.nn.Module, seen: Any) -> Gradients:
    exact, unit = dict[str, torch.Tensor](), 0.0
    for name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is not None:
            own = local(gradient.detach())
            known = seen.shadow.store.known(own)
            unit = max(unit, roundoff(own.dtype) if known is None else known.unit)
            plain = name.removeprefix("module.").replace("_orig_mod.", "")
            exact[plain] = _whole(gradient, seen.shadow.exact(own).clone())
    return Gradients(exact, unit)


def _whole(gradient: Any, exact: torch.Tensor) -> torch.Tensor:
    """The companions of all shards of a gradient as one tensor. Every rank must call it."""
    if not placements(gradient):
        return exact
    from torch.distributed.tensor import DTensor

    layout = {"shape": gradient.shape, "stride": gradient.stride(), "run_check": False}
    return DTensor.from_local(exact, gradient.device_mesh, gradient.placements, **layout).full_tensor()
