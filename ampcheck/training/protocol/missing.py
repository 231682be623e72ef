"""Do float16 losses run backward without a GradScaler? Pure: judged from events."""

from __future__ import annotations

from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.training.protocol.events import Act
from ampcheck.training.protocol.stats import ProtocolStats

_USES = (Act.SCALE, Act.UNSCALE, Act.SCALER_STEP, Act.UPDATE)


def check_missing_scaler(stats: ProtocolStats, limits: Limits) -> list[Finding]:
    """`scaler-protocol`: float16 gradients need a loss scale. Fails where they vanish without it, and warns elsewhere.

    They are float16 under autocast to float16, with float16 parameters, and where a measured gradient flows in float16.
    A loop that never calls `scaler.scale` but uses the scaler otherwise scales its losses by hand: it is not judged if
    no gradient vanished.
    """
    passes = [event for event in stats.events if event.act is Act.BACKWARD]
    autocast = [event for event in passes if "float16" in event.low]
    uses = {event.act for event in stats.events if event.enabled and event.act in _USES}
    narrow = autocast or (passes if stats.format == "float16" or _steps_float16(stats) else [])
    if not narrow or Act.SCALE in uses or (uses and (stats.lost == 0.0 or not autocast)):
        return []
    lost = bool(stats.damage) or (stats.lost is not None and stats.lost > limits.underflow)
    what = "float16 autocast needs a GradScaler" if autocast else "gradients in float16 need a loss scale"
    share = ""
    if stats.lost is not None:
        share = (
            f": up to {100 * stats.lost:.3g}% of a tensor's gradient became zero"
            if stats.lost
            else (": no gradient vanished in the measured step, but later ones may")
        )
    idle = ""
    if stats.scalers and not uses:
        idle = f"; {', '.join(stats.scalers)} is enabled, and no step of {stats.steps} uses it"
    message = (
        f"{what}; {len(narrow)} backward passes ran on losses that no GradScaler scaled{share}{stats.damage}{idle}"
    )
    hint = "use torch.amp.GradScaler (scale, step, update), or autocast to bfloat16"
    if not autocast:
        hint = (
            "keep the parameters in float32, run forward under torch.autocast and use torch.amp.GradScaler; or use "
            "bfloat16"
        )
    elif idle:
        hint = (
            "write scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update(), or autocast to bfloat16"
        )
    first = narrow[0]
    where = Where("backward", file=first.file, line=first.line, step=first.step)
    verdict = Verdict.FAIL if lost else Verdict.WARN
    unit = "share of the gradient" if stats.lost is not None else ""
    limit = limits.underflow if stats.lost is not None else None
    return [Finding("scaler-protocol", verdict, stats.subject, message, where, stats.lost, limit, unit, hint)]


def _steps_float16(stats: ProtocolStats) -> bool:
    """Whether an optimizer that holds gradients steps parameters of float16."""
    return any(
        event.act is Act.OPTIMIZER_STEP and event.gradients and "float16" in event.half for event in stats.events
    )
