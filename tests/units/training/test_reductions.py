import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_sums import measure_reductions
from torch import nn

from ampcheck.checks.training.reduce_precision import check as check_reductions
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.training.reductions.sums import reduction_table

LIMITS = Limits()
BF16 = torch.bfloat16


def judged(function):
    stats = measure_reductions(function, "subject")
    return check_reductions(stats, LIMITS), stats


def verdicts(function):
    return {finding.verdict for finding in judged(function)[0]}


def gradients(count, size=256, dtype=BF16, mean=1.0):
    torch.manual_seed(0)
    return [(1e-3 * (mean + 0.1 * torch.randn(size))).to(dtype) for _ in range(count)]


def chain(acc, addends):
    for g in addends:
        acc = acc + g.to(acc.dtype)
    return acc


def in_place(acc, addends):
    for g in addends:
        acc += g
    return acc


def foreach(acc, addends):
    for g in addends:
        torch._foreach_add_([acc], [g])
    return acc


def foreach_new(acc, addends):
    accs = [acc]
    for g in addends:
        accs = torch._foreach_add(accs, [g])
    return accs[0]


def swapped(acc, addends):
    for g in addends:
        acc = g + acc
    return acc


def with_out(acc, addends):
    for g in addends:
        torch.add(acc, g, out=acc)
    return acc


def differences(acc, addends):
    for g in addends:
        acc -= -g
    return acc


def builtin(acc, addends):
    return sum(addends)


def rounded_every_time(acc, addends):
    for g in addends:
        acc = (acc.float() + g.float()).to(BF16)
    return acc


def through_a_view(acc, addends):
    flat = torch.zeros(2, acc.numel(), dtype=acc.dtype)
    for g in addends:
        flat[0].add_(g)
    return flat


def copied_back(acc, addends):
    buffer = torch.zeros_like(acc, dtype=BF16)
    for g in addends:
        buffer.copy_(buffer.float() + g.float())
    return buffer


FORMS = [
    chain,
    in_place,
    foreach,
    foreach_new,
    swapped,
    with_out,
    differences,
    builtin,
    rounded_every_time,
    through_a_view,
    copied_back,
]


@pytest.mark.parametrize("form", FORMS)
def test_a_running_sum_in_bfloat16_is_found_however_it_is_written(form):
    addends = gradients(384)
    found, stats = judged(lambda: form(torch.zeros(256, dtype=BF16), addends))
    assert [f.verdict for f in found] == [Verdict.FAIL]
    assert "384 addends" in found[0].message
    assert "bfloat16" in found[0].message
    assert found[0].where.file.endswith("test_reductions.py")
    assert stats.sums[0].addends == 384


@pytest.mark.parametrize("form", FORMS[:7])
def test_the_same_sum_in_float32_passes_also_when_its_result_is_rounded(form):
    addends = gradients(384, dtype=torch.float32)
    assert verdicts(lambda: form(torch.zeros(256), addends).to(BF16)) == {Verdict.PASS}


@pytest.mark.parametrize("count", [2, 6, 8])
def test_a_sum_over_few_ranks_does_not_fail(count):
    addends = gradients(count)
    assert Verdict.FAIL not in verdicts(lambda: chain(addends[0], addends[1:]))


def test_a_pairwise_sum_in_bfloat16_passes():
    def tree():
        level = gradients(384)
        while len(level) > 1:
            level = [sum(pair[1:], pair[0]) for pair in (level[i : i + 2] for i in range(0, len(level), 2))]
        return level[0]

    found, stats = judged(tree)
    assert [f.verdict for f in found] == [Verdict.PASS]
    assert max(one.addends for one in stats.sums) == 384


def test_a_sum_that_overflows_float16_is_found_and_says_so():
    addends = [torch.full((32,), 8000.0, dtype=torch.float16) for _ in range(12)]
    found, _ = judged(lambda: chain(addends[0], addends[1:]))
    assert [f.verdict for f in found] == [Verdict.FAIL]
    assert "32 followed elements overflow" in found[0].message


def test_a_residual_stream_is_no_reduction():
    torch.manual_seed(0)
    weights = [torch.randn(64, 64, dtype=BF16) * 0.02 for _ in range(60)]

    def stream():
        h = torch.randn(32, 64, dtype=BF16)
        for w in weights:
            h = h + torch.tanh(h @ w)
        return h

    assert verdicts(stream) == {Verdict.SKIP}


def test_a_moving_average_and_a_loop_that_integrates_are_no_reductions():
    def run():
        ema, state = torch.zeros(64, dtype=BF16), torch.ones(64, dtype=BF16)
        for g in gradients(40, size=64):
            ema.mul_(0.9).add_(g, alpha=0.1)
            state = state + 0.01 * state.sin()
        return ema

    assert verdicts(run) == {Verdict.SKIP}


@pytest.mark.parametrize("like", [torch.randn_like, torch.ones_like])
def test_an_addend_made_after_the_shape_of_the_sum_does_not_depend_on_it(like):
    def run():
        torch.manual_seed(0)
        acc = torch.zeros(256, dtype=BF16)
        for _ in range(400):
            acc = acc + like(acc).abs()

    assert verdicts(run) == {Verdict.FAIL}


def test_a_buffer_that_is_written_anew_is_independent_of_what_it_held():
    addends = gradients(384)

    def run():
        acc, buffer = torch.zeros(256, dtype=BF16), torch.zeros(256, dtype=BF16)
        for g in addends:
            buffer.copy_(acc)
            buffer.copy_(g)
            acc += buffer

    found, stats = judged(run)
    assert [f.verdict for f in found] == [Verdict.FAIL]
    assert stats.sums[0].addends == 384


def test_a_weight_that_its_own_gradients_change_is_no_reduction():
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(4, 16, dtype=BF16)).square().mean().backward()
            optimizer.step()

    assert verdicts(run) == {Verdict.SKIP}


def accumulate(model, times, zero_every=10**9):
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    for i in range(times):
        if i % zero_every == 0:
            model.zero_grad(set_to_none=False)
        (model(torch.rand(4, 16, dtype=dtype) + 1).sum() / times).backward()


def test_gradient_accumulation_in_bfloat16_is_found_once_it_loses_digits():
    found, stats = judged(lambda: accumulate(nn.Linear(16, 16).to(BF16), 200))
    assert [f.verdict for f in found] == [Verdict.FAIL]
    assert "gradients are accumulated in bfloat16" in found[0].message
    assert {one.kind for one in stats.sums} == {"gradient"}


def test_gradient_accumulation_in_float32_passes():
    assert verdicts(lambda: accumulate(nn.Linear(16, 16), 200)) == {Verdict.PASS}


def test_gradients_that_are_zeroed_between_begin_anew():
    found, stats = judged(lambda: accumulate(nn.Linear(16, 16).to(BF16), 64, zero_every=4))
    assert [f.verdict for f in found] == [Verdict.SKIP]
    assert stats.sums == ()


def test_a_weight_used_many_times_in_one_backward_only_warns():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 16, dtype=BF16) * 0.1)
    inputs = [torch.rand(4, 16, dtype=BF16) for _ in range(200)]

    def run():
        torch.stack([(x @ weight).float().sum() for x in inputs]).sum().backward()

    found, stats = judged(run)
    assert {one.kind for one in stats.sums} == {"graph"}
    assert {f.verdict for f in found} == {Verdict.WARN}


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 40), st.integers(1, 60), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 9))
def test_the_error_is_that_of_the_sum_done_by_hand(count, size, dtype, seed):
    torch.manual_seed(seed)
    addends = [torch.randn(size).to(dtype) for _ in range(count)]
    stats = measure_reductions(lambda: chain(addends[0], addends[1:]))
    fmt = format_of(dtype)
    exact, lossy = [math.fsum(column) for column in zip(*[a.tolist() for a in addends], strict=True)], []
    for column in zip(*[a.tolist() for a in addends], strict=True):
        acc = column[0]
        for value in column[1:]:
            acc = fmt.round(acc + value)
        lossy.append(acc)
    off = math.sqrt(sum((a - b) ** 2 for a, b in zip(lossy, exact, strict=True))) / math.hypot(*exact)
    (one,) = stats.sums
    assert (one.addends, one.format) == (count, fmt.name)
    assert one.error == pytest.approx(off, rel=1e-9, abs=1e-15)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 400), st.integers(0, 9))
def test_one_rounding_is_never_judged_to_be_many(size, seed):
    torch.manual_seed(seed)
    addends = [torch.randn(size) for _ in range(16)]
    assert verdicts(lambda: chain(addends[0], addends[1:]).bfloat16()) == {Verdict.PASS}


def split_norm(k, dtype):
    torch.manual_seed(0)
    grads = [(torch.randn(64, 64).bfloat16() * s).to(dtype) for s in (0.01, 0.02, 0.03, 0.011, 0.017, 0.023)]
    total = torch.nn.utils.get_total_norm
    return total([total(grads[:k]), total(grads[k:])])


@pytest.mark.parametrize("k", range(1, 6))
def test_a_norm_of_rounded_totals_is_found_for_every_split(k):
    found, stats = judged(lambda: split_norm(k, BF16))
    assert found[-1].verdict is Verdict.FAIL
    assert "grouped" in found[-1].message
    exact = math.hypot(*[0.0])
    torch.manual_seed(0)
    for s in (0.01, 0.02, 0.03, 0.011, 0.017, 0.023):
        exact = math.hypot(exact, float((torch.randn(64, 64).bfloat16() * s).double().norm()))
    assert stats.norms[-1].exact == pytest.approx(exact, rel=1e-12)
    assert verdicts(lambda: split_norm(k, torch.float32)) == {Verdict.PASS}


def test_a_total_rounded_to_16_bits_and_then_widened_is_found_too():
    def run():
        parts = [torch.nn.utils.get_total_norm(gradients(3)).float() for _ in range(2)]
        return torch.stack(parts).norm()

    assert Verdict.FAIL in verdicts(run)


def by_powers(dtype, widen):
    grads = gradients(6, dtype=dtype)
    norms = [(g.float() if widen else g).norm() for g in grads]
    total = norms[0] ** 2
    for norm in norms[1:]:
        total = total + norm**2
    return total.sqrt()


def test_a_total_norm_of_powers_warns_in_16_bits_and_passes_in_float32():
    assert verdicts(lambda: by_powers(BF16, False)) == {Verdict.WARN}
    assert verdicts(lambda: by_powers(BF16, True)) == {Verdict.PASS}


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_bfloat16_gradients_warns_with_the_measured_error(foreach):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).to(BF16)

    def run():
        model(torch.randn(8, 32, dtype=BF16)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)

    found, stats = judged(run)
    assert [f.verdict for f in found] == [Verdict.WARN]
    assert stats.norms[0].terms == 4
    assert "relative error" in found[0].message


def test_an_ordinary_autocast_step_with_clipping_is_silent():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def run():
        for _ in range(3):
            for _ in range(12):
                with torch.autocast("cpu", torch.float16):
                    loss = model(torch.randn(8, 32)).float().square().mean() / 12
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert verdicts(run) == {Verdict.PASS}


def test_the_largest_magnitude_is_no_lossy_norm():
    assert verdicts(lambda: torch.nn.utils.get_total_norm(gradients(4), norm_type=math.inf)) == {Verdict.SKIP}


def test_nothing_looked_at_is_skipped_with_the_reason():
    found, stats = judged(lambda: torch.ones(3) * 2)
    assert [f.verdict for f in found] == [Verdict.SKIP]
    assert "no running sum" in found[0].message
    assert reduction_table(stats) == ()


def test_the_table_lists_the_worst_sum_first():
    def run():
        chain(gradients(10)[0], gradients(10)[1:])
        chain(gradients(300)[0], gradients(300)[1:])

    (table,) = reduction_table(measure_reductions(run))
    assert [row[3] for row in table.rows] == [300, 10]


def test_what_the_function_raises_is_raised_and_the_watch_is_gone():
    def run():
        raise KeyError("x")

    with pytest.raises(KeyError):
        measure_reductions(run)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
