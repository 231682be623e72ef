"""What the guards conclude from what they saw. Pure: no PyTorch runs here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

import torch

from ampcheck.autocast.guards.records import Call, Crossing, GuardStats, Recompute, StaleCast, short
from ampcheck.autocast.policy import APPEND_DTYPE, BANNED, FIXED, FP32, LOWER, PROMOTE, SET_DTYPE, Policy
from ampcheck.core.run import Finding, Verdict, Where, passed

_BELOW: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "aten::convolution": ("aten::conv2d",),
        "aten::_softmax": ("aten::softmax.int",),
        "aten::_log_softmax": ("aten::log_softmax.int",),
        "aten::native_layer_norm": ("aten::layer_norm",),
        "aten::native_group_norm": ("aten::group_norm",),
        "aten::_fused_rms_norm": ("aten::rms_norm",),
        "aten::_prelu_kernel": ("aten::prelu",),
        "aten::_cdist_forward": ("aten::cdist",),
        "aten::_scaled_dot_product_flash_attention_for_cpu": ("aten::scaled_dot_product_attention",),
        "aten::_scaled_dot_product_efficient_attention": ("aten::scaled_dot_product_attention",),
        "aten::_scaled_dot_product_cudnn_attention": ("aten::scaled_dot_product_attention",),
    }
)
"""What an op is called above autocast, where the rules are kept, of what it becomes below."""

_LIST = 3
"""How many places a finding names before it only counts them."""


def rule_for(policy: Policy | None, op: str) -> str:
    """The rule of an op as it is seen below autocast; empty where autocast leaves it alone."""
    if policy is None:
        return ""
    return next((rule for name in (op, *_BELOW.get(op, ())) if (rule := policy.rule(name))), "")


def wanted_dtype(call: Call, rule: str) -> torch.dtype | None:
    """What autocast would have computed in; None where it would have changed nothing."""
    if not call.given:
        return None
    if rule in (SET_DTYPE, APPEND_DTYPE):
        return None if call.asked or call.given[0] is torch.float32 else torch.float32
    if rule == LOWER:
        target = call.state.dtype
    elif rule == FP32:
        target = torch.float32
    elif rule.startswith(FIXED):
        target = getattr(torch, rule.removeprefix(FIXED))
    elif rule == PROMOTE:
        target = torch.float32 if torch.float32 in call.given else call.state.dtype
    else:
        return None
    return target if any(dtype is not target for dtype in call.given) else None


def check_state(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-state`: every switch is at the end what it was at the start."""
    slug = "autocast-state"
    if stats.changed:
        items = [f"{name} was {_plain(old)} and is {_plain(new)}" for name, (old, new) in stats.changed.items()]
        yield Finding(
            slug,
            Verdict.FAIL,
            stats.subject,
            f"what runs must leave autocast and the precision switches as it found them, but {'; '.join(items)}. "
            "The guard has put them back",
            observed=float(len(items)),
            limit=0.0,
            unit="switches",
            hint=_state_hint(stats),
        )
    else:
        yield passed(slug, stats.subject, f"{stats.settings} switches are as they were", stats.settings)


def check_scope(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-scope`: no backward pass and no optimizer step inside a region."""
    slug = "autocast-scope"
    passes, steps = stats.counts.get("backward calls", 0), stats.counts.get("optimizer steps", 0)
    places: dict[tuple[str, bool, str, int | None], list[tuple[Crossing, int]]] = defaultdict(list)
    for crossing, count in stats.crossings.items():
        places[crossing.what, crossing.part, crossing.file, crossing.line].append((crossing, count))
    whole = _whole_steps(stats)
    for (what, part, file, line), found in places.items():
        times = sum(count for _, count in found)
        state = found[0][0].states[0]
        backward = what == "backward calls"
        one = "a backward pass" if backward else "an optimizer step"
        message = f"{one} must run outside autocast, but {_times(times)} ran with autocast {state}"
        if whole > 1 and not backward:
            message += (
                f": the whole training loop runs inside one region ({whole} steps); "
                "weights keep their first cast, so the forward does not see the updates"
            )
        hint = "end the autocast region after the loss: with torch.autocast(...) around forward and loss only"
        if part:
            message += "; it is differentiable itself (create_graph), so it belongs to a forward"
            hint = "take such a gradient with torch.autocast(..., enabled=False) around it, and go on under autocast"
        verdict = Verdict.WARN if part else Verdict.FAIL
        where = Where("backward" if backward else "update", file=file, line=line)
        yield Finding(slug, verdict, stats.subject, message, where, float(times), 0.0, "times", hint)
    if not places:
        text = f"{passes} backward passes and {steps} optimizer steps ran outside autocast"
        nothing = "no backward pass and no optimizer step ran"
        if passes + steps and not stats.regions:
            nothing = "autocast was never on; torch.autocast for a device that is not there does nothing (emulate it)"
        ran = passes + steps if stats.regions else 0
        yield passed(slug, stats.subject, text, ran) if ran else _skip(slug, stats, nothing)


def check_cache(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-cache`: a cached cast is never used after its weight changed, nor under another dtype."""
    slug = "autocast-cache"
    groups: dict[tuple[str, torch.dtype, torch.dtype | None], list[StaleCast]] = defaultdict(list)
    for stale in stats.stale:
        groups[stale.changed_by, stale.cast, stale.wanted].append(stale)
    for (changed_by, cast, wanted), found in groups.items():
        first = found[0]
        weights = f"the {short(cast)} cast of a weight {list(first.shape)}"
        if len(found) > 1:
            weights += f" (and {len(found) - 1} other uses)"
        if wanted is None:
            message = (
                "a weight must not change while autocast keeps its cast, but "
                f"{weights} was used after the weight was changed by {changed_by}: the old values were used"
            )
            hint = "change weights outside the region, or call torch.clear_autocast_cache() after the change"
        else:
            message = (
                f"one region must use one dtype, but {weights} was used where autocast asks for {short(wanted)}: "
                "the cache does not look at the dtype"
            )
            hint = "leave the outer region before the dtype changes, or pass cache_enabled=False to one of them"
        where = Where("forward", file=first.file, line=first.line)
        yield Finding(slug, Verdict.FAIL, stats.subject, message, where, float(len(found)), 0.0, "uses", hint)
    if not groups:
        seen = stats.counts.get("cached casts", 0)
        text = f"{seen} casts of weights were kept and none was used after its weight changed"
        yield (
            passed(slug, stats.subject, text, seen) if seen else _skip(slug, stats, "autocast kept no cast of a weight")
        )


def check_bypass(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-bypass`: no in-place or out= variant where autocast would have cast for the plain op."""
    slug = "autocast-bypass"
    found = False
    for call, count in _calls(stats, "bypass"):
        rule = rule_for(stats.policies.get(call.policy), call.rule_of)
        wanted = wanted_dtype(call, rule)
        if wanted is None or (not call.raised and call.result is wanted):
            continue
        found = True
        does = f"{call.op} does not go through autocast ({_given(call)}); {call.rule_of} would have computed in "
        message = f"under autocast to {short(call.state.dtype)} an op follows its rule, but {does}{short(wanted)}"
        wide = call.result is torch.float32
        if call.raised:
            verdict, message = (Verdict.WARN if call.caught else Verdict.FAIL), f"{message}. It raised: {call.raised}"
        elif wide:
            verdict, message = Verdict.WARN, f"{message}. It ran in float32: nothing is unsafe, speed is lost"
        else:
            verdict, message = Verdict.FAIL, f"{message}. It wrote {short(call.result)}"
        hint = f"call {call.rule_of.removeprefix('aten::').partition('.')[0]} and assign its result"
        yield Finding(slug, verdict, stats.subject, message, _where(call), float(count), 0.0, "calls", hint)
    if not found:
        yield _looked(slug, stats, "autocast ops", "no op ran under autocast")


def check_thread(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-thread`: a thread computes in the dtype of the thread that started it, unless it chose another."""
    slug = "autocast-thread"
    hits = list(_changed(stats, "thread"))
    if hits:
        call, wanted = hits[0]
        now = call.now.dtype if call.now is not None else None
        lost = "with autocast off" if now is None else f"with autocast to {short(now)}, the default"
        others = f" (and {len(hits) - 1} other places)" if len(hits) > 1 else ""
        message = (
            f"a thread must compute as the one that started it, but {call.op} ran on {_given(call)} {lost}{others}; "
            f"autocast to {short(call.state.dtype)} was on where the thread was started, under which it computes in "
            f"{short(wanted)}. The state of autocast belongs to one thread"
        )
        hint = f"enter torch.autocast({call.state.device!r}, dtype={call.state.dtype}) inside the thread's function"
        yield Finding(slug, Verdict.FAIL, stats.subject, message, _where(call), float(len(hits)), 0.0, "places", hint)
    else:
        yield _looked(slug, stats, "thread ops", "no thread that was started under autocast ran an op")


def check_checkpoint(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-checkpoint`: a forward that backward computes again runs under the same state.

    Backward computes a forward again under PyTorch's checkpoint, and where the backward of a Function enables gradients
    or enters a module of the forward; in a hook, where two places of the forward run again in its order.
    """
    slug = "autocast-checkpoint"
    if stats.recomputed:
        found: list[Recompute] = list(stats.recomputed)
        first = min(found, key=lambda op: not rule_for(stats.policies.get(op.forward.device), op.op))
        others = f" (and {len(found) - 1} other ops)" if len(found) > 1 else ""
        forward, backward = f"autocast {first.forward}", f"autocast {first.backward}"
        if first.op:
            forward = f"{_dtypes(first.forward_dtypes)} with {forward}"
            backward = f"{_dtypes(first.backward_dtypes)} with {backward}"
        message = (
            f"a forward that backward computes again must run as before, but {first.op or 'it'}{others} ran on "
            f"{forward} in forward and on {backward} in the recomputation"
        )
        hint = (
            "use torch.utils.checkpoint, which restores autocast, or keep the state in forward and enter "
            "torch.autocast with it around the recomputation; a flag that chooses the dtype must not change in between"
        )
        where = Where("backward", op=first.op, file=first.file, line=first.line)
        yield Finding(slug, Verdict.FAIL, stats.subject, message, where, float(len(found)), 0.0, "ops", hint)
    else:
        yield _looked(slug, stats, "recomputed ops", "backward computed no forward again")


def check_function(stats: GuardStats) -> Iterator[Finding]:
    """`autocast-function`: the Python backward of a Function runs under the state of its forward."""
    slug = "autocast-function"
    found = sorted(_changed(stats, "function"), key=lambda hit: _wide(hit[0]))
    hits = [(call, wanted) for call, wanted in found if not (call.cast and _wide(call))]
    for call, wanted in hits[:_LIST]:
        message = (
            f"the backward of an autograd.Function must run under the autocast of its forward, but {call.op} ran on "
            f"{_given(call)} with autocast off; forward ran with {call.state}, under which the op computes in "
            f"{short(wanted)}"
        )
        if _wide(call):
            message += ". In float32 nothing is unsafe, speed is lost"
        if len(hits) > _LIST and call is hits[_LIST - 1][0]:
            message += f" (and {len(hits) - _LIST} more such ops)"
        hint = (
            f"decorate forward with torch.amp.custom_fwd(device_type={call.state.device!r}) and backward with "
            f"torch.amp.custom_bwd(device_type={call.state.device!r})"
        )
        where = Where("backward", op=call.op, file=call.file, line=call.line)
        verdict = Verdict.WARN if _wide(call) else Verdict.FAIL
        yield Finding(slug, verdict, stats.subject, message, where, hint=hint)
    if not hits:
        nothing = "no autograd.Function whose forward ran under autocast had its Python backward run"
        yield _looked(slug, stats, "Function ops", nothing)


def check_unregistered(stats: GuardStats) -> Iterator[Finding]:
    """`policy-unregistered`: no op raises on mixed dtypes because autocast has no rule for it."""
    slug = "policy-unregistered"
    found = False
    for call, count in (*_calls(stats, "mixed"), *_calls(stats, "bypass")):
        policy = stats.policies.get(call.policy)
        if not call.raised or policy is None or rule_for(policy, call.rule_of):
            continue
        found = True
        message = (
            f"under autocast an op is given one dtype, but autocast has no rule for {call.op} on "
            f"{call.state.device}: it was given {_given(call)} and raised: {call.raised}. With all inputs in "
            f"{short(call.runs_in)} it runs"
        )
        hint = f"cast its inputs to {short(call.runs_in)} at the call"
        if call.rule_of != call.op:
            hint = "cast what is written to the dtype of the tensor that it is written into"
        elif not call.op.startswith("aten::"):
            hint += ", or give the op a rule with torch.library.register_autocast"
        verdict = Verdict.WARN if call.caught else Verdict.FAIL
        yield Finding(slug, verdict, stats.subject, message, _where(call), float(count), 0.0, "calls", hint)
    if not found:
        yield _looked(slug, stats, "autocast ops", "no op ran under autocast")


def check_banned(stats: GuardStats) -> Iterator[Finding]:
    """`policy-banned`: no op is called that autocast refuses to run. What the block catches is not seen."""
    slug = "policy-banned"
    raised = stats.raised
    message = raised.message.strip() if raised is not None else ""
    hits: dict[str, list[str]] = defaultdict(list)
    for name, policy in stats.policies.items():
        for op in banned_by(policy, message):
            hits[op].append(name)
    for op, names in hits.items():
        told = [line.strip() for line in message.splitlines() if line.strip()]
        where = Where("forward", op=op, file=raised.file if raised else "", line=raised.line if raised else None)
        text = (
            f"an op that autocast bans must not run under it, but {op}, which {' and '.join(names)} bans, was called: "
            f"{told[0]}"
        )
        yield Finding(slug, Verdict.FAIL, stats.subject, text, where, hint=" ".join(told[1:]))
    if not hits:
        seen = stats.counts.get("autocast ops", 0)
        text = f"{seen} autocast ops ran and no ban ended the block; a ban that the block catches is not seen"
        yield passed(slug, stats.subject, text, seen) if seen else _skip(slug, stats, "no op ran under autocast")


def banned_by(policy: Policy, message: str) -> list[str]:
    """The ops that a policy bans with this message, which is all that is seen of them: autocast raises first."""
    bans = ((op, facts.raises.strip() or f"{op} is unsafe to autocast") for op, facts in policy.ops.items())
    return [op for op, text in bans if policy.rule(op) == BANNED and message.startswith(text)]


CHECKS: Mapping[str, Callable[[GuardStats], Iterator[Finding]]] = MappingProxyType(
    {
        "autocast-state": check_state,
        "autocast-scope": check_scope,
        "autocast-cache": check_cache,
        "autocast-bypass": check_bypass,
        "autocast-thread": check_thread,
        "autocast-checkpoint": check_checkpoint,
        "autocast-function": check_function,
        "policy-unregistered": check_unregistered,
        "policy-banned": check_banned,
    }
)


def check_guard(stats: GuardStats, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks, all by default: failures, warnings, or one pass or skip for each check."""
    return [f for slug, check in CHECKS.items() if checks is None or slug in checks for f in check(stats)]


def _calls(stats: GuardStats, how: str) -> list[tuple[Call, int]]:
    return [(call, count) for call, count in stats.calls.items() if call.how == how]


def _changed(stats: GuardStats, how: str) -> Iterator[tuple[Call, torch.dtype]]:
    """The calls whose dtypes autocast would have changed, and what to."""
    for call, _ in _calls(stats, how):
        wanted = wanted_dtype(call, rule_for(stats.policies.get(call.policy), call.rule_of))
        if wanted is not None:
            yield call, wanted


def _whole_steps(stats: GuardStats) -> int:
    """The largest number of optimizer steps that ran inside one region together with backward passes."""
    steps: dict[int, int] = defaultdict(int)
    passes: dict[int, int] = defaultdict(int)
    for crossing, count in stats.crossings.items():
        (steps if crossing.what == "optimizer steps" else passes)[crossing.region] += count
    return max((min(count, passes[region]) for region, count in steps.items()), default=0)


def _state_hint(stats: GuardStats) -> str:
    if any(name.startswith("autocast") for name in stats.changed):
        return (
            "enter torch.autocast with a `with` statement; an exception inside a region of a torch.compile'd function "
            "leaves the region open"
        )
    return "put the switch back in a finally block or a fixture"


def _wide(call: Call) -> bool:
    """Whether the op had all of its inputs in float32, which loses speed and no digits."""
    return set(call.given) == {torch.float32}


def _where(call: Call) -> Where:
    return Where("forward", op=call.op, file=call.file, line=call.line)


def _given(call: Call) -> str:
    return _dtypes(call.given)


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return " and ".join(dict.fromkeys(map(short, dtypes))) or "no float"


def _plain(value: object) -> str:
    return short(value) if isinstance(value, torch.dtype) else str(value)


def _times(count: int) -> str:
    return "one" if count == 1 else f"{count}"


def _looked(slug: str, stats: GuardStats, what: str, nothing: str) -> Finding:
    seen = stats.counts.get(what, 0)
    return passed(slug, stats.subject, f"{seen} {what} were looked at", seen) if seen else _skip(slug, stats, nothing)


def _skip(slug: str, stats: GuardStats, message: str) -> Finding:
    return Finding(slug, Verdict.SKIP, stats.subject, f"nothing was looked at: {message}")
