"""What a run left behind. A pure function from `NumericsStats` to findings."""

from __future__ import annotations

from ampcheck.catalog.autocast import AUTOCAST_STATE
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Where
from ampcheck.records.numerics import NumericsStats


def check_state(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """The model leaves autocast, grad mode, the default dtype and device, and the precision switches as they were."""
    if not stats.left:
        return []
    items = [f"{name} was {old} and is {new}" for name, (old, new) in stats.left.items()]
    message = (
        "a model must leave autocast, grad mode, default dtype and device and the precision switches as it found "
        f"them, but {'; '.join(items)}. They were restored after the call"
    )
    hint = "change them in a with statement (torch.no_grad(), torch.autocast(...), torch.device(...)) or restore them"
    where = Where("forward")
    return [AUTOCAST_STATE.fail(stats.name, message, where=where, observed=len(items), limit=0, hint=hint)]
