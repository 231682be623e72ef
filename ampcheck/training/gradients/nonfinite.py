"""The op in which a value of a step first becomes infinite or NaN, and how to mend it."""

from __future__ import annotations

from ampcheck.core.run import Where
from ampcheck.numerics.ops import OpWatch
from ampcheck.torchtools.trace import Trace
from ampcheck.training.gradients.underflow import quiet
from ampcheck.training.loop import Snapshot, TrainingLoop

_CASTS = ("aten::_to_copy", "aten::copy_", "prims::convert_element_type")
_OFF = "torch.autocast(device, enabled=False)"


def nonfinite_place(loop: TrainingLoop, start: Snapshot, step: int) -> Where | None:
    """Run steps 0 to `step` again from `start`; return where the last one first makes an infinity or a NaN of finite
    values, None where it does not. All ranks must call it for the same step. Use it inside `loop.preserved()`.
    """
    start.restore()
    watch = OpWatch(shadow=False)
    root = next(iter(loop.reached.modules.values()), None)
    with quiet():
        for number in range(step):
            loop.take(number)
        with Trace(root, observers=(watch,)):
            loop.take(step)
    return next((fact.where for fact in watch.facts() if fact.produced), None)


def mend_nonfinite(place: Where) -> str:
    """The hint for an op that makes infinities or NaNs of finite values, by what sort of op it is and where it runs."""
    here = f"module {place.module}" if place.module else f"{place.file}:{place.line}" if place.file else "that op"
    if place.op.removesuffix(".default") in _CASTS:
        return (
            f"the cast overflows: it is given values beyond the largest of the narrow format (65504 in float16); "
            f"normalise or clamp them before it, or keep {here} in float32 (with {_OFF})"
        )
    if place.module or place.phase == "backward":
        return f"keep {here} in float32 (with {_OFF}, on float32 inputs), or make what {place.op} is given smaller"
    return "compute and sum the loss in float32 (output.float() before it), or take a mean instead of a sum"
