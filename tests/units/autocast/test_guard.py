"""Guards: what leaks out of a block, what crosses a region, what is stale, and what autocast never saw."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guarded import guard
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampcheck
from ampcheck.autocast.guards.guard import GUARD_CHECKS, judge_call
from ampcheck.autocast.state import nesting
from ampcheck.checks.causes import with_causes
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Run, Verdict, collect
from ampcheck.outcome.raising import with_test
from ampcheck.torchtools.global_state import changed, read_state, restore_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    torch.manual_seed(0)
    before = read_state()
    yield
    after = read_state()
    restore_state(before)
    assert changed(before, after) == {}


def region(dtype: torch.dtype = BF16, **options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype, **options)


def judged(function: Callable[[], Any], *checks: str) -> Run:
    return judge_call(function, "it", checks or None)


def bad(run: Run) -> list[tuple[str, str]]:
    return [(f.check, f.verdict.value) for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]


def only(run: Run) -> Finding:
    (finding,) = (f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN))
    return finding


def verdict(run: Run, check: str) -> Verdict:
    (found,) = {f.verdict for f in run.findings if f.check == check}
    return found


def line_of(text: str) -> int:
    """The one line of this file that ends with a marker."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return number


# --- the context manager


def test_a_clean_block_passes_and_the_run_says_what_was_looked_at() -> None:
    model = nn.Linear(4, 4)
    with guard() as seen:
        with region():
            loss = model(torch.randn(2, 4)).float().sum()
        loss.backward()
    assert seen.run is not None
    assert bad(seen.run) == []
    assert {f.check for f in seen.run.findings} == set(GUARD_CHECKS)
    assert seen.run.coverage.seen["autocast ops"] > 0
    assert seen.run.coverage.seen["backward calls"] == 1


def test_a_block_that_runs_nothing_passes_no_check_but_the_one_that_looked() -> None:
    run = judged(lambda: None)
    seen = {"autocast-state": Verdict.PASS, "coverage": Verdict.INCOMPLETE}
    expected = {check: seen.get(check, Verdict.SKIP) for check in (*GUARD_CHECKS, "coverage")}
    assert {f.check: f.verdict for f in run.findings} == expected


def test_a_failure_raises_with_its_check_and_is_emitted_first() -> None:
    def leak() -> None:
        with guard("autocast-state", subject="the step"):
            torch.set_autocast_enabled("cpu", True)

    with collect() as runs, pytest.raises(AssertionError, match=r"\[autocast-state\]"):
        leak()
    assert [f.subject for f in runs[0].findings] == ["the step"]
    assert not torch.is_autocast_enabled("cpu")


def test_without_raises_the_findings_are_in_the_run_only() -> None:
    with collect() as runs, guard(raises=False) as seen:
        torch.set_default_dtype(torch.float64)
    assert with_test(seen.run) == runs[0]
    assert bad(runs[0]) == [("autocast-state", "fail")]


def test_an_exception_of_the_block_goes_on_and_the_run_is_emitted() -> None:
    def leak() -> None:
        with guard():
            torch.set_autocast_enabled("cpu", True)
            raise KeyError("mine")

    with collect() as runs, pytest.raises(KeyError, match="mine"):
        leak()
    assert bad(runs[0]) == [("autocast-state", "fail")]


@pytest.mark.parametrize("use", [lambda: guard("nope").__enter__(), lambda: judged(lambda: None, "autocast")])
def test_an_unknown_check_is_refused_with_the_valid_ones(use: Callable[[], Any]) -> None:
    with pytest.raises(UsageError) as caught:
        use()
    assert all(slug in str(caught.value) for slug in GUARD_CHECKS)


def test_guards_nest_and_each_gives_its_own_run() -> None:
    with guard("autocast-state") as outer, guard("autocast-scope", raises=False) as inner, region():
        torch.ones(1, requires_grad=True).sum().backward()
    assert outer.run is not None
    assert inner.run is not None
    assert bad(outer.run) == []
    assert bad(inner.run) == [("autocast-scope", "fail")]


def test_taps_are_gone_when_the_block_ends_also_by_an_exception() -> None:
    def taps() -> list[Any]:
        cast = torch.amp.autocast_mode.autocast
        owners = (cast.__init__, cast.__enter__, cast.__exit__, threading.Thread.start, ThreadPoolExecutor.submit)
        return [*owners, torch.autograd._engine_run_backward, torch._C._len_torch_dispatch_stack()]

    before = taps()
    with pytest.raises(KeyError), guard():
        raise KeyError
    assert taps() == before


def test_guard_is_a_public_name() -> None:
    assert guard is guard


def test_a_call_that_stops_for_a_reason_of_its_own_fails_as_not_looked_at() -> None:
    def stops() -> None:
        raise KeyError("mine")

    assert bad(judged(stops)) == [("coverage", "fail")]


# --- autocast-state

LEAKS: dict[str, Callable[[], Any]] = {
    "autocast on cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast on cuda": lambda: torch.set_autocast_enabled("cuda", True),
    "autocast dtype on xpu": lambda: torch.set_autocast_dtype("xpu", BF16),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "autocast nesting depth": torch.autocast_increment_nesting,
    "float32 matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "TF32 in matmul": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "TF32 in cuDNN": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "float16 reduced-precision reduction": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_switch_that_is_left_changed_is_named_and_put_back(name: str) -> None:
    before = read_state()
    finding = only(judged(LEAKS[name], "autocast-state"))
    assert finding.verdict is Verdict.FAIL
    assert f"{name} was " in finding.message
    assert changed(before, read_state()) == {}


@given(st.sets(st.sampled_from(sorted(LEAKS)), min_size=1))
def test_all_switches_that_are_left_changed_are_named_together_and_put_back(names: set[str]) -> None:
    before = read_state()
    message = only(judged(lambda: [LEAKS[name]() for name in sorted(names)], "autocast-state")).message
    assert {name for name in LEAKS if f"{name} was " in message} >= names
    assert changed(before, read_state()) == {}


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch before 2.9 has no fp32_precision")
def test_the_newer_precision_switches_are_seen_where_the_old_flags_cannot_be_read_any_more() -> None:
    before = torch.backends.cuda.matmul.fp32_precision

    def leak() -> None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    finding = only(judged(leak, "autocast-state"))
    assert f"torch.backends.cuda.matmul.fp32_precision was {before} and is tf32" in finding.message
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_block_that_puts_its_switches_back_passes() -> None:
    def healthy() -> None:
        torch.set_float32_matmul_precision("high")
        with region(), region(FP16, cache_enabled=False), region(enabled=False):
            torch.ones(2, 2) @ torch.ones(2, 2)
        torch.set_float32_matmul_precision("highest")

    assert bad(judged(healthy)) == []


def test_a_region_that_compiled_code_leaves_open_is_found_and_closed() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        with region():
            return x.index_select(0, index)

    def leak() -> None:
        torch._dynamo.reset()
        with pytest.raises(IndexError):
            pick(torch.randn(4, 4), torch.tensor([99]))

    finding = only(judged(leak, "autocast-state"))
    assert "autocast nesting depth was 0 and is 1" in finding.message
    assert nesting() == 0


# --- autocast-scope


def step_inside(steps: int = 1, *, inside: bool = True, clear: bool = False) -> Callable[[], None]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with region(enabled=inside):
            for _ in range(steps):
                with region(enabled=True):
                    loss = model(torch.ones(2, 4)).float().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if clear:
                    torch.clear_autocast_cache()

    return run


def test_backward_inside_a_region_fails_at_its_line() -> None:
    def run() -> None:
        with region():
            loss = (torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)).float().sum()
            loss.backward()  # backward inside

    finding = only(judged(run))
    assert (finding.check, finding.verdict) == ("autocast-scope", Verdict.FAIL)
    assert finding.where.line == line_of("backward inside")


def test_grad_inside_a_region_fails_as_backward_does() -> None:
    def run() -> None:
        x = torch.ones(2, 2, requires_grad=True)
        with region():
            torch.autograd.grad((x @ x).float().sum(), x)

    assert bad(judged(run)) == [("autocast-scope", "fail")]


def test_an_optimizer_step_inside_a_region_fails() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight])

    def run() -> None:
        with region():
            optimizer.step()

    finding = only(judged(run))
    assert finding.check == "autocast-scope"
    assert finding.where.phase == "update"


def test_a_step_that_is_decorated_with_a_region_is_one_mistake() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([weight])

    @region()
    def step() -> None:
        optimizer.zero_grad()
        (weight @ weight).float().sum().backward()
        optimizer.step()

    def run() -> None:
        for _ in range(3):
            step()

    found = with_causes(judged(run, "autocast-scope").of(Verdict.FAIL))
    assert [(finding.where.phase, bool(finding.cause)) for finding in found] == [("backward", False), ("update", True)]


def test_a_whole_loop_inside_one_region_is_called_that() -> None:
    run = judged(step_inside(3), "autocast-scope")
    assert bad(run) == [("autocast-scope", "fail")] * 2
    assert any("the whole training loop runs inside one region (3 steps)" in f.message for f in run.findings)


def test_a_checkpoint_that_runs_its_own_backward_is_not_counted_as_one_inside() -> None:
    model = nn.Linear(4, 4)

    def run() -> None:
        with region():
            y = checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=True)
        y.float().sum().backward()

    result = judged(run)
    assert bad(result) == []
    assert result.coverage.seen["backward calls"] == 1


@pytest.mark.parametrize("inner", [False, True])
def test_a_gradient_that_belongs_to_a_forward_is_a_warning_inside_a_region(inner: bool) -> None:
    def run() -> None:
        x = torch.ones(2, 2, requires_grad=True)
        with region(enabled=inner):
            (gradient,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
        gradient.sum().backward()

    assert bad(judged(run)) == ([("autocast-scope", "warn")] if inner else [])


# --- autocast-cache


def test_a_weight_changed_while_its_cast_is_kept_fails_where_it_is_used_again() -> None:
    model = nn.Linear(4, 4)

    def run(change: Callable[[], Any]) -> Run:
        def steps() -> None:
            with region():
                model(torch.ones(2, 4))
                change()
                model(torch.ones(2, 4))  # stale use

        return judged(steps)

    def fill() -> None:
        with torch.no_grad():
            model.weight.fill_(3.0)

    def data() -> None:
        model.weight.data.add_(1.0)

    def swap() -> None:
        model.weight.data = torch.full((4, 4), 7.0)

    for change in (fill, data, swap):
        finding = only(run(change))
        assert (finding.check, finding.verdict) == ("autocast-cache", Verdict.FAIL)
        assert finding.where.line == line_of("stale use")
        assert "[4, 4]" in finding.message


def test_a_change_that_nobody_sees_is_no_finding() -> None:
    model = nn.Linear(4, 4)

    def run() -> None:
        with region():
            model(torch.ones(2, 4))
            model.weight.data.add_(1.0)
        with region():
            model(torch.ones(2, 4))
            model.weight.data.add_(1.0)
            torch.clear_autocast_cache()
            model(torch.ones(2, 4))
            kept = model.weight.detach().clone()
            model.weight.data.mul_(2.0)
            model.weight.data.copy_(kept)
            model(torch.ones(2, 4))
        with region(cache_enabled=False):
            model(torch.ones(2, 4))
            model.weight.data.add_(1.0)
            model(torch.ones(2, 4))

    run_ = judged(run)
    assert bad(run_) == []
    assert run_.coverage.seen["cached casts"] > 0


def test_a_nested_region_of_another_dtype_that_shares_a_weight_fails() -> None:
    model = nn.Linear(4, 4)

    def run() -> None:
        with region(BF16):
            model(torch.ones(2, 4))
            with region(FP16), pytest.raises(RuntimeError):
                model(torch.ones(2, 4))

    found = judged(run, "autocast-cache")
    assert bad(found) == [("autocast-cache", "fail")]
    assert "float16" in only(found).message


@pytest.mark.parametrize("cleared", [False, True], ids=["kept", "cleared"])
def test_casts_that_no_region_ever_drops_are_stale_after_the_weights_changed(cleared: bool) -> None:
    model, data = nn.Linear(4, 1), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        torch.set_autocast_dtype("cpu", BF16)
        for _ in range(3):
            optimizer.zero_grad()
            torch.set_autocast_enabled("cpu", True)
            out = model(data)
            torch.set_autocast_enabled("cpu", False)
            if cleared:
                torch.clear_autocast_cache()
            (out.float() - 1).square().mean().backward()
            optimizer.step()

    try:
        found = judged(run)
    finally:
        torch.clear_autocast_cache()
    assert {finding.check for finding in found.of(Verdict.FAIL)} == (set() if cleared else {"autocast-cache"})


# --- autocast-bypass


def test_an_in_place_product_of_mixed_dtypes_fails_where_it_raises() -> None:
    weight = torch.randn(2, 4)

    def run(product: Callable[..., Any]) -> Run:
        def low_rank() -> None:
            with region():
                hidden = torch.ones(3, 4) @ torch.ones(4, 2)
                product(torch.ones(3, 4), hidden, weight)

        return judged(low_rank)

    finding = only(run(torch.Tensor.addmm_))
    assert (finding.check, finding.verdict, finding.where.op) == ("autocast-bypass", Verdict.FAIL, "aten::addmm_")
    assert "addmm" in finding.hint
    assert bad(run(torch.Tensor.addmm)) == []


def test_an_in_place_variant_that_stays_narrow_where_the_rule_is_float32_fails() -> None:
    def run() -> None:
        x = torch.ones(2, 2, dtype=BF16)
        with region():
            x.cumsum_(0)

    def emulated() -> None:
        with ampcheck.emulate("cuda", BF16):
            torch.ones(2, 2, dtype=BF16).exp_()

    assert bad(judged(emulated)) == [("autocast-bypass", "fail")]
    assert bad(judged(run)) in ([], [("autocast-bypass", "fail")])


def test_an_out_variant_that_stays_in_float32_is_a_warning() -> None:
    a, out = torch.ones(2, 2), torch.empty(2, 2)

    def run() -> None:
        with region():
            torch.mm(a, a, out=out)

    finding = only(judged(run))
    assert (finding.check, finding.verdict, finding.where.op) == ("autocast-bypass", Verdict.WARN, "aten::mm.out")


def test_in_place_ops_without_a_rule_and_those_that_get_the_right_dtype_pass() -> None:
    def run() -> None:
        x = torch.ones(2, 2)
        with region():
            x.add_(1).mul_(2).clamp_(0, 1).copy_(torch.zeros(2, 2, dtype=BF16))
            low = x.to(BF16)
            low.addmm_(low, low)
            x.cumsum_(0)
        x.addmm_(x, x)

    assert bad(judged(run)) == []


def test_the_in_place_ops_of_an_optimizer_are_not_the_users() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=BF16))
    weight.grad = torch.ones(4, dtype=BF16)
    optimizer = torch.optim.Adam([weight], foreach=False)

    def run() -> None:
        with ampcheck.emulate("cuda", BF16):
            optimizer.step()

    assert bad(judged(run, "autocast-bypass")) == []


# --- autocast-thread


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def in_pool(work: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("start", [in_thread, in_pool])
def test_a_thread_that_lost_autocast_fails(start: Callable[[Callable[[], Any]], None]) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def lost() -> None:
        model(x)  # lost

    def default() -> None:
        with torch.autocast("cpu"):
            model(x)

    for work in (lost, default):

        def run(work: Callable[[], Any] = work) -> None:
            with region(FP16):
                start(work)

        finding = only(judged(run))
        assert (finding.check, finding.verdict) == ("autocast-thread", Verdict.FAIL)
        assert "float16" in finding.message


@pytest.mark.parametrize("start", [in_thread, in_pool])
def test_a_thread_that_chose_its_state_passes(start: Callable[[Callable[[], Any]], None]) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def restored() -> None:
        with region(FP16):
            model(x)

    def other() -> None:
        with region(BF16):
            model(x)

    def off() -> None:
        with region(enabled=False):
            model(x)

    def no_rule() -> None:
        (x + 1).relu()

    for work in (restored, other, off, no_rule):

        def run(work: Callable[[], Any] = work) -> None:
            with region(FP16):
                start(work)

        result = judged(run)
        assert bad(result) == []
        assert verdict(result, "autocast-thread") is Verdict.PASS


def test_a_thread_started_without_autocast_is_not_looked_at() -> None:
    model = nn.Linear(4, 4)
    result = judged(lambda: in_thread(lambda: model(torch.ones(2, 4))))
    assert bad(result) == []
    assert verdict(result, "autocast-thread") is Verdict.SKIP


def test_a_thread_that_outlives_the_block_is_left_alone_afterwards() -> None:
    go, model = threading.Event(), nn.Linear(4, 4)
    results: list[torch.Tensor] = []

    def work() -> None:
        go.wait()
        results.append(model(torch.ones(2, 4)))

    thread = threading.Thread(target=work)
    with guard(raises=False) as seen, region():
        thread.start()
    go.set()
    thread.join()
    assert seen.run is not None
    assert bad(seen.run) == []
    assert len(results) == 1


# --- autocast-checkpoint


class Checkpoint(torch.autograd.Function):
    """A checkpoint written by hand."""

    @staticmethod
    def forward(ctx: Any, function: Any, restore: bool, x: torch.Tensor) -> torch.Tensor:
        ctx.function, ctx.on = function, restore and torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", BF16, enabled=ctx.on):
            y = ctx.function(x)
        y.backward(grad.to(y.dtype))
        return None, None, x.grad


@pytest.mark.parametrize("restore", [False, True])
def test_a_hand_written_checkpoint_must_restore_autocast(restore: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def run() -> None:
        with region():
            y = Checkpoint.apply(model, restore, torch.randn(4, 8, requires_grad=True))
        y.float().sum().backward()

    result = judged(run)
    assert bad(result) == ([] if restore else [("autocast-checkpoint", "fail")])
    assert result.coverage.seen["recomputed ops"] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_pytorch_passes(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def run() -> None:
        with region():
            y = checkpoint(model, torch.randn(4, 8, requires_grad=True), use_reentrant=reentrant)
        y.float().sum().backward()

    result = judged(run)
    assert bad(result) == []
    assert verdict(result, "autocast-checkpoint") is Verdict.PASS


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_flag_that_changes_the_dtype_before_backward_fails(reentrant: bool) -> None:
    weight = nn.Parameter(torch.randn(8, 8))

    def run() -> None:
        amp = True

        def block(x: torch.Tensor) -> torch.Tensor:
            with region(enabled=amp):
                return (x @ weight).float()  # recomputed

        y = checkpoint(block, torch.randn(2, 8, requires_grad=True), use_reentrant=reentrant)
        amp = False
        y.sum().backward()

    found = judged(run, "autocast-checkpoint")
    finding = next(f for f in found.findings if f.check == "autocast-checkpoint")
    assert finding.verdict is Verdict.FAIL
    assert finding.where.line == line_of("recomputed")


def test_a_module_used_with_and_without_autocast_is_no_recomputation() -> None:
    model = nn.Linear(8, 8)

    def run() -> None:
        x = torch.randn(2, 8, requires_grad=True)
        with region():
            y = model(x)
        model(x).sum().backward()
        y.float().sum().backward()

    assert bad(judged(run)) == []


# --- autocast-function


def product(backward: Callable[..., Any], decorate: bool) -> Any:
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    class Product(torch.autograd.Function):
        pass

    if decorate:
        forward = torch.amp.custom_fwd(forward, device_type="cpu")
        backward = torch.amp.custom_bwd(backward, device_type="cpu")
    Product.forward = staticmethod(forward)  # type: ignore[method-assign]
    Product.backward = staticmethod(backward)  # type: ignore[method-assign]
    return Product.apply


def plain_backward(ctx: Any, grad: torch.Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return grad @ weight.t(), x.t() @ grad  # without autocast


def explicit_backward(ctx: Any, grad: torch.Tensor) -> Any:
    x, weight = ctx.saved_tensors
    with region():
        return grad @ weight.t(), x.t() @ grad


def elementwise_backward(ctx: Any, grad: torch.Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return (grad * 2).sum() + torch.zeros_like(x), torch.zeros_like(weight)


def run_product(function: Any, *, on: bool = True) -> Callable[[], None]:
    def run() -> None:
        x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        with region(enabled=on):
            y = function(x, weight)
        y.float().sum().backward()

    return run


def test_a_function_whose_backward_forgets_autocast_fails_at_its_line() -> None:
    run = judged(run_product(product(plain_backward, decorate=False)))
    found = {(f.check, f.verdict) for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)}
    assert found == {("autocast-function", Verdict.FAIL)}
    assert {f.where.line for f in run.of(Verdict.FAIL)} == {line_of("without autocast")}


@pytest.mark.parametrize(
    ("backward", "decorate", "on"),
    [
        (plain_backward, True, True),
        (plain_backward, False, False),
        (explicit_backward, False, True),
        (elementwise_backward, False, True),
    ],
)
def test_a_function_that_restores_autocast_or_does_not_need_it_passes(backward: Any, decorate: bool, on: bool) -> None:
    assert bad(judged(run_product(product(backward, decorate), on=on))) == []


def cast_backward(ctx: Any, grad: torch.Tensor) -> Any:
    x, weight = ctx.saved_tensors
    grad = grad.to(torch.float32)
    return grad @ weight.t(), x.t() @ grad


def test_a_backward_that_casts_to_float32_by_itself_passes() -> None:
    assert bad(judged(run_product(product(cast_backward, decorate=False)))) == []


def test_a_backward_that_runs_in_float32_without_a_cast_of_its_own_is_a_warning() -> None:
    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return (x @ weight).float()

        backward = staticmethod(plain_backward)

    run = judged(run_product(Wide.apply))
    assert {(f.check, f.verdict) for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)} == {
        ("autocast-function", Verdict.WARN)
    }


def test_a_backward_that_stays_narrow_where_the_rule_is_float32_fails() -> None:
    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * ctx.saved_tensors[0].exp()

    def run() -> None:
        with ampcheck.emulate("cuda", BF16):
            y = Log.apply(torch.ones(2, dtype=BF16, requires_grad=True))
            with torch.autocast("cpu", enabled=False):
                y.float().sum().backward()

    assert bad(judged(run, "autocast-function")) == [("autocast-function", "fail")]


class Modern(torch.autograd.Function):
    """A Function whose forward is not handed the context."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = staticmethod(plain_backward)


def test_a_function_with_setup_context_is_judged_as_any_other() -> None:
    run = judged(run_product(Modern.apply))
    assert {f.check for f in run.of(Verdict.FAIL)} == {"autocast-function"}
    assert bad(judged(run_product(Modern.apply, on=False))) == []


# --- policy-unregistered and policy-banned


@pytest.fixture
def custom_op() -> Iterator[Any]:
    library = torch.library.Library("ampcheck_guard_test", "DEF")
    library.define("join(Tensor a, Tensor b) -> Tensor")

    def join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype is not b.dtype:
            raise RuntimeError("a and b must have one dtype")
        return a + b

    library.impl("join", join, "CPU")
    yield torch.ops.ampcheck_guard_test.join
    library._destroy()


def test_an_op_without_a_rule_that_raises_on_mixed_dtypes_fails(custom_op: Any) -> None:
    def run(*dtypes: torch.dtype) -> None:
        with region():
            custom_op(*(torch.ones(2, dtype=dtype) for dtype in dtypes))

    finding = only(judged(lambda: run(BF16, FP32)))
    assert (finding.check, finding.verdict) == ("policy-unregistered", Verdict.FAIL)
    assert finding.where.op == "ampcheck_guard_test::join"
    assert bad(judged(lambda: run(BF16, BF16))) == []


def test_an_op_whose_exception_the_block_handles_is_a_warning(custom_op: Any) -> None:
    def run() -> None:
        with region():
            with pytest.raises(RuntimeError):
                custom_op(torch.ones(2, dtype=BF16), torch.ones(2))
            with pytest.raises(RuntimeError):
                torch.ones(2, 2).addmm_(torch.ones(2, 2, dtype=BF16), torch.ones(2, 2))

    assert sorted(bad(judged(run))) == [("autocast-bypass", "warn"), ("policy-unregistered", "warn")]


def test_writing_16_bits_into_a_float32_tensor_by_index_fails_with_what_to_cast() -> None:
    def run() -> None:
        table = torch.zeros(4, 4)
        with region():
            table[torch.tensor([1, 2])] = torch.ones(2, 4) @ torch.ones(4, 4)

    finding = only(judged(run))
    assert (finding.check, finding.where.op) == ("policy-unregistered", "aten::index_put_")
    assert "what is written" in finding.hint


def test_an_op_that_raises_for_another_reason_is_not_blamed_on_autocast() -> None:
    def run() -> None:
        with region():
            torch.index_select(torch.ones(2), 0, torch.tensor([5]))

    assert bad(judged(run)) == [("coverage", "fail")]


def test_a_banned_op_fails_with_the_replacement_that_pytorch_names() -> None:
    def loss(logits: bool) -> None:
        with ampcheck.emulate("cuda", FP16):
            x, y = torch.zeros(4), torch.zeros(4)
            F.binary_cross_entropy_with_logits(x, y) if logits else F.binary_cross_entropy(x.sigmoid(), y)  # banned

    finding = only(judged(lambda: loss(False)))
    assert (finding.check, finding.where.op) == ("policy-banned", "aten::binary_cross_entropy")
    assert "binary_cross_entropy_with_logits" in finding.hint
    assert finding.where.line == line_of("banned")
    assert bad(judged(lambda: loss(True))) == []


# --- healthy training


def training(wrap: Callable[..., Any]) -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def run() -> None:
        for _ in range(3):
            with region(FP16):
                loss = wrap(model, torch.randn(4, 8, requires_grad=True)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                model(torch.randn(4, 8))

    return run


@pytest.mark.parametrize("kind", ["plain", "reentrant", "recorded"])
def test_a_healthy_training_step_gives_no_finding(kind: str) -> None:
    def wrap(model: nn.Module, x: torch.Tensor) -> Any:
        return model(x) if kind == "plain" else checkpoint(model, x, use_reentrant=kind == "reentrant")

    result = judged(training(wrap))
    assert bad(result) == []
    assert result.coverage.seen["optimizer steps"] == 3


def test_compiled_code_runs_compiled_under_the_guards_and_is_told_as_unseen() -> None:
    model = nn.Linear(8, 8)
    compiled = torch.compile(model, backend="aot_eager")

    def run() -> None:
        with region():
            loss = compiled(torch.ones(2, 8)).float().sum()
        loss.backward()

    torch._dynamo.reset()
    result = judged(run)
    assert bad(result) == []
    assert "ops of code that torch.compile wrote" in result.coverage.unseen


def test_a_region_inside_compiled_code_is_followed_without_a_break() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def product_of(x: torch.Tensor) -> torch.Tensor:
        with region():
            return x @ x

    def run() -> None:
        assert product_of(torch.ones(2, 2)).dtype is BF16
        assert product_of(torch.ones(2, 2)).dtype is BF16

    torch._dynamo.reset()
    result = judged(run)
    assert bad(result) == []
    assert result.coverage.seen["autocast ops"] > 0


def test_weights_made_in_inference_mode_are_no_obstacle() -> None:
    def run() -> None:
        with torch.inference_mode(), region():
            model = nn.Linear(4, 4)
            model(model(torch.ones(2, 4)))

    assert bad(judged(run)) == []


@pytest.mark.filterwarnings(
    "ignore:User provided device_type"
)  # a build for CUDA without a device, at the recomputation
def test_an_emulation_that_ends_before_a_checkpoint_recomputes_is_told() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), torch.ones(2, 4, requires_grad=True)

    def ends_early() -> None:
        with ampcheck.emulate("cuda", torch.float16):
            out = checkpoint(model, x, use_reentrant=True)
        out.sum().backward()

    def lasts() -> None:
        with ampcheck.emulate("cuda"):
            with torch.autocast("cuda", torch.float16):
                out = checkpoint(model, x, use_reentrant=True)
            out.sum().backward()

    assert only(judged(ends_early)).check == "autocast-checkpoint"
    assert not judged(lasts).failed


def test_a_loop_in_which_autocast_was_never_on_is_not_passed() -> None:
    x = torch.ones(2, requires_grad=True)
    (scope,) = [f for f in judged(lambda: x.sum().backward()).findings if f.check == "autocast-scope"]
    assert scope.verdict is Verdict.SKIP
    assert "never on" in scope.message
