"""The running sums and norms of a function, measured as those of a callable are."""

from collections.abc import Callable
from typing import Any

from ampcheck.records.reductions import ReductionStats
from ampcheck.shadow import Shadow
from ampcheck.training.lineage import Lineage
from ampcheck.training.reductions.sums import ReductionWatch, reduction_stats


def measure_reductions(function: Callable[[], Any], subject: str = "this function") -> ReductionStats:
    """Call a function under a shadow that judges nothing, and follow its sums."""
    shadow = Shadow(judge=False)
    watch = ReductionWatch(shadow)
    with shadow, Lineage(watch) as lineage:
        lineage.begin(())
        function()
    return reduction_stats(watch, lineage, subject)
