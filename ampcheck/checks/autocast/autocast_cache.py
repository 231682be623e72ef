"""Requires: A cast of a weight that autocast caches is used only while the weight is unchanged and the region has the
dtype of the cast; one that was made while gradients were off serves no forward that backward starts from.

Measured: Casts of float32 leaves inside a region are followed. When one is used in a forward after its weight was
written to, also through .data, it is compared with the present weight. What a forward with gradients computes from a
cast without history is followed to the tensors at which backward starts.

Causes: An optimizer step, load_state_dict or weight averaging inside a region, or after autocast was switched by
torch.set_autocast_enabled; a float16 region inside a bfloat16 one that share a weight. Before PyTorch 2.11, a pass
under no_grad and one with gradients in one region: a target, a validation, samples, recycling.

Fix: Use `with torch.autocast(...)`, which drops the casts at its end, and change weights outside; or call
torch.clear_autocast_cache() after the change or the pass under no_grad, or pass cache_enabled=False.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ampcheck.checks.autocast import clean
from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import Kind
from ampcheck.core.text import listed
from ampcheck.records.autocast import CutCast, GuardStats, StaleCast

CHECK = Check(
    "autocast-cache",
    "autocast",
    __doc__,
    unit="uses",
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("GuardStats",),
    order=306,
    evidence=("tests/corpus/training/weights_change_inside_autocast", "reference: the whole epoch inside autocast"),
)

_CUT = (
    "call torch.clear_autocast_cache() after the part without gradients, give it a region of its own, or pass "
    "cache_enabled=False; PyTorch 2.11 and later keep the history"
)


def check(stats: GuardStats, limits: Limits) -> Iterator[Finding]:
    """A cached cast is never used after its weight changed, under another dtype, nor in a forward
    with gradients where it has no history."""
    groups: dict[tuple[str, str, str | None], list[StaleCast]] = defaultdict(list)
    for stale in stats.stale:
        groups[stale.changed_by, stale.cast, stale.wanted].append(stale)
    for (changed_by, cast, wanted), uses in groups.items():
        first = uses[0]
        weights = f"the {cast} cast of a weight {list(first.shape)}"
        if len(uses) > 1:
            weights += f" (and {len(uses) - 1} other uses)"
        if wanted is None:
            message = (
                "a weight must not change while autocast keeps its cast, but "
                f"{weights} was used after the weight was changed by {changed_by}: the old values were used"
            )
        else:
            message = (
                f"one region must use one dtype, but {weights} was used where autocast casts to {wanted}: "
                "the cache does not compare dtypes"
            )
        evidence = Evidence(where=first.where, observed=len(uses), limit=0, hint=CHECK.fix)
        evidence["names"] = [changed_by] if changed_by else []
        yield CHECK.fail(stats.subject, message, **evidence)
    cut: dict[tuple[str, str], list[CutCast]] = defaultdict(list)
    for use in stats.cut:
        cut[use.made_at, use.where.place].append(use)
    for (made_at, _), casts in cut.items():
        first_cut = casts[0]
        weights = listed(dict.fromkeys(use.weight or f"a weight {list(use.shape)}" for use in casts))
        message = (
            "backward must reach the weights of a forward that ran with gradients, but autocast kept the "
            f"{first_cut.cast} cast of {weights} from {made_at}, where gradients were off, and this forward "
            "used it: it gives them no gradient"
        )
        where = first_cut.where
        if len({use.where.module for use in casts}) > 1:
            where = replace(where, module="")
        times = sum(stats.cut[use] for use in casts)
        yield CHECK.fail(stats.subject, message, where=where, observed=times, limit=0, hint=_CUT)
    if not groups and not cut:
        message = "{} of weights, none of them used after its weight changed"
        yield clean(CHECK, stats, "cached casts", "autocast kept no cast of a weight", message)
