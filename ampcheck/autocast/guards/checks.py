"""What the guards conclude from what was recorded. Pure: no PyTorch runs here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from ampcheck.autocast.guards.recasts import calls_of, names, recast, rule_of
from ampcheck.autocast.guards.stats import Crossing, CutCast, GuardStats, StaleCast
from ampcheck.autocast.policy import BANNED, Policy
from ampcheck.autocast.state import short
from ampcheck.catalog.autocast import (
    AUTOCAST_BYPASS,
    AUTOCAST_CACHE,
    AUTOCAST_CHECKPOINT,
    AUTOCAST_FUNCTION,
    AUTOCAST_SCOPE,
    AUTOCAST_STATE,
    AUTOCAST_THREAD,
    POLICY_BANNED,
    POLICY_UNREGISTERED,
)
from ampcheck.core.check import Check, Evidence, first_findings
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import counted, listed

_CUT = (
    "call torch.clear_autocast_cache() after the part without gradients, give it a region of its own, or pass "
    "cache_enabled=False; PyTorch 2.11 and later keep the history"
)


def check_state(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-state`: every setting is at the end what it was at the start."""
    if not stats.changed:
        message = f"{stats.settings} switches are as they were"
        yield AUTOCAST_STATE.passed(stats.subject, message, stats.settings)
        return
    items = [f"{name} was {_plain(old)} and is {_plain(new)}" for name, (old, new) in stats.changed.items()]
    message = f"code must leave autocast and the precision switches as it found them, but {'; '.join(items)}. "
    message += "The guard has restored them"
    hint = "restore the switch in a finally block or a fixture"
    if any(name.startswith("autocast") for name in stats.changed):
        hint = (
            "use `with torch.autocast(...)`; an exception inside a region of a torch.compile'd function leaves the "
            "region open"
        )
    yield AUTOCAST_STATE.fail(stats.subject, message, observed=len(items), limit=0, hint=hint)


def check_scope(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-scope`: no backward pass and no optimizer step inside a region, which is for a device that is there."""
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
        yield AUTOCAST_SCOPE.incomplete(stats.subject, message, where=where, hint=hint)
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
        verdict, hint = Verdict.FAIL, AUTOCAST_SCOPE.fix
        if differentiable:
            verdict = Verdict.WARN
            message += "; it is differentiable itself (create_graph), so it belongs to a forward"
            hint = "compute such a gradient inside torch.autocast(..., enabled=False), and the rest under autocast"
        shown = Evidence(where=where, observed=times, limit=0, hint=hint, kind=kind)
        yield AUTOCAST_SCOPE.finding(verdict, stats.subject, message, **shown)
    if sites or idle:
        return
    passes, steps = stats.counts.get("backward calls", 0), stats.counts.get("optimizer steps", 0)
    if not passes + steps:
        yield _skip(AUTOCAST_SCOPE, stats, "no backward pass and no optimizer step ran")
    elif not stats.regions:
        reason = "autocast was never on; torch.autocast for a device that is not there does nothing (emulate it)"
        yield _skip(AUTOCAST_SCOPE, stats, reason)
    else:
        ran = f"{counted(passes, 'backward passes')} and {counted(steps, 'optimizer steps')}"
        message = f"{ran} ran outside autocast"
        yield AUTOCAST_SCOPE.passed(stats.subject, message, passes + steps)


def check_cache(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-cache`: a cached cast is never used after its weight changed, under another dtype, nor in a forward
    with gradients where it has no history."""
    groups: dict[tuple[str, torch.dtype, torch.dtype | None], list[StaleCast]] = defaultdict(list)
    for stale in stats.stale:
        groups[stale.changed_by, stale.cast, stale.wanted].append(stale)
    for (changed_by, cast, wanted), uses in groups.items():
        first = uses[0]
        weights = f"the {short(cast)} cast of a weight {list(first.shape)}"
        if len(uses) > 1:
            weights += f" (and {len(uses) - 1} other uses)"
        if wanted is None:
            message = (
                "a weight must not change while autocast keeps its cast, but "
                f"{weights} was used after the weight was changed by {changed_by}: the old values were used"
            )
        else:
            message = (
                f"one region must use one dtype, but {weights} was used where autocast casts to {short(wanted)}: "
                "the cache does not compare dtypes"
            )
        evidence = Evidence(where=first.where, observed=len(uses), limit=0, hint=AUTOCAST_CACHE.fix)
        evidence["names"] = [changed_by] if changed_by else []
        yield AUTOCAST_CACHE.fail(stats.subject, message, **evidence)
    cut: dict[tuple[str, str], list[CutCast]] = defaultdict(list)
    for use in stats.cut:
        cut[use.made_at, use.where.place].append(use)
    for (made_at, _), casts in cut.items():
        first_cut = casts[0]
        weights = listed(dict.fromkeys(use.weight or f"a weight {list(use.shape)}" for use in casts))
        message = (
            "backward must reach the weights of a forward that ran with gradients, but autocast kept the "
            f"{short(first_cut.cast)} cast of {weights} from {made_at}, where gradients were off, and this forward "
            "used it: it gives them no gradient"
        )
        where = first_cut.where
        if len({use.where.module for use in casts}) > 1:
            where = replace(where, module="")
        times = sum(stats.cut[use] for use in casts)
        yield AUTOCAST_CACHE.fail(stats.subject, message, where=where, observed=times, limit=0, hint=_CUT)
    if not groups and not cut:
        message = "{} of weights, none of them used after its weight changed"
        yield _clean(AUTOCAST_CACHE, stats, "cached casts", "autocast kept no cast of a weight", message)


def check_bypass(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-bypass`: no in-place or out= variant where autocast would have cast for the plain op."""
    clean = True
    for call, count, dtype in recast(stats, "bypass"):
        if not call.raised and call.result is dtype:
            continue
        clean = False
        message = (
            f"under autocast to {short(call.state.dtype)} an op follows its rule, but {call.op} does not go through "
            f"autocast ({names(call.dtypes)}); {call.plain_op} would have computed in {short(dtype)}. "
        )
        verdict = Verdict.FAIL
        if call.raised:
            verdict, message = (Verdict.WARN if call.caught else Verdict.FAIL), f"{message}It raised: {call.raised}"
        elif call.result is torch.float32:
            verdict, message = Verdict.WARN, f"{message}It ran in float32: nothing is unsafe, speed is lost"
        else:
            message += f"It wrote {short(call.result)}"
        hint = f"call {call.plain_op.removeprefix('aten::').partition('.')[0]} and assign its result"
        yield AUTOCAST_BYPASS.finding(
            verdict, stats.subject, message, where=call.where, observed=count, limit=0, hint=hint
        )
    if clean:
        yield _clean(AUTOCAST_BYPASS, stats, "autocast ops", "no op ran under autocast")


def check_thread(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-thread`: a thread computes in the dtype of the thread that started it, unless it chose another."""
    calls = list(recast(stats, "thread"))
    if not calls:
        reason = "no thread that was started under autocast ran an op"
        yield _clean(AUTOCAST_THREAD, stats, "thread ops", reason)
        return
    call, _, dtype = calls[0]
    now = call.now.dtype if call.now is not None else None
    autocast = "with autocast off" if now is None else f"with autocast to {short(now)}, the default"
    others = f" (and {len(calls) - 1} other places)" if len(calls) > 1 else ""
    message = (
        f"a thread must compute as the one that started it, but {call.op} ran on {names(call.dtypes)} {autocast}"
        f"{others}; autocast to {short(call.state.dtype)} was on where the thread was started, under which it computes "
        f"in {short(dtype)}. The state of autocast belongs to one thread"
    )
    hint = f"enter torch.autocast({call.state.device!r}, dtype={call.state.dtype}) inside the thread's function"
    yield AUTOCAST_THREAD.fail(stats.subject, message, where=call.where, observed=len(calls), limit=0, hint=hint)


def check_checkpoint(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-checkpoint`: a forward that backward computes again runs under the same state.

    Backward computes a forward again under PyTorch's checkpoint, and where the backward of a Function enables gradients
    or enters a module of the forward; what a hook calls is none.
    """
    ops = list(stats.recomputed)
    if not ops:
        yield _clean(AUTOCAST_CHECKPOINT, stats, "recomputed ops", "backward computed no forward again")
        return
    first = min(ops, key=lambda op: not rule_of(stats.policies, op.forward.device, op.op))
    others = f" (and {len(ops) - 1} other ops)" if len(ops) > 1 else ""
    forward, backward = f"autocast {first.forward}", f"autocast {first.backward}"
    if first.op:
        forward = f"{names(first.forward_dtypes)} with {forward}"
        backward = f"{names(first.backward_dtypes)} with {backward}"
    message = (
        f"a forward that backward computes again must run as before, but {first.op or 'it'}{others} ran on "
        f"{forward} in forward and on {backward} in the recomputation"
    )
    evidence = Evidence(where=first.where, observed=len(ops), limit=0, hint=AUTOCAST_CHECKPOINT.fix)
    yield AUTOCAST_CHECKPOINT.fail(stats.subject, message, **evidence)


def check_function(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-function`: the Python backward of a Function runs under the state of its forward."""
    findings = []
    for call, _, dtype in recast(stats, "function"):
        wide = set(call.dtypes) == {torch.float32}  # which loses speed and no digits
        if call.casts and wide:
            continue
        message = (
            f"the backward of an autograd.Function must run under the autocast of its forward, but {call.op} ran on "
            f"{names(call.dtypes)} with autocast off; forward ran with {call.state}, under which the op computes in "
            f"{short(dtype)}"
        )
        if wide:
            message += ". In float32 nothing is unsafe, speed is lost"
        verdict, hint = Verdict.WARN if wide else Verdict.FAIL, AUTOCAST_FUNCTION.fix
        findings.append(AUTOCAST_FUNCTION.finding(verdict, stats.subject, message, where=call.where, hint=hint))
    yield from first_findings(findings, 3)
    if not findings:
        reason = "no autograd.Function whose forward ran under autocast had its Python backward run"
        yield _clean(AUTOCAST_FUNCTION, stats, "Function ops", reason)


def check_unregistered(stats: GuardStats) -> Iterator[Finding]:
    """`policy-unregistered`: no op raises on mixed dtypes because autocast has no rule for it."""
    clean = True
    for call, count in (*calls_of(stats, "mixed"), *calls_of(stats, "bypass")):
        if not call.raised or call.policy not in stats.policies or rule_of(stats.policies, call.policy, call.plain_op):
            continue
        clean = False
        message = (
            f"under autocast an op must get one dtype, but autocast has no rule for {call.op} on "
            f"{call.state.device}: it got {names(call.dtypes)} and raised: {call.raised}. With all inputs in "
            f"{short(call.runs_in)} it runs"
        )
        hint = f"cast its inputs to {short(call.runs_in)} at the call"
        if call.plain_op != call.op:
            hint = "cast what is written to the dtype of the tensor that it is written into"
        elif not call.op.startswith("aten::"):
            hint += ", or give the op a rule with torch.library.register_autocast"
        verdict = Verdict.WARN if call.caught else Verdict.FAIL
        yield POLICY_UNREGISTERED.finding(
            verdict, stats.subject, message, where=call.where, observed=count, limit=0, hint=hint
        )
    if clean:
        yield _clean(POLICY_UNREGISTERED, stats, "autocast ops", "no op ran under autocast")


def check_banned(stats: GuardStats) -> Iterator[Finding]:
    """`policy-banned`: no op is called that autocast refuses to run. Errors that the block catches are not seen."""
    raised = stats.raised
    text = raised.message.strip() if raised is not None else ""
    devices: dict[str, list[str]] = defaultdict(list)
    for name, policy in stats.policies.items():
        for op in banned_by(policy, text):
            devices[op].append(name)
    for op, by in devices.items():
        first, *others = (line.strip() for line in text.splitlines() if line.strip())
        where = replace(raised.where if raised else Where(), phase="forward", op=op)
        message = (
            f"an op that autocast bans must not run under it, but {op}, which {' and '.join(by)} bans, was called: "
            f"{first}"
        )
        yield POLICY_BANNED.fail(stats.subject, message, where=where, hint=" ".join(others))
    for where in () if devices else stats.banned_on_cuda:
        message = (
            f"an op that autocast bans must not run under it; {where.op} computes in float32 under the CPU's autocast, "
            "and raises under that of CUDA"
        )
        yield POLICY_BANNED.fail(stats.subject, message, where=where, hint=POLICY_BANNED.fix)
    if not devices and not stats.banned_on_cuda:
        message = "{} ran and no ban ended the block; a ban that the block catches is not seen"
        yield _clean(POLICY_BANNED, stats, "autocast ops", "no op ran under autocast", message)


def banned_by(policy: Policy, message: str) -> list[str]:
    """The ops that a policy bans with this message, which is all that is seen of them: autocast raises first."""
    bans = ((op, facts.raises.strip() or f"{op} is unsafe to autocast") for op, facts in policy.ops.items())
    return [op for op, text in bans if policy.rule(op) == BANNED and message.startswith(text)]


GUARD_CHECKS: Mapping[str, Callable[[GuardStats], Iterator[Finding]]] = MappingProxyType(
    {
        AUTOCAST_STATE.slug: check_state,
        AUTOCAST_SCOPE.slug: check_scope,
        AUTOCAST_CACHE.slug: check_cache,
        AUTOCAST_BYPASS.slug: check_bypass,
        AUTOCAST_THREAD.slug: check_thread,
        AUTOCAST_CHECKPOINT.slug: check_checkpoint,
        AUTOCAST_FUNCTION.slug: check_function,
        POLICY_UNREGISTERED.slug: check_unregistered,
        POLICY_BANNED.slug: check_banned,
    }
)
"""The checks of a guard, by name."""


def check_guard(stats: GuardStats, checks: Collection[str]) -> list[Finding]:
    """The findings of the named checks: failures, warnings, or one pass or skip for each check."""
    return [finding for slug, check in GUARD_CHECKS.items() if slug in checks for finding in check(stats)]


def _steps_in_one_region(stats: GuardStats) -> int:
    """The largest number of optimizer steps that ran inside one region together with backward passes."""
    steps: dict[int, int] = defaultdict(int)
    passes: dict[int, int] = defaultdict(int)
    for crossing, count in stats.crossings.items():
        (steps if crossing.what == "optimizer steps" else passes)[crossing.region] += count
    return max((min(count, passes[region]) for region, count in steps.items()), default=0)


def _plain(value: object) -> str:
    return short(value) if isinstance(value, torch.dtype) else str(value)


def _clean(check: Check, stats: GuardStats, what: str, reason: str, message: str = "looked at {}") -> Finding:
    """A pass on what was counted as `what`; a skip for this reason where there was none."""
    seen = stats.counts.get(what, 0)
    text = message.format(counted(seen, what))
    return check.passed(stats.subject, text, seen) if seen else _skip(check, stats, reason)


def _skip(check: Check, stats: GuardStats, reason: str) -> Finding:
    return check.absent(stats.subject, f"nothing was looked at: {reason}")
