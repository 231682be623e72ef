"""What is concluded from records, and how sums over more processes are emulated: no process group is needed."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampcheck.checks import findings
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict, Where
from ampcheck.core.subject import Subject
from ampcheck.records.reductions import CollectiveStats, DistributedStats, Drift, Prediction
from ampcheck.training.distributed.collectives import Call, CollectiveWatch
from ampcheck.training.distributed.measure import measure_distributed
from ampcheck.training.distributed.ranks import gather_runs, merge_ranks
from ampcheck.training.distributed.replicas import judge_replicas
from ampcheck.training.distributed.sums import compare_sums, emulate, sums_table
from ampcheck.training.loop import TrainingLoop

LIMITS = Limits()
BF16 = format_of("bfloat16")
LOW = CollectiveStats(Where("backward", op="allreduce"), "bfloat16", 2, 10, 1000, 256, error=2e-3, once=1e-3)


def stats(*collectives, **more):
    return DistributedStats("loop", world=2, steps=2, modules=3, collectives=collectives, **more)


def verdict(*collectives, **more):
    (one,) = [f for f in findings(stats(*collectives, **more), LIMITS) if f.check == "reduce-precision"]
    return one.verdict


def test_a_sum_fails_from_the_limit_on():
    assert verdict(LOW) is Verdict.PASS
    assert verdict(replace(LOW, error=3.9e-3)) is Verdict.PASS
    assert verdict(replace(LOW, error=4.1e-3)) is Verdict.FAIL


def test_a_sum_in_float32_is_never_judged_by_its_roundings():
    assert verdict(replace(LOW, format="float32", error=1.0)) is Verdict.PASS


def test_what_overflows_fails_and_only_warns_where_a_scaler_backs_off():
    assert verdict(replace(LOW, overflowed=1)) is Verdict.FAIL
    assert verdict(replace(LOW, overflowed=1), scaled=True) is Verdict.WARN


def test_what_vanishes_fails_above_the_share_that_may_underflow():
    assert verdict(replace(LOW, vanished=0.09)) is Verdict.PASS
    assert verdict(replace(LOW, vanished=0.11)) is Verdict.FAIL


def test_a_prediction_fails_where_the_user_goes_and_warns_where_he_might():
    bad = replace(LOW, predicted=(Prediction(16, 2e-3, 1e-3), Prediction(64, 5e-3, 1e-3)))
    assert verdict(bad, target=64) is Verdict.FAIL
    assert verdict(bad, target=16) is Verdict.PASS
    assert verdict(bad) is Verdict.WARN
    over = replace(LOW, predicted=(Prediction(64, 1e-3, 1e-3, overflows=True),))
    assert verdict(over, target=64) is Verdict.FAIL
    assert verdict(over, target=64, scaled=True) is Verdict.WARN
    assert verdict(over) is Verdict.WARN


def test_a_setting_that_differs_warns_and_names_the_ranks():
    found = findings(stats(settings={"TF32 in matmul": {"True": (0,), "False": (1, 2)}}), LIMITS)
    (one,) = [f for f in found if f.check == "autocast-state"]
    assert one.verdict is Verdict.WARN
    assert "True on rank 0; False on ranks 1, 2" in one.message


def test_ranks_that_part_and_never_communicate_warn():
    drift = Drift(0, (0, 1), ("w",), proven=False)

    def warned(**more):
        found = findings(stats(**more, drift=drift), LIMITS)
        return [finding for finding in found if finding.verdict is Verdict.WARN]

    (one,) = warned()
    assert "each rank trains on its own" in one.message
    assert warned(coverage=Coverage({"other collectives": 2})) == []
    assert judge_replicas("loop", drift, ()) == []


def test_one_process_alone_is_skipped_with_the_reason():
    model = torch.nn.Linear(2, 2)
    loop = TrainingLoop(Subject({"model": model, "step": lambda i: model(torch.ones(2)).sum().item()}))
    found = measure_distributed(loop)
    assert {f.verdict for f in findings(found, LIMITS)} == {Verdict.SKIP}
    assert sums_table(found) == ()
    run = Run(findings=(Finding("coverage", Verdict.PASS, "s", "m"),))
    assert gather_runs(run) is run
    for wrong in ({"steps": 0}, {"steps": True}, {"world_size": 1}, {"world_size": 2.5}):
        with pytest.raises(UsageError, match="whole number"):
            measure_distributed(loop, **wrong)


def ring(addends, fmt):
    """By hand: one addend after the other, each partial sum rounded."""
    total = addends[0]
    for addend in addends[1:]:
        total = fmt.round(total + addend)
    return total


@pytest.mark.parametrize("world", [8, 64, 384])
def test_equal_addends_are_emulated_as_the_ring_adds_them(world):
    value = BF16.round(0.0123)
    (told,) = emulate(torch.full((2, 64), value, dtype=torch.float64), BF16, [world])
    exact = value * world
    assert told.error == pytest.approx(abs(ring([value] * world, BF16) - exact) / exact, rel=1e-6, abs=1e-12)


def test_what_ranks_have_in_common_stagnates_and_noise_does_not():
    torch.manual_seed(0)
    common = 1e-3 * (1 + 0.1 * torch.randn(4, 2048, dtype=torch.float64))
    noise = 1e-3 * torch.randn(4, 2048, dtype=torch.float64)
    (coherent,), (random,) = emulate(common, BF16, [384]), emulate(noise, BF16, [384])
    assert coherent.ratio > 50
    # Random signs: the errors of 384 roundings add up as their squares do.
    assert math.sqrt(384 / 2) / 3 < random.ratio < math.sqrt(384 / 2) * 3


def test_the_range_of_float16_is_judged_by_the_exact_sum():
    addends = torch.full((2, 16), 200.0, dtype=torch.float64)
    told = emulate(addends, format_of("float16"), [256, 512])
    assert [one.overflows for one in told] == [False, True]
    assert not any(one.overflows for one in emulate(addends, format_of("float16"), [512], divided=True))


def call(rank, addends, result, ranks=(0, 1), **more):
    where, fmt = Where("backward", "", "allreduce", "f", 1), more.pop("format", "bfloat16")
    return Call(ranks, 0, where, fmt, len(addends), [addends], result=result, **more)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-8, 8, width=16)] * 2), min_size=1, max_size=40), st.booleans())
def test_an_exact_sum_or_mean_has_no_error(pairs, average):
    one, other = map(list, zip(*pairs, strict=True))
    total = [(a + b) / (2 if average else 1) for a, b in pairs]
    for told in compare_sums([[call(0, one, total)], [call(1, other, total)]], None):
        assert told.error == 0.0
        assert told.overflowed == told.vanished == 0


def test_a_maximum_is_no_sum():
    one, other = [1.0, -2.0, 3.0], [2.0, 5.0, -1.0]
    top = [2.0, 5.0, 3.0]
    assert compare_sums([[call(0, one, top)], [call(1, other, top)]], None) == []


def test_a_call_that_not_all_ranks_made_is_not_judged():
    assert compare_sums([[call(0, [1.0], [2.0])], []], None) == []


def test_infinite_addends_are_no_overflow_of_the_sum():
    inf = math.inf
    both = [[call(0, [inf, 1.0], [inf, 2.0])], [call(1, [1.0, 1.0], [inf, 2.0])]]
    (told,) = compare_sums(both, None)
    assert told.overflowed == 0
    assert told.error == 0.0


def test_a_sparse_sum_over_processes_is_counted_and_does_not_end_the_run():
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with CollectiveWatch() as seen:
            dist.all_reduce(torch.ones(3).to_sparse())
    finally:
        dist.destroy_process_group()
    assert seen.calls == []
    assert seen.others == {"allreduce": 1}


def test_addends_that_a_hook_cast_are_measured_as_they_were_before():
    wide, cast, total = [1e-9, 1.0], [0.0, 1.0], [0.0, 2.0]
    both = [[call(rank, cast, total, format="float16", wide=wide)] for rank in (0, 1)]
    (told,) = compare_sums(both, None)
    assert told.cast
    assert told.vanished == 0.5


def test_runs_that_agree_are_told_once_and_the_worst_numbers_are_kept():
    def run(rank, value):
        table = Table("of each", ("rank",), ((rank,),))
        return Run(
            findings=(Finding("flush", Verdict.WARN, "s", f"{value} of 5", Where("forward"), observed=value),),
            tables=(table,),
        )

    merged = merge_ranks([run(0, 1.0), run(1, 2.0), run(2, 3.0)])
    (first,) = merged.findings
    assert first.message == "3.0 of 5 [on all 3 ranks; the numbers are those of rank 2]"
    assert [table.title for table in merged.tables] == ["of each (rank 0)", "of each (rank 1)", "of each (rank 2)"]
    same = merge_ranks([run(0, 1.0), run(0, 1.0)])
    assert len(same.findings) == len(same.tables) == 1
    assert same.findings[0].message == "1.0 of 5"
