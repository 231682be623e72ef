"""The interval over launches: its error rate holds where whole processes are lucky or not, and blocks are noisy."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from ampcheck.core.run import Verdict
from ampcheck.records.speed import LOOKS, NOISE, STRADDLES, Rule
from ampcheck.speed.base.stats import (
    Rounds,
    Turns,
    bounds,
    decide_rounds,
    launch_deviation,
    look_points,
    rounds_of,
    twin_noise,
)

RULE = Rule()
SHOTS = 400


def launches(random, number, *, luck, slower=0.0, noise=0.04, cycles=25, head_luck=None):
    """Turns of several rounds: each process has its own luck, each block its noise, each cycle what disturbs all."""
    made = []
    for _ in range(number):
        drift = random.normal(0, 0.2, cycles)
        tails = (random.standard_t(3, cycles) * noise for _ in range(3))
        lucky = random.normal(0, 1, 3) * (luck, luck, luck if head_luck is None else head_luck)
        sides = [np.exp(drift + tail + one) for tail, one in zip(tails, lucky, strict=True)]
        made.append(Turns(tuple(sides[0]), tuple(sides[1]), tuple(sides[2] * (1 + slower))))
    return made


def gate(random, **settings):
    """The verdict of a whole run: looked at as it goes on, ended when it is decided."""
    rounds = rounds_of(launches(random, 8, **settings))
    for look in look_points(3, 8, len(LOOKS)):
        found = decide_rounds(Rounds(rounds.head[:look], rounds.twin[:look]), RULE)
        if found.verdict is not Verdict.UNDECIDED:
            break
    return found.verdict


def verdicts(seed, **settings):
    random = np.random.default_rng(seed)
    return Counter(gate(random, **settings) for _ in range(SHOTS))


@pytest.mark.parametrize("luck", [0.0, 0.005, 0.01, 0.02, 0.03])
def test_a_change_that_does_nothing_fails_at_most_once_in_a_hundred(luck):
    assert verdicts(1, luck=luck)[Verdict.FAIL] <= 0.01 * SHOTS


def test_the_rate_holds_where_the_processes_of_the_head_differ_far_more_than_those_of_the_base():
    assert verdicts(2, luck=0.005, head_luck=0.02)[Verdict.FAIL] <= 0.01 * SHOTS
    assert verdicts(3, luck=0.01, head_luck=0.03)[Verdict.FAIL] <= 0.02 * SHOTS


def test_blocks_alone_would_have_cried_wolf():
    """The planted defect: 25 blocks of 3 launches taken for 75 observations."""
    from ampcheck.speed.verdict import decide

    random, failed = np.random.default_rng(4), 0
    for _ in range(SHOTS):
        turns = launches(random, 3, luck=0.03, noise=0.01)
        logs = [np.log(np.concatenate([getattr(one, side) for one in turns])) for side in ("base", "twin", "head")]
        quiet = np.zeros(75)  # a twin inside the process of the base would show none of it
        failed += decide(logs[0] - logs[2], quiet, RULE).verdict is Verdict.FAIL
    assert failed > 0.1 * SHOTS


@pytest.mark.parametrize(("luck", "at_least"), [(0.0, 0.99), (0.005, 0.99), (0.01, 0.97), (0.02, 0.4)])
def test_8_per_cent_slower_is_found(luck, at_least):
    found = verdicts(5, luck=luck, slower=0.08, noise=0.02)
    assert found[Verdict.FAIL] >= at_least * SHOTS
    assert found[Verdict.PASS] <= 0.01 * SHOTS


@pytest.mark.parametrize(("luck", "at_least"), [(0.0, 0.99), (0.005, 0.99), (0.01, 0.9)])
def test_a_change_that_does_nothing_passes_where_launches_agree(luck, at_least):
    assert verdicts(6, luck=luck, noise=0.02)[Verdict.PASS] >= at_least * SHOTS


@pytest.mark.parametrize("number", [2, 3, 8])
def test_the_interval_covers_the_truth_as_often_as_it_says(number):
    random, covered, shots = np.random.default_rng(7), 0, 3000
    for _ in range(shots):
        base, twin, head = random.normal(0, 0.02, (3, number))
        low, high = bounds(Rounds((base + twin) / 2 - head, base - twin), 0.9)
        covered += low <= 0 <= high
    assert 0.89 <= covered / shots <= 0.97, "the guard against a wilder head makes it a little wider than 90 per cent"


def test_the_luck_of_a_process_is_estimated_without_bias_from_d_and_a_together():
    random, seen = np.random.default_rng(8), []
    for _ in range(2000):
        base, twin, head = random.normal(0, 0.02, (3, 8))
        seen.append(launch_deviation(Rounds((base + twin) / 2 - head, base - twin)) ** 2)
    assert 1.0 <= np.mean(seen) / 0.02**2 <= 1.25  # above 1 by the guard


def test_rounds_are_the_medians_of_ratios_within_the_cycles():
    turns = Turns((1.0, 2.0, 9.0), (1.0, 2.0, 4.0), (2.0, 4.0, 3.0))
    found = rounds_of([turns])
    assert found.head[0] == pytest.approx(math.log(0.5))
    assert found.twin[0] == 0.0


def test_one_round_decides_nothing():
    one = rounds_of([Turns((1.0,), (1.0,), (2.0,))])
    found = decide_rounds(one, RULE)
    assert found.verdict is Verdict.UNDECIDED
    assert found.reason == NOISE
    assert math.isinf(launch_deviation(one))


def test_a_noisy_twin_leaves_what_differs_no_more_undecided():
    found = decide_rounds(Rounds(np.array([-0.05, -0.05, -0.05]), np.array([0.1, -0.1, 0.1])), RULE)
    assert (found.verdict, found.reason) == (Verdict.UNDECIDED, NOISE)


def test_what_lies_between_the_floor_and_the_limit_is_undecided():
    found = decide_rounds(Rounds(np.array([-0.02, -0.025, -0.03]), np.array([0.001, -0.001, 0.002])), RULE)
    assert (found.verdict, found.reason) == (Verdict.UNDECIDED, STRADDLES)


def test_equal_times_in_all_processes_pass_without_a_division_by_zero():
    still = Rounds(np.zeros(3), np.zeros(3))
    assert decide_rounds(still, RULE).verdict is Verdict.PASS
    assert twin_noise(still) == 0.0


@pytest.mark.parametrize(
    ("launches", "most", "points"),
    [(3, 8, (3, 4, 6, 8)), (3, 3, (3,)), (3, 5, (3, 4, 5)), (2, 4, (2, 3, 4)), (5, 20, (5, 8, 13, 20))],
)
def test_looks_are_no_more_than_the_confidence_pays_for(launches, most, points):
    assert look_points(launches, most, len(LOOKS)) == points
    assert len(points) <= len(LOOKS)
