"""Requires: Buffers of trained modules, and copies of weights that the steps change (an EMA), have the dtypes that the
declared policy allows. A frozen copy (a teacher, the base under adapters) may have any dtype.

Measured: Buffers and copies are listed before and after steps; a copy counts as changed when its bits or PyTorch's
count of writes changed. Integers and booleans are always allowed.

Causes: A call of model.bfloat16() casts floating-point buffers too: tables of positions, running statistics, counters;
an EMA made by deepcopy of a cast model.

Fix: Cast buffers and copies back with .float(), make counters integers, keep the EMA in float32.
"""

from __future__ import annotations

from ampcheck.checks.dtype import judged, of_roles
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import Kind
from ampcheck.records.state import Role, StateDtypeStats

CHECK = Check(
    "buffer-dtype", "dtype", __doc__, subjects=(Kind.TRAINING, Kind.CALL), needs=("StateDtypeStats",), order=240
)


def check(stats: StateDtypeStats, limits: Limits) -> list[Finding]:
    """Buffers and copies that change have the dtypes of the policy."""
    buffers = of_roles(stats, Role.BUFFER)
    copies = [tensor for tensor in of_roles(stats, Role.COPY) if tensor.changed is not False]
    if not buffers and not copies:
        return [CHECK.absent(stats.subject, "there is no floating-point buffer and no changing copy")]
    if stats.policy is not None and stats.policy.masters:
        copies = [tensor for tensor in copies if not tensor.trained]  # the others are the 16-bit weights of this policy
    return [*judged(stats, CHECK, "buffer", buffers), *judged(stats, CHECK, "copy", copies)]
