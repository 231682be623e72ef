"""Requires: Backward passes and optimizer steps run outside autocast regions. Fails for each line where one does not;
warns where the gradient is differentiable itself (create_graph) and so belongs to a forward; incomplete where this
machine lacks the device of all regions.

Measured: Each entry into the autograd engine and each optimizer step is hooked, and autocast's state is read there. A
backward that runs inside another one, as checkpoints do, does not count.

Causes: A region around the whole step or the whole loop. Then weights keep their first cast: no training. A device that
is written out, such as autocast('cuda') on the CPU, which PyTorch switches off with a warning.

Fix: Put the forward and the loss in the region, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ampcheck.checks.autocast import skipped
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.subject import Kind
from ampcheck.core.text import counted
from ampcheck.records.autocast import Crossing, GuardStats

CHECK = Check(
    "autocast-scope",
    "autocast",
    __doc__,
    unit="times",
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("GuardStats",),
    order=305,
    evidence=("tests/corpus/training/weights_change_inside_autocast", "nanogpt: backward inside autocast"),
)


def check(stats: GuardStats, limits: Limits) -> Iterator[Finding]:
    """No backward pass and no optimizer step inside a region, which is for a device that is there."""
    idle = {} if stats.regions else stats.idle
    for where, device in idle.items():
        message = (
            f"a region must be for the device of its ops, but torch.autocast({device!r}) cast nothing, since this "
            f"machine has no {device}"
        )
        hint = (
            "pass the device of the inputs: torch.autocast(x.device.type, ...); or make and enter the region under "
            f"ampcheck.emulate({device!r})"
        )
        yield CHECK.incomplete(stats.subject, message, where=where, hint=hint)
    sites: dict[tuple[str, bool, Where], list[tuple[Crossing, int]]] = defaultdict(list)
    for crossing, count in stats.crossings.items():
        sites[crossing.what, crossing.differentiable, crossing.where].append((crossing, count))
    steps_inside = _steps_in_one_region(stats)
    of_backward = {crossing.region for crossing in stats.crossings if crossing.what == "backward calls"}
    for (what, differentiable, where), crossings in sites.items():
        times = sum(count for _, count in crossings)
        backward = what == "backward calls"
        message = (
            f"{'a backward pass' if backward else 'an optimizer step'} must run outside autocast, but "
            f"{'one' if times == 1 else times} ran with autocast {crossings[0][0].state}"
        )
        kind = ""
        if not backward and of_backward.issuperset(crossing.region for crossing, _ in crossings):
            kind, message = "region", f"{message} in the region of a backward pass"
        if steps_inside > 1 and not backward:
            message += (
                f": the whole training loop runs inside one region ({steps_inside} steps); "
                "weights keep their first cast, so the forward does not see the updates"
            )
        verdict, hint = Verdict.FAIL, CHECK.fix
        if differentiable:
            verdict = Verdict.WARN
            message += "; it is differentiable itself (create_graph), so it belongs to a forward"
            hint = "compute such a gradient inside torch.autocast(..., enabled=False), and the rest under autocast"
        shown = Evidence(where=where, observed=times, limit=0, hint=hint, kind=kind)
        yield CHECK.finding(verdict, stats.subject, message, **shown)
    if sites or idle:
        return
    passes, steps = stats.counts.get("backward calls", 0), stats.counts.get("optimizer steps", 0)
    if not passes + steps:
        yield skipped(CHECK, stats, "no backward pass and no optimizer step ran")
    elif not stats.regions:
        reason = "autocast was never on; torch.autocast for a device that is not there does nothing (emulate it)"
        yield skipped(CHECK, stats, reason)
    else:
        ran = f"{counted(passes, 'backward passes')} and {counted(steps, 'optimizer steps')}"
        message = f"{ran} ran outside autocast"
        yield CHECK.passed(stats.subject, message, passes + steps)


def _steps_in_one_region(stats: GuardStats) -> int:
    """The largest number of optimizer steps that ran inside one region together with backward passes."""
    steps: dict[int, int] = defaultdict(int)
    passes: dict[int, int] = defaultdict(int)
    for crossing, count in stats.crossings.items():
        (steps if crossing.what == "optimizer steps" else passes)[crossing.region] += count
    return max((min(count, passes[region]) for region, count in steps.items()), default=0)
