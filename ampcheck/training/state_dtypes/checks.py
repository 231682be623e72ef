"""Checks of the dtypes of the tensors that live across steps. Pure functions from `StateDtypeStats` to findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ampcheck.catalog.numerics import LOSS_DTYPE
from ampcheck.catalog.training import BUFFER_DTYPE, MASTER_WEIGHTS, OPTIMIZER_STATE
from ampcheck.core.check import Check, Evidence
from ampcheck.core.formats import format_of
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import listed
from ampcheck.training.loop import Role
from ampcheck.training.state_dtypes.measure import DtypePolicy, StateDtypeStats, StateTensor
from ampcheck.training.state_dtypes.moments import VanishedState, excess_of

_LISTED = 3

_EXCESS = 0.5
"""The norm by which updates may be too large where state vanished, relative to that of all exact updates."""

_NOUNS: Mapping[str, str] = MappingProxyType(
    {
        "parameter": "parameters",
        "gradient": "gradients",
        "state": "optimizer state",
        "buffer": "buffers",
        "copy": "copies of weights",
    }
)
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "parameter": "keep the weights in float32 and let autocast cast them (no model.half() or model.bfloat16())",
        "gradient": (
            "a gradient has the dtype of its parameter: keep the parameters in float32, or cast before it is summed"
        ),
        "state": "create the optimizer on float32 parameters: its state takes their dtype",
        "buffer": "keep buffers in float32 when the model is cast: buffer.float() after model.to(dtype)",
        "copy": "keep copies that follow the weights (an EMA) in float32: their updates are far below a 16-bit spacing",
    }
)

_BACKWARD = Where("backward")


def check_state_dtypes(
    stats: StateDtypeStats,
    loss_dtypes: tuple[str, ...] = (),
    computed: tuple[str, ...] = (),
    where: Where = _BACKWARD,
) -> list[Finding]:
    """The findings of `master-weights`, `optimizer-state`, `buffer-dtype` and `loss-dtype`.

    loss_dtypes: of the loss of each backward pass, as names. computed: the 16-bit dtypes in which these losses or parts
    of them were computed, whatever they were cast to before backward. where: a pass of such a loss.

    Without a declared policy float16 weights fail under an enabled GradScaler, which needs float32 weights; other
    16-bit tensors are reported and not judged, except for a loss of 16 bits, which warns.
    """
    return [
        *_master_weights(stats),
        *_optimizer_state(stats),
        *_buffers(stats),
        _loss(stats, loss_dtypes, computed, where),
    ]


def _master_weights(stats: StateDtypeStats) -> list[Finding]:
    if untied := [tensor for tensor in stats.tensors if tensor.twin]:
        others = _judged_weights(stats)
        return [_untied(stats, untied), *(finding for finding in others if finding.verdict is Verdict.FAIL)]
    return _judged_weights(stats)


def _judged_weights(stats: StateDtypeStats) -> list[Finding]:
    weights = [tensor for tensor in _of(stats, Role.PARAMETER) if tensor.trained]
    if not weights:
        return [MASTER_WEIGHTS.absent(stats.subject, "no optimizer steps a floating-point parameter here")]
    policy = stats.policy
    if policy is None:
        return [_undeclared_weights(stats, weights)]
    gradients = _of(stats, Role.GRADIENT)
    findings = [
        *_misfits(stats, policy, MASTER_WEIGHTS, "parameter", weights),
        *_misfits(stats, policy, MASTER_WEIGHTS, "gradient", gradients),
        *(_without_master(stats, policy) if policy.masters and stats.after_step else ()),
    ]
    text = f"all {len(weights)} parameters and {len(gradients)} gradients have the dtypes of {policy}"
    tensors = [*weights, *gradients]
    return findings or [MASTER_WEIGHTS.passed(stats.subject, f"{text}: {_count(tensors)}", len(tensors))]


def _undeclared_weights(stats: StateDtypeStats, weights: list[StateTensor]) -> Finding:
    low = [tensor for tensor in weights if tensor.low and not tensor.master]
    if not low:
        dtypes = "kept in float32 by an optimizer" if any(tensor.low for tensor in weights) else "float32 or wider"
        return MASTER_WEIGHTS.passed(stats.subject, f"all {len(weights)} trained parameters are {dtypes}", len(weights))
    half = [tensor for tensor in low if tensor.dtype == "float16"]
    if stats.scaled and half:
        message = (
            "a GradScaler unscales gradients of float32 parameters only, and updates need float32 weights; "
            f"{_listed(half, len(weights), 'trained parameters')}"
        )
        hint = "remove model.half(): keep the parameters in float32 and run forward under torch.autocast"
        return MASTER_WEIGHTS.fail(stats.subject, message, **_evidence(half, hint, "half"))
    text = (
        f"no policy is declared to judge this by; {_listed(low, len(weights), 'trained parameters')}. Declare "
        "policy='pure-bf16' (or 'amp', 'master-weights-fp32') in the mapping"
    )
    return MASTER_WEIGHTS.skip(stats.subject, text)


def _untied(stats: StateDtypeStats, untied: list[StateTensor]) -> Finding:
    dtypes = {tensor.name: tensor.dtype for tensor in stats.tensors}
    first = untied[0]
    message = (
        f"a weight that collects gradients must be stepped, but the steps change {first.twin} ({dtypes[first.twin]}) "
        f"alone, and not {first.name} ({first.dtype}), which began with its values"
    )
    hint = (
        "a cast made it a parameter of its own: cast in forward (weight.float()), or cast the whole model, tie the "
        "weights after that, and give the optimizer the parameters that the model has then"
    )
    return MASTER_WEIGHTS.fail(stats.subject, message, **_evidence(untied, hint))


def _without_master(stats: StateDtypeStats, policy: DtypePolicy) -> list[Finding]:
    """Weights of 16 bits that are trained: the optimizer's own, and those of a module that steps change."""
    weights = [*_of(stats, Role.PARAMETER, Role.COPY)]
    low = [tensor for tensor in weights if tensor.low and tensor.trained and tensor.changed is not False]
    bare = [tensor for tensor in low if not tensor.master and not policy.excepts(tensor.name, tensor.dtype)]
    if not bare:
        return []
    message = (
        "each weight of 16 bits must be the rounded value of a float32 tensor that an optimizer steps or keeps; "
        f"{_listed(bare, len(low), 'such weights', 'have no such tensor')}"
    )
    hint = "step float32 copies of the parameters, and copy them into the 16-bit weights after each step"
    return [MASTER_WEIGHTS.fail(stats.subject, message, **_evidence(bare, hint))]


def _optimizer_state(stats: StateDtypeStats) -> list[Finding]:
    states = _of(stats, Role.STATE)
    if not states:
        why = "the optimizers keep no floating-point state" if stats.after_step else "no step has made any state yet"
        return [OPTIMIZER_STATE.absent(stats.subject, why)]
    vanished = stats.vanished
    if excess_of(vanished) <= _EXCESS:
        return _judged(stats, OPTIMIZER_STATE, "state", states)
    misfits = _judged(stats, OPTIMIZER_STATE, "state", states) if stats.policy is not None else []
    return [_vanished(stats, vanished), *(finding for finding in misfits if finding.verdict is not Verdict.PASS)]


def _vanished(stats: StateDtypeStats, vanished: Sequence[VanishedState]) -> Finding:
    ranked = sorted(vanished, key=lambda state: -state.excess)
    worst = ranked[0]
    names = listed((state.name for state in ranked), _LISTED)
    size = f"up to {worst.largest:.2g} times too large" if math.isfinite(worst.largest) else "infinite or NaN"
    becomes = "become " if worst.foreseen else "were "
    message = (
        f"optimizer state that an update is divided by must not become zero, but of {names} in {worst.dtype} "
        f"{100 * worst.zero / worst.elements:.3g} % of the elements did in step {worst.step}, and are not zero in "
        f"float64: their updates {becomes}{size}"
    )
    hint = (
        f"keep the state in float32: let the optimizer step float32 parameters. {worst.dtype} holds nothing below "
        f"{format_of(worst.dtype).smallest_subnormal:.2g}, and a mean of squared gradients is soon smaller; bfloat16 "
        "keeps the range, though few digits"
    )
    where = Where("update", module=worst.name, step=worst.step)
    share = worst.zero / worst.elements
    return OPTIMIZER_STATE.fail(stats.subject, message, where=where, observed=share, limit=0.0, unit="share", hint=hint)


def _buffers(stats: StateDtypeStats) -> list[Finding]:
    buffers = _of(stats, Role.BUFFER)
    copies = [tensor for tensor in _of(stats, Role.COPY) if tensor.changed is not False]
    if not buffers and not copies:
        return [BUFFER_DTYPE.absent(stats.subject, "there is no floating-point buffer and no changing copy")]
    if stats.policy is not None and stats.policy.masters:
        copies = [tensor for tensor in copies if not tensor.trained]  # the others are the 16-bit weights of this policy
    return [*_judged(stats, BUFFER_DTYPE, "buffer", buffers), *_judged(stats, BUFFER_DTYPE, "copy", copies)]


def _judged(stats: StateDtypeStats, check: Check, role: str, tensors: list[StateTensor]) -> list[Finding]:
    if not tensors:
        return []
    noun = _counted(role)
    if stats.policy is not None:
        text = f"all {len(tensors)} {noun} have the dtypes of {stats.policy}: {_count(tensors)}"
        misfits = _misfits(stats, stats.policy, check, role, tensors)
        return misfits or [check.passed(stats.subject, text, len(tensors))]
    low = [tensor for tensor in tensors if tensor.low]
    if not low:
        return [check.passed(stats.subject, f"all {len(tensors)} {noun} are float32 or wider", len(tensors))]
    text = f"no policy is declared to judge the dtype by; {_listed(low, len(tensors), noun)}. See stagnation for what "
    return [check.skip(stats.subject, f"{text}they lose, now and later")]


def _misfits(
    stats: StateDtypeStats, policy: DtypePolicy, check: Check, role: str, tensors: list[StateTensor]
) -> list[Finding]:
    """The tensors whose dtype the policy does not allow. A copy that may not change in a step only warns."""
    bad = [tensor for tensor in tensors if not _fits(policy, role, tensor)]
    if not bad:
        return []
    sure = [tensor for tensor in bad if role != "copy" or tensor.changed]
    bad = sure or bad
    allowed = " or ".join(policy.allowed(role, bad[0].name))
    message = f"{policy} allows {allowed} for {_NOUNS[role]}; {_listed(bad, len(tensors), _counted(role))}"
    verdict = Verdict.FAIL if sure else Verdict.WARN
    return [check.finding(verdict, stats.subject, message, **_evidence(bad, _HINTS[role]))]


def _fits(policy: DtypePolicy, role: str, tensor: StateTensor) -> bool:
    allowed = policy.allowed(role, tensor.name)
    counter = role == "state" and tensor.elements <= 1 and not tensor.low
    return not allowed or tensor.dtype in allowed or counter


def _loss(stats: StateDtypeStats, dtypes: tuple[str, ...], computed: tuple[str, ...], where: Where) -> Finding:
    seen = tuple(dict.fromkeys(dtypes))
    if not seen:
        return LOSS_DTYPE.absent(stats.subject, "no backward pass from a loss was seen")
    declared = stats.policy.allowed("loss", "loss") if stats.policy is not None else ()
    allowed = declared or ("float32", "float64")
    bad = [dtype for dtype in seen if dtype not in allowed]
    narrow = [dtype for dtype in computed if dtype not in allowed]
    if not bad and not narrow:
        text = f"backward starts from a loss in {', '.join(seen)}, and no reduction of it was computed in 16 bits"
        return LOSS_DTYPE.passed(stats.subject, text, len(dtypes))
    required = f"{' or '.join(declared)}, by {stats.policy}" if declared else "float32"
    message = (
        f"backward must start from a loss in {required}; it starts from one in {', '.join(bad)}"
        if bad
        else f"a loss must be computed in {required}; backward starts from one in {', '.join(seen)}, but it or a part "
        f"of it was computed in {', '.join(narrow)} and cast afterwards, which brings no digit back"
    )
    hint = "compute the loss in float32 (logits.float() before it, or the loss under autocast)"
    verdict = Verdict.FAIL if declared and bad else Verdict.WARN
    return LOSS_DTYPE.finding(verdict, stats.subject, message, where=where, hint=hint)


def _of(stats: StateDtypeStats, *roles: Role) -> list[StateTensor]:
    return [tensor for tensor in stats.tensors if tensor.floating and tensor.role in roles]


def _counted(role: str) -> str:
    return "tensors of optimizer state" if role == "state" else _NOUNS[role]


def _listed(bad: list[StateTensor], whole: int, noun: str, what: str = "") -> str:
    names = listed((f"{tensor.name} ({tensor.dtype})" for tensor in bad), _LISTED)
    verb = what or f"{'is' if len(bad) == 1 else 'are'} {' or '.join(dict.fromkeys(tensor.dtype for tensor in bad))}"
    return f"{len(bad)} of {whole} {noun} {verb}: {names}"


def _count(tensors: Sequence[StateTensor]) -> str:
    return ", ".join(f"{number} {dtype}" for dtype, number in Counter(tensor.dtype for tensor in tensors).items())


def _evidence(bad: Sequence[StateTensor], hint: str, kind: str = "") -> Evidence:
    where = Where("update", module=bad[0].name)
    return Evidence(where=where, observed=len(bad), limit=0.0, unit="tensors", hint=hint, kind=kind)
