from __future__ import annotations

import math
from dataclasses import replace

from ampcheck.checks.formats.format_drift import CHECK, check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.whatif import TrainingLoss, TrainingWhatIf

OWN = TrainingLoss("own precision", (2.0, 1.0), 0.01)
NARROW = replace(OWN, recipe="nvfp4", drift=0.3, layers=("first", "last"))


def judged(*losses: TrainingLoss, own: TrainingLoss = OWN) -> list[Finding]:
    return list(check(TrainingWhatIf("main", (2.0, 1.0), own, losses), Limits()))


def test_a_recipe_that_stays_near_float64_passes_with_its_drift_and_loss() -> None:
    (found,) = judged(NARROW)
    assert (found.check, found.verdict, found.seen, found.observed) == (CHECK.slug, Verdict.PASS, 2, 0.3)
    assert "nvfp4: after 2 steps the drift is 0.3, and 0.01 in the training's own precision" in found.message


def test_a_random_recipe_passes_with_its_interval() -> None:
    (found,) = judged(replace(NARROW, drifts=(0.2, 0.4), runs=3))
    assert "the drift is 0.3 (0.2 to 0.4 in 3 runs)" in found.message


def test_weights_as_far_off_as_untrained_ones_are_a_warning_with_what_was_lost_most() -> None:
    (found,) = judged(replace(NARROW, drift=1.0, flushed=("first", "grad_weight", 0.9)))
    assert (found.verdict, found.limit) == (Verdict.WARN, 1.0)
    assert "90% of an operand of the weight's gradient of first becomes zero" in found.message
    assert "the first and the last layer in 16 bits" in found.hint


def test_losses_that_are_not_finite_are_a_warning_with_their_step() -> None:
    (found,) = judged(replace(NARROW, losses=(2.0, math.nan), drift=math.inf, saturated=("last", "forward", 0.5)))
    assert found.verdict is Verdict.WARN
    assert "that of step 1 is nan; 50% of an operand of the output of last saturates" in found.message


def test_training_that_is_lost_in_its_own_precision_says_nothing_of_a_recipe() -> None:
    lost = replace(OWN, losses=(2.0, math.nan), drift=math.inf)
    (found,) = judged(replace(NARROW, losses=(2.0, math.nan), drift=math.inf), own=lost)
    assert found.verdict is Verdict.UNDECIDED
    assert "its own precision leaves a drift of inf, and a last loss of nan" in found.message


def test_a_drift_that_is_no_number_is_none_of_float64() -> None:
    (found,) = judged(replace(NARROW, drift=math.inf))
    assert found.verdict is Verdict.WARN


def test_kept_layers_are_named() -> None:
    found = judged(NARROW, replace(NARROW, kept=("first",), drift=1.5))
    assert "nvfp4 but for first" in found[1].message
    assert "table" not in found[1].hint


def test_without_a_linear_layer_there_is_nothing_to_judge() -> None:
    (found,) = judged(replace(NARROW, layers=()))
    assert found.verdict is Verdict.SKIP
