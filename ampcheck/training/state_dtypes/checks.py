"""What the dtypes of the tensors that live across steps say. Pure functions from `ResidencyStats` to findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

from ampcheck.core.run import Finding, Verdict, Where, passed
from ampcheck.training.loop import Role
from ampcheck.training.state_dtypes.measure import ResidencyStats, ResidentStats
from ampcheck.training.state_dtypes.policies import ResidencyPolicy

CHECKS = ("master-weights", "optimizer-state", "buffer-dtype", "loss-dtype")

_LISTED = 3
_NOUNS: Mapping[str, str] = MappingProxyType(
    {
        "parameter": "parameters",
        "gradient": "gradients",
        "state": "optimizer state",
        "buffer": "buffers",
        "copy": "copies of weights",
    }
)


def check_residency(
    stats: ResidencyStats, loss_dtypes: tuple[str, ...] = (), computed: tuple[str, ...] = ()
) -> list[Finding]:
    """The findings of `CHECKS`. loss_dtypes: of the loss of each backward pass, as names. computed: the 16-bit dtypes
    in which these losses or parts of them were computed, whatever they were cast to before backward.

    Without a declared policy an enabled scaler asks for float32 weights, as GradScaler does; all else is told, not
    judged, except for a loss of 16 bits, which is warned of.
    """
    policy = stats.policy
    return [
        *_master_weights(stats, policy),
        *_state(stats, policy),
        *_buffers(stats, policy),
        *_loss(stats, policy, loss_dtypes, computed),
    ]


def _master_weights(stats: ResidencyStats, policy: ResidencyPolicy | None) -> list[Finding]:
    check = "master-weights"
    weights = [one for one in stats.residents if _is_weight(one)]
    if not weights:
        return [Finding(check, Verdict.SKIP, stats.subject, "no optimizer steps a floating-point parameter here")]
    gradients = [one for one in stats.residents if one.role is Role.GRADIENT and one.floating]
    if policy is None:
        return _weights_undeclared(stats, weights)
    bad = [one for one in weights if not _fits(policy, "parameter", one)]
    wrong = [one for one in gradients if not _fits(policy, "gradient", one)]
    found = []
    if bad:
        message = f"{_required(policy, 'parameter', bad[0])}; {_told(bad, len(weights), 'parameters')}"
        hint = "keep the weights in float32 and let autocast cast them (no model.half() or model.bfloat16())"
        found.append(_finding(stats, check, bad, message, hint))
    if wrong:
        message = f"{_required(policy, 'gradient', wrong[0])}; {_told(wrong, len(gradients), 'gradients')}"
        hint = "a gradient has the dtype of its parameter: keep the parameters in float32, or cast before it is summed"
        found.append(_finding(stats, check, wrong, message, hint))
    if policy.masters:
        found += _without_master(stats, check, policy)
    text = f"all {len(weights)} parameters and {len(gradients)} gradients have the dtypes of {_called(policy)}"
    looked = [*weights, *gradients]
    return found or [passed(check, stats.subject, f"{text}: {_census(looked)}", len(looked))]


def _is_weight(one: ResidentStats) -> bool:
    return one.role is Role.PARAMETER and one.floating and one.trained


def _weights_undeclared(stats: ResidencyStats, weights: list[ResidentStats]) -> list[Finding]:
    check = "master-weights"
    low = [one for one in weights if one.low and not one.master]
    if not low:
        held = "float32 or wider" if not any(one.low for one in weights) else "kept in float32 by an optimizer"
        text = f"all {len(weights)} trained parameters are {held}"
        return [passed(check, stats.subject, text, len(weights))]
    half = [one for one in low if one.dtype == "float16"]
    if stats.scaled and half:
        message = (
            "a GradScaler unscales gradients of float32 parameters only, and updates need float32 weights; "
            f"{_told(half, len(weights), 'trained parameters')}"
        )
        hint = "remove model.half(): keep the parameters in float32 and run forward under torch.autocast"
        return [_finding(stats, check, half, message, hint)]
    text = (
        f"no policy is declared to judge this by; {_told(low, len(weights), 'trained parameters')}. Declare "
        "policy='pure-bf16' (or 'amp', 'master-weights-fp32') in the mapping"
    )
    return [Finding(check, Verdict.SKIP, stats.subject, text)]


def _without_master(stats: ResidencyStats, check: str, policy: ResidencyPolicy) -> list[Finding]:
    """Weights of 16 bits that are trained: the optimizer's own, and those of a module that steps change."""
    if not stats.after_step:
        return []
    low = [
        one
        for one in stats.residents
        if one.low and one.trained and one.role in (Role.PARAMETER, Role.COPY) and one.changed is not False
    ]
    bare = [one for one in low if not one.master and not policy.excepts(one.name, one.dtype)]
    if not bare:
        return []
    message = (
        "each weight of 16 bits must be the rounded value of a float32 tensor that an optimizer steps or keeps; "
        f"{_told(bare, len(low), 'such weights', 'have no such tensor')}"
    )
    hint = "step float32 copies of the parameters, and copy them into the 16-bit weights after each step"
    return [_finding(stats, check, bare, message, hint)]


def _state(stats: ResidencyStats, policy: ResidencyPolicy | None) -> list[Finding]:
    check = "optimizer-state"
    states = [one for one in stats.residents if one.role is Role.STATE and one.floating]
    if not states:
        why = "the optimizers keep no floating-point state" if stats.after_step else "no step has made any state yet"
        return [Finding(check, Verdict.SKIP, stats.subject, why)]
    hint = "create the optimizer on float32 parameters: its state takes their dtype"
    return _judged(stats, policy, check, "state", states, "tensors of optimizer state", hint)


def _buffers(stats: ResidencyStats, policy: ResidencyPolicy | None) -> list[Finding]:
    check = "buffer-dtype"
    held = [one for one in stats.residents if one.floating and one.role is Role.BUFFER]
    copies = [one for one in stats.residents if one.floating and one.role is Role.COPY and one.changed is not False]
    if not held and not copies:
        return [Finding(check, Verdict.SKIP, stats.subject, "there is no floating-point buffer and no changing copy")]
    found = []
    if held:
        hint = "keep buffers in float32 when the model is cast: buffer.float() after model.to(dtype)"
        found += _judged(stats, policy, check, "buffer", held, "buffers", hint)
    if policy is not None and policy.masters:
        copies = [one for one in copies if not one.trained]  # the 16-bit weights of this policy stand there
    if copies:
        hint = "keep copies that follow the weights (an EMA) in float32: their updates are far below a 16-bit spacing"
        found += _judged(stats, policy, check, "copy", copies, "copies of weights", hint)
    return found


def _judged(
    stats: ResidencyStats,
    policy: ResidencyPolicy | None,
    check: str,
    role: str,
    residents: list[ResidentStats],
    noun: str,
    hint: str,
) -> list[Finding]:
    if policy is None:
        low = [one for one in residents if one.low]
        if not low:
            return [passed(check, stats.subject, f"all {len(residents)} {noun} are float32 or wider", len(residents))]
        text = f"no policy is declared to judge this by; {_told(low, len(residents), noun)}"
        return [Finding(check, Verdict.SKIP, stats.subject, text)]
    bad = [one for one in residents if not _fits(policy, role, one)]
    if not bad:
        text = f"all {len(residents)} {noun} have the dtypes of {_called(policy)}: {_census(residents)}"
        return [passed(check, stats.subject, text, len(residents))]
    sure = [one for one in bad if role != "copy" or one.changed]
    message = f"{_required(policy, role, (sure or bad)[0])}; {_told(sure or bad, len(residents), noun)}"
    errors = [one for one in bad if one.error is not None]
    if errors:
        worst = max(errors, key=lambda one: one.error or 0.0)
        message += f"; {worst.name} is off by {worst.error:.2g} of its norm"
    return [_finding(stats, check, sure or bad, message, hint, Verdict.FAIL if sure else Verdict.WARN)]


def _fits(policy: ResidencyPolicy, role: str, one: ResidentStats) -> bool:
    allowed = policy.allowed(role, one.name)
    counter = role == "state" and one.elements <= 1 and not one.low
    return not allowed or one.dtype in allowed or counter


def _loss(
    stats: ResidencyStats, policy: ResidencyPolicy | None, dtypes: tuple[str, ...], computed: tuple[str, ...]
) -> list[Finding]:
    check = "loss-dtype"
    seen = tuple(dict.fromkeys(dtypes))
    if not seen:
        return [Finding(check, Verdict.SKIP, stats.subject, "no backward pass from a loss was seen")]
    allowed = policy.allowed("loss", "loss") if policy is not None else ()
    bad, narrow = (
        [d for d in names if (d not in allowed if allowed else _is_low_name(d))] for names in (seen, computed)
    )
    if not bad and not narrow:
        text = f"backward starts from a loss in {', '.join(seen)}, and no reduction of it was computed in 16 bits"
        return [passed(check, stats.subject, text, len(dtypes))]
    wanted = " or ".join(allowed) if allowed else "float32"
    by = f", by {_called(policy)}" if allowed and policy is not None else ""
    message = f"backward must start from a loss in {wanted}{by}; it starts from one in {', '.join(bad)}"
    if not bad:
        message = (
            f"a loss must be computed in {wanted}{by}; backward starts from one in {', '.join(seen)}, but it or a part "
            f"of it was computed in {', '.join(narrow)} and cast afterwards, which brings no digit back"
        )
    hint = "compute the loss in float32 (logits.float() before it, or the loss under autocast)"
    verdict = Verdict.FAIL if allowed and bad else Verdict.WARN
    return [Finding(check, verdict, stats.subject, message, Where(phase="backward"), hint=hint)]


def _is_low_name(dtype: str) -> bool:
    return dtype not in ("float32", "float64")


def _called(policy: ResidencyPolicy) -> str:
    return f"the policy '{policy.name}'"


def _required(policy: ResidencyPolicy, role: str, one: ResidentStats) -> str:
    return f"{_called(policy)} allows {' or '.join(policy.allowed(role, one.name))} for {_NOUNS[role]}"


def _told(bad: list[ResidentStats], whole: int, noun: str, what: str = "") -> str:
    names = ", ".join(f"{one.name} ({one.dtype})" for one in bad[:_LISTED])
    more = f" and {len(bad) - _LISTED} more" if len(bad) > _LISTED else ""
    verb = what or f"{'is' if len(bad) == 1 else 'are'} {' or '.join(dict.fromkeys(one.dtype for one in bad))}"
    return f"{len(bad)} of {whole} {noun} {verb}: {names}{more}"


def _census(residents: list[ResidentStats]) -> str:
    count: dict[str, int] = defaultdict(int)
    for one in residents:
        count[one.dtype] += 1
    return ", ".join(f"{number} {dtype}" for dtype, number in count.items())


def _finding(
    stats: ResidencyStats,
    check: str,
    bad: list[ResidentStats],
    message: str,
    hint: str,
    verdict: Verdict = Verdict.FAIL,
) -> Finding:
    where = Where(phase="update", module=bad[0].name)
    return Finding(check, verdict, stats.subject, message, where, float(len(bad)), 0.0, "tensors", hint)
