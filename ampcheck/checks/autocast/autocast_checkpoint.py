"""Requires: Recomputed forwards (activation checkpointing) run under the autocast state of the original forward.

Measured: Ops of Python code that the autograd engine calls are matched to the forward by op and source line, or by the
module of PyTorch that ran them. Fails where both the state and the dtypes of the inputs differ, and where
torch.utils.checkpoint refused the recomputation after the state had changed.

Causes: A checkpoint written by hand that does not restore autocast; a flag that chooses the dtype and changes before
backward.

Fix: Use torch.utils.checkpoint, or keep the state in forward and enter torch.autocast with it in backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.autocast import clean, names
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import Kind
from ampcheck.records.autocast import GuardStats

CHECK = Check(
    "autocast-checkpoint",
    "autocast",
    __doc__,
    unit="ops",
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("GuardStats",),
    order=309,
    evidence=("docs/examples/checks/autocast-checkpoint",),
)


def check(stats: GuardStats, limits: Limits) -> Iterator[Finding]:
    """A forward that backward computes again runs under the same state.

    Backward computes a forward again under PyTorch's checkpoint, and where the backward of a Function enables gradients
    or enters a module of the forward; what a hook calls is none.
    """
    ops = list(stats.recomputed)
    if not ops:
        yield clean(CHECK, stats, "recomputed ops", "backward computed no forward again")
        return
    first = ops[0]
    others = f" (and {len(ops) - 1} other ops)" if len(ops) > 1 else ""
    forward, backward = f"autocast {first.forward}", f"autocast {first.backward}"
    if first.op:
        forward = f"{names(first.forward_dtypes)} with {forward}"
        backward = f"{names(first.backward_dtypes)} with {backward}"
    message = (
        f"a forward that backward computes again must run as before, but {first.op or 'it'}{others} ran on "
        f"{forward} in forward and on {backward} in the recomputation"
    )
    evidence = Evidence(where=first.where, observed=len(ops), limit=0, hint=CHECK.fix)
    yield CHECK.fail(stats.subject, message, **evidence)
