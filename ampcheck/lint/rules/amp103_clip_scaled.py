"""Requires: Gradients are clipped after scaler.unscale_(optimizer): before it they are larger by the loss scale, and
clipping to 1.0 makes each update all but zero.

Measured: A call of torch.nn.utils.clip_grad_norm_ or clip_grad_value_, or of such a method of a model (FSDP), between
scaler.scale(loss).backward() and scaler.step(optimizer) of one function, without a call of unscale_ before it.

Causes: A scaler that was added to a loop that clips.

Fix: scaler.unscale_(optimizer) before the gradients are clipped.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.names import scaled_passes, steps_of_scalers
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Source

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")


def _read(source: Source) -> Iterator[Report]:
    for scope in source.scopes:
        passes, steps = list(scaled_passes(scope)), list(steps_of_scalers(scope))
        unscaled = [call for call in scope.calls if "unscale" in call.method]  # helpers such as _unscale_gradients too
        for clip in filter(source.is_torchs, scope.of(*_CLIPS)):
            before = any(one.order < clip.order and not one.excludes(clip) for one in passes)
            after = any(one.order > clip.order and not one.excludes(clip) for one in steps)
            if before and after and not any(one.order < clip.order for one in unscaled):
                yield Report(clip.line, f"{clip.method} clips gradients that are larger by the loss scale")


RULE = Rule(
    Check("AMP103", "lint", __doc__),
    (("clip_grad",), ("scaler", "Scaler"), (".step(",)),
    _read,
    audit="ampcheck audit train.py:main --checks scaler-protocol",
)
