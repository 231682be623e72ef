"""Verdicts on a start, from planted numbers: caches that miss, seconds near a limit, memory, and break-even."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ampcheck.core.errors import UsageError
from ampcheck.core.limits import StartupLimits
from ampcheck.core.run import Coverage, Verdict, Where
from ampcheck.records.graphs import Graph, GraphBreak, GraphStats
from ampcheck.records.speed import ArmTimes
from ampcheck.records.startup import ARTIFACTS, COLD, EAGER, WARM, BreakEven, Launch, Lookup, StartupArm, StartupStats
from ampcheck.speed.startup.judge import check_startup, startup_run
from ampcheck.speed.startup.stats import paid_after, savings

FX, AOT = "FX graph cache", "AOTAutograd cache"
GRAPH = GraphStats("f", graphs=(Graph("f", 3, 1.0),), coverage=Coverage({"graphs": 1}))
PARTS = {"gm": "abc", "inductor_config[max_autotune]": "False"}
MISSES = (Lookup(AOT, "miss"), Lookup(FX, "miss", parts=PARTS))
HITS = (Lookup(AOT, "hit"), Lookup(FX, "hit", parts=PARTS))


def times(eager, compiled, cycles=40, noise=0.0, seed=0):
    draw = np.random.default_rng(seed).normal(0, noise, (2, cycles))
    slow, fast = eager * np.exp(draw[0]), compiled * np.exp(draw[1])
    return ArmTimes("eager", tuple(slow.tolist())), ArmTimes("this", tuple(fast.tolist()))


def launch(first=10.0, steady=0.010, eager=0.020, lookups=HITS, **settings):
    given = {"graph": GRAPH, "memory": 2**20, "times": times(eager, steady), "lookups": lookups, **settings}
    return Launch(1.0, 0.5, 0.0, (first + steady, steady, steady), **given)


def stats(**arms):
    made = {
        EAGER: [Launch(1.0, 0.5, 0.0, (0.020,) * 3, times=times(0.020, 0.020), memory=2**20)],
        COLD: [launch(lookups=MISSES, saved=2, saved_bytes=5000)],
        WARM: [launch(first=3.0)] * 3,
        ARTIFACTS: [launch(first=4.0, taken=2)] * 3,
    }
    made.update(arms)
    kept = {name: given for name, given in made.items() if given is not None}
    return StartupStats("net", tuple(StartupArm(name, "default", tuple(given)) for name, given in kept.items()))


def find(check, given, limits=None):
    return [finding for finding in check_startup(given, limits) if finding.check == check]


def verdicts(check, given, limits=None):
    return [finding.verdict for finding in find(check, given, limits)]


def test_a_healthy_start_passes_everything():
    found = check_startup(stats(), StartupLimits(compile=20, calls=2000))
    assert {finding.verdict for finding in found} == {Verdict.PASS}, found
    assert {finding.check for finding in found} == {
        "start-up", "graph-break", "recompile", "eager-fallback", "peak-memory", "compile-time",
    }  # fmt: skip


def test_seconds_are_judged_only_where_a_limit_is_given():
    assert verdicts("compile-time", stats()) == []


# Caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [WARM, ARTIFACTS])
def test_one_launch_that_misses_fails_and_tells_what_the_key_differs_in(arm):
    other = Lookup(FX, "miss", parts={**PARTS, "inductor_config[max_autotune]": "True"})
    given = stats(**{arm: [launch(), launch(lookups=(Lookup(AOT, "miss"), other)), launch()]})
    found = find("start-up", given)[arm == ARTIFACTS]
    assert found.verdict is Verdict.FAIL
    assert "must compile nothing again, but 1 of 3 graphs was not in the cache" in found.message
    assert "the key differs in inductor_config[max_autotune] (False, now True)" in found.message
    assert "gm" not in found.message
    assert "in each process" in found.hint


def test_a_bypassed_cache_fails_with_the_reason_that_pytorch_gives():
    bypassed = Lookup(FX, "bypass", reason="Unsupported _fuse_ddp_communication_pass")
    found = find("start-up", stats(**{WARM: [launch(lookups=(bypassed,))]}))[0]
    assert found.verdict is Verdict.FAIL
    assert "Unsupported _fuse_ddp_communication_pass" in found.message
    assert "refuses to cache" in found.hint


def test_caches_that_are_switched_off_are_named():
    off = launch(lookups=(), off=("torch._inductor.config.force_disable_caches is True",))
    found = find("start-up", stats(**{WARM: [off]}))[0]
    assert found.verdict is Verdict.FAIL
    assert "1 graph asked no cache: torch._inductor.config.force_disable_caches is True" in found.message


@pytest.mark.parametrize("arm", [WARM, ARTIFACTS])
def test_kernels_that_are_built_again_are_a_warning_however_many_lookups_hit(arm):
    found = find("start-up", stats(**{arm: [launch(binaries=3)]}))[arm == ARTIFACTS]
    assert found.verdict is Verdict.WARN
    assert "its 2 lookups hit, but a C++ compiler built 3 files of machine code again" in found.message


def test_a_graph_that_is_only_traced_again_is_a_warning():
    lookups = (Lookup(AOT, "bypass", reason="a custom autograd function"), Lookup(FX, "hit"))
    found = find("start-up", stats(**{WARM: [launch(lookups=lookups)]}))[0]
    assert found.verdict is Verdict.WARN
    assert "1 graph was traced again: a custom autograd function" in found.message


def test_a_start_that_compiles_nothing_fails():
    found = find("start-up", stats(**{WARM: [launch(lookups=(), graph=replace(GRAPH, graphs=()))]}))[0]
    assert found.verdict is Verdict.FAIL
    assert "nothing was compiled in it" in found.message


def test_a_pytorch_that_tells_nothing_is_a_skip():
    found = find("start-up", stats(**{WARM: [launch(untold="PyTorch 9 does not tell")]}))[0]
    assert (found.verdict, "PyTorch 9 does not tell" in found.message) == (Verdict.SKIP, True)


def test_artifacts_that_could_not_be_saved_fail_and_a_release_without_them_is_skipped():
    lost = replace(stats(artifacts=None), left_out={ARTIFACTS: "torch.compiler.save_cache_artifacts saved nothing"})
    assert verdicts("start-up", lost) == [Verdict.PASS, Verdict.FAIL]
    old = replace(lost, left_out={ARTIFACTS: "PyTorch 2.5 has no torch.compiler.save_cache_artifacts (2.7 has)"})
    assert verdicts("start-up", old) == [Verdict.PASS, Verdict.SKIP]


def test_without_a_cold_start_nothing_is_judged():
    assert verdicts("coverage", stats(cold=None)) == [Verdict.FAIL]


def test_graph_breaks_of_the_cold_start_are_judged_by_the_room_of_compiled_models():
    broken = replace(GRAPH, breaks=(GraphBreak(Where("compile", file="f.py", line=3), "print", ""),))
    given = stats(cold=[launch(lookups=MISSES, graph=broken)])
    assert verdicts("graph-break", given) == [Verdict.FAIL]
    assert find("graph-break", given)[0].subject == "net"
    assert verdicts("graph-break", given, StartupLimits(breaks=1)) == [Verdict.PASS]


# Seconds ---------------------------------------------------------------------------------------------------------


def cold(*firsts):
    return stats(cold=[launch(first, lookups=MISSES) for first in firsts])


@pytest.mark.parametrize(
    ("firsts", "limit", "verdict"),
    [
        ((10.0,), 14.0, Verdict.PASS),
        ((10.0,), 11.0, Verdict.UNDECIDED),  # one launch may be 30 % off
        ((10.0,), 1.0, Verdict.UNDECIDED),  # and never fails alone
        ((10.0, 10.0), 1.0, Verdict.UNDECIDED),
        ((10.0, 11.0, 12.0), 12.5, Verdict.PASS),
        ((10.0, 11.0, 12.0), 11.5, Verdict.UNDECIDED),
        ((10.0, 11.0, 12.0), 9.5, Verdict.FAIL),
    ],
    ids=str,
)
def test_seconds_fail_only_when_three_launches_agree(firsts, limit, verdict):
    found = find("compile-time", cold(*firsts), StartupLimits(compile=limit))
    assert [finding.verdict for finding in found] == [verdict], found
    assert bool(found[0].hint) == (verdict is not Verdict.PASS)


def test_what_eager_needs_to_start_is_no_cost_of_compilation():
    eager = Launch(1.0, 0.5, 0.0, (4.02, 0.02, 0.02), times=times(0.02, 0.02))
    given = stats(eager=[eager])
    assert given.cost(given.arm(COLD)) == pytest.approx((6.0,))


def test_loading_artifacts_is_part_of_the_cost():
    given = stats(artifacts=[launch(first=4.0, artifacts_loaded=1.5)])
    assert given.cost(given.arm(ARTIFACTS)) == pytest.approx((5.5,))


# Break-even ------------------------------------------------------------------------------------------------------


def test_compilation_has_paid_when_its_cost_is_saved():
    found = paid_after(stats(), stats().arm(COLD))
    assert (found.calls, found.low, found.high) == pytest.approx((1000, 1000 / 1.3, 1300))
    assert str(found) == "1,000 calls (770 to 1,300)"
    assert startup_run(stats()).tables[0].rows[1][-1] == str(found)
    three = cold(10.0, 10.0, 10.0)
    assert str(paid_after(three, three.arm(COLD))) == "1,000 calls (1,000 to 1,000)"


def test_a_slower_arm_never_pays():
    slow = launch(steady=0.030, lookups=MISSES)
    given = stats(cold=[slow], warm=None, artifacts=None)
    found = paid_after(given, given.arm(COLD))
    assert (found.never, str(found), found.saving < 0) == (True, "never", True)
    judged = find("compile-time", given, StartupLimits(calls=10**9))[0]
    assert judged.verdict is Verdict.FAIL
    assert "it never has" in judged.message


def test_noise_that_hides_the_sign_is_undecided():
    noisy = launch(lookups=MISSES, times=times(0.010, 0.010, cycles=20, noise=0.3, seed=3))
    given = stats(cold=[noisy], warm=None, artifacts=None)
    found = paid_after(given, given.arm(COLD))
    assert found.undecided
    assert str(found).startswith("undecided, ")
    assert verdicts("compile-time", given, StartupLimits(calls=10**9)) == [Verdict.UNDECIDED]


def test_the_interval_of_the_saving_holds_the_truth_as_often_as_it_says():
    truth, held = 0.020 - 0.016, 0
    for seed in range(100):
        _, low, high = savings(*times(0.020, 0.016, cycles=60, noise=0.05, seed=seed))
        held += low <= truth <= high
    assert held >= 88  # 95 of 100 on average


def test_drift_that_both_share_does_not_widen_the_ratio():
    drift = np.linspace(1, 2, 40)
    eager, arm = (ArmTimes(name, tuple((t * drift).tolist())) for name, t in (("eager", 0.02), ("this", 0.016)))
    saving, low, high = savings(eager, arm)
    assert saving == pytest.approx(0.02 * 1.5 * 0.2)
    assert 0 < low < saving < high


def test_one_cycle_has_no_interval():
    eager, arm = times(0.02, 0.01, cycles=1)
    assert savings(eager, arm) == (pytest.approx(0.01), -math.inf, math.inf)
    given = stats(cold=[launch(lookups=MISSES, times=(eager, arm))], warm=None, artifacts=None)
    assert paid_after(given, given.arm(COLD)).undecided


def test_launches_that_differ_widen_the_interval():
    given = cold(10.0, 20.0, 12.0)
    found = paid_after(given, given.arm(COLD))
    assert (found.low, found.calls, found.high) == pytest.approx((1000, 1200, 2000))


@pytest.mark.parametrize(
    ("limit", "firsts", "verdict"),
    [
        (2000, (10.0,), Verdict.PASS),
        (1100, (10.0,), Verdict.UNDECIDED),  # one launch may be 30 % off
        (1100, (10.0, 10.0, 10.0), Verdict.PASS),
        (500, (10.0,), Verdict.UNDECIDED),
        (500, (10.0, 10.0, 10.0), Verdict.FAIL),
        (1100, (10.0, 12.0, 12.0), Verdict.UNDECIDED),
    ],
    ids=str,
)
def test_a_limit_of_calls_is_judged_by_the_interval(limit, firsts, verdict):
    assert verdicts("compile-time", cold(*firsts), StartupLimits(calls=limit)) == [verdict]


def test_a_steady_state_that_was_not_timed_is_a_skip():
    given = stats(cold=[launch(lookups=MISSES, times=())], warm=None, artifacts=None)
    assert paid_after(given, given.arm(COLD)) is None
    assert verdicts("compile-time", given, StartupLimits(calls=10)) == [Verdict.SKIP]


def test_starts_that_run_the_same_code_agree_on_what_a_call_saves():
    saves, loses = times(0.02, 0.01), times(0.02, 0.021)
    given = stats(
        cold=[launch(lookups=MISSES, times=saves)],
        warm=[launch(times=saves)],
        artifacts=[launch(times=loses)],  # noise: it is the code of the others
    )
    found = [paid_after(given, given.arm(name)) for name in (COLD, WARM, ARTIFACTS)]
    assert len({one.saving for one in found}) == 1
    assert found[0].saving == pytest.approx(0.01)
    assert len(given.times(given.arm(ARTIFACTS))[0].seconds) == 3 * len(saves[0].seconds)


def test_a_break_even_says_what_it_is():
    assert str(BreakEven(10.2, 9.1, math.inf, 1.0, 0.1)) == "undecided, 10 calls at the least"


# Memory ----------------------------------------------------------------------------------------------------------


def with_memory(eager, compiled, reason=""):
    given = stats(cold=[launch(lookups=MISSES, memory=compiled, memory_untold=reason)])
    arms = [replace(a, launches=tuple(replace(x, memory=eager) for x in a.launches)) if a.name == EAGER else a
            for a in given.arms]  # fmt: skip
    return replace(given, arms=tuple(arms))


@pytest.mark.parametrize(
    ("eager", "compiled", "limits", "expected"),
    [
        (100, 105, StartupLimits(), [Verdict.PASS]),
        (100, 120, StartupLimits(), [Verdict.FAIL]),
        (0, 0.9, StartupLimits(), [Verdict.PASS]),
        (0, 1.1, StartupLimits(), [Verdict.FAIL]),
        (100, 120, StartupLimits(memory=1.5), [Verdict.PASS]),
        (100, 120, StartupLimits(memory=None), []),
        (100, 120, StartupLimits(memory=None, bytes=119 * 2**20), [Verdict.FAIL]),
        (100, 120, StartupLimits(bytes=121 * 2**20), [Verdict.FAIL, Verdict.PASS]),
    ],
    ids=str,
)
def test_memory_is_judged_beside_eager_and_beside_a_limit(eager, compiled, limits, expected):
    given = with_memory(int(eager * 2**20), int(compiled * 2**20))
    assert verdicts("peak-memory", given, limits) == expected


def test_memory_that_is_not_known_is_a_skip_with_the_reason():
    found = find("peak-memory", with_memory(None, None, "PyTorch does not report the peak memory of mps"))[0]
    assert (found.verdict, "peak memory of mps" in found.message) == (Verdict.SKIP, True)


@pytest.mark.parametrize("wrong", [{"compile": 0}, {"calls": -1}, {"memory": "much"}], ids=str)
def test_a_limit_that_is_no_positive_number_is_bad_input(wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} of StartupLimits must be a"):
        StartupLimits(**wrong)


def test_a_start_without_an_eager_arm_cannot_be_judged():
    with pytest.raises(UsageError, match="has no eager arm"):
        startup_run(stats(eager=None))
