"""Guards at their edges: nothing to look at, threads that overlap, backward code that is no recomputation."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guarded import guard
from torch import nn

import ampcheck
from ampcheck.autocast.guards.guard import GUARD_CHECKS, judge_call
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.torchtools.global_state import changed, read_state, restore_state

BF16, FP16 = torch.bfloat16, torch.float16


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


def of(run: Run, check: str) -> Finding:
    return next(f for f in run.findings if f.check == check)


# --- a run that looked at nothing fails

LOOKING = sorted(set(GUARD_CHECKS) - {"autocast-state"})


@pytest.mark.parametrize("check", LOOKING)
def test_a_block_that_runs_nothing_fails_when_its_switches_were_not_asked_for(check: str) -> None:
    with pytest.raises(AssertionError, match="nothing was looked at"), guard(check):
        pass
    run = ampcheck.audit(lambda: None, checks=[check])
    assert bad(run) == [("coverage", "fail")]
    assert "switches" not in run.coverage.seen


def test_a_block_that_runs_nothing_does_not_fail_when_its_switches_were_compared() -> None:
    for run in (ampcheck.audit(lambda: None), ampcheck.audit(lambda: None, checks=["autocast-state"])):
        assert bad(run) == []
        assert of(run, "autocast-state").verdict is Verdict.PASS
        assert run.coverage.seen["switches"] > 0


@pytest.mark.parametrize("check", LOOKING)
def test_a_block_that_trains_is_evidence_for_every_check(check: str) -> None:
    def run() -> None:
        with region():
            loss = nn.Linear(4, 1)(torch.ones(2, 4)).float().sum()
        loss.backward()

    assert bad(judged(run, check)) == []


@pytest.mark.parametrize("checks", [None, ["autocast-state"], ["autocast-thread"]])
def test_a_training_loop_that_runs_no_op_fails(checks: list[str] | None) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> float:
        return 0.0

    def works(number: int) -> float:
        with region():
            loss = model(torch.ones(2, 4)).float().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    parts = {"model": model, "optimizer": optimizer}
    # A warning that no backward pass ran, and the failure that nothing was looked at.
    assert bad(ampcheck.audit({**parts, "step": step}, checks=checks)) == [("coverage", "warn"), ("coverage", "fail")]
    assert bad(ampcheck.audit({**parts, "step": works}, checks=checks)) == []


def test_an_exception_that_ends_a_block_is_told_alone() -> None:
    with pytest.raises(KeyError), guard("autocast-thread") as seen:
        raise KeyError("mine")
    assert seen.run is not None
    assert bad(seen.run) == []
    assert "code after the KeyError" in seen.run.coverage.unseen


# --- what an emulation says of itself


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, which is used then")
def test_every_verdict_on_an_emulated_device_says_that_it_is_emulated() -> None:
    def call() -> None:
        with torch.autocast("cuda", FP16):
            nn.Linear(4, 4)(torch.ones(2, 4))

    subject = ampcheck.Subject(call, name="mine")
    assert {f.subject for f in ampcheck.audit(subject, device="cuda").findings} == {"mine [cuda emulated]"}
    assert {f.subject for f in ampcheck.audit(subject, device="cpu").findings} == {"mine"}


def test_a_ban_that_the_block_catches_is_not_claimed_to_be_absent() -> None:
    def run() -> None:
        with ampcheck.emulate("cuda", FP16):
            x = torch.ones(2, 2) @ torch.ones(2, 2)
            with pytest.raises(RuntimeError):
                F.binary_cross_entropy(x.float().sigmoid(), torch.zeros(2, 2))

    finding = of(judged(run), "policy-banned")
    assert finding.verdict is Verdict.PASS
    assert "no ban ended the block; a ban that the block catches is not seen" in finding.message


# --- what runs in backward and is no recomputation


def test_a_tensor_hook_that_calls_a_module_of_the_forward_is_no_recomputation() -> None:
    model = nn.Linear(4, 4)

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            model(grad.float())

    def run() -> None:
        with region():
            y = model(torch.randn(2, 4, requires_grad=True))
        y.register_hook(hook)
        y.float().sum().backward()

    assert bad(judged(run)) == []


def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


class Product(torch.autograd.Function):
    """Its forward and its backward share a helper, and its backward forgets autocast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return times(x, y).float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return times(grad, y.t()), times(x.t(), grad)


class Casting(Product):
    """Its backward casts to float32 by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return times(x, y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Product.backward(ctx, grad.to(torch.float32))


class Decorated(torch.autograd.Function):
    """Its backward runs under the autocast of its forward."""

    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    ("function", "found"), [(Product, {("autocast-function", "warn")}), (Casting, set()), (Decorated, set())]
)
def test_a_function_whose_forward_and_backward_share_a_helper_is_judged_as_a_function(
    function: Any, found: set[tuple[str, str]], create_graph: bool
) -> None:
    def run() -> None:
        x, y = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        with region():
            out = function.apply(x, y)
        torch.autograd.grad(out.float().sum(), (x, y), create_graph=create_graph)

    result = judged(run)
    assert set(bad(result)) == found
    assert result.coverage.seen["Function ops"] > 0


class Checkpoint(torch.autograd.Function):
    """A checkpoint written by hand that forgets autocast."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            result: torch.Tensor = function(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, torch.autograd.grad(y, x, grad.to(y.dtype))[0]


@pytest.mark.parametrize("options", [{}, {"retain_graph": True}, {"create_graph": True}])
def test_a_checkpoint_that_forgets_autocast_is_found_whatever_its_backward_keeps(options: dict[str, bool]) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

    def run() -> None:
        with region():
            y = Checkpoint.apply(model, x)
        torch.autograd.grad(y.float().sum(), x, **options)

    assert ("autocast-checkpoint", "fail") in bad(judged(run))


# --- kept casts


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def change(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight.add_(1.0)


def test_a_stale_cast_is_found_although_another_thread_entered_a_region_meanwhile() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    entered, go = threading.Event(), threading.Event()

    def other() -> None:
        with region():
            entered.set()
            go.wait(10)

    def run() -> None:
        with region():
            model(x)
            thread = threading.Thread(target=other)
            thread.start()
            entered.wait(10)
            change(model)
            first = model(x)
            second = F.linear(x.to(BF16), model.weight.detach().to(BF16), model.bias.detach().to(BF16))
            go.set()
            thread.join()
        assert not torch.equal(first, second), "PyTorch used the old values"

    assert bad(judged(run, "autocast-cache")) == [("autocast-cache", "fail")]


def test_a_cast_that_the_exit_of_another_thread_dropped_is_not_stale() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def other() -> None:
        with region():
            x.relu()

    def run() -> None:
        with region():
            model(x)
            in_thread(other)
            change(model)
            first = model(x)
            second = F.linear(x.to(BF16), model.weight.detach().to(BF16), model.bias.detach().to(BF16))
        assert torch.equal(first, second), "PyTorch made a new cast"

    assert bad(judged(run, "autocast-cache")) == []


@pytest.mark.parametrize("values", [[float("nan"), 1.0], [float("inf"), float("-inf")], [float("nan")] * 2])
def test_a_weight_with_values_that_are_not_finite_is_as_equal_to_its_copy_as_another(values: list[float]) -> None:
    weight = nn.Parameter(torch.tensor([values, [2.0, 3.0]]))
    x = torch.ones(2, 2)

    def run(by: float) -> None:
        with region():
            x @ weight
            with torch.no_grad():
                weight.copy_(weight.clone() + by)
            x @ weight

    assert bad(judged(lambda: run(0.0))) == []
    assert bad(judged(lambda: run(1.0))) == [("autocast-cache", "fail")]


# --- switches


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("after", [(False, False), (True, False), (True, True)])
def test_deterministic_algorithms_are_compared_and_put_back_with_warn_only(
    before: tuple[bool, bool], after: tuple[bool, bool]
) -> None:
    def now() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    held = now()
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        run = judged(lambda: torch.use_deterministic_algorithms(after[0], warn_only=after[1]), "autocast-state")
        assert bad(run) == ([] if before == after else [("autocast-state", "fail")])
        assert now() == before
    finally:
        torch.use_deterministic_algorithms(held[0], warn_only=held[1])


# --- blocks and pools of several threads


def taps() -> list[Any]:
    cast = torch.amp.autocast_mode.autocast
    return [
        *(cast.__init__, cast.__enter__, cast.__exit__),
        *(torch.autograd._engine_run_backward, threading.Thread.start),
        *(ThreadPool.apply_async, ThreadPool._map_async, ThreadPool.imap, ThreadPool.imap_unordered),
    ]


def test_blocks_that_overlap_in_two_threads_leave_no_tap_behind_and_each_sees_its_own() -> None:
    before, model, x = taps(), nn.Linear(4, 4), torch.ones(2, 4)
    opened, entered, left = threading.Event(), threading.Event(), threading.Event()
    runs: list[Run | None] = []

    def later() -> None:
        with guard(raises=False) as seen:
            entered.set()
            left.wait(10)
            with region():
                loss = model(x).float().sum()
                loss.backward()
        runs.append(seen.run)

    def earlier() -> None:
        with guard(raises=False) as seen:
            opened.set()
            entered.wait(10)
            with region():
                model(x)
        runs.append(seen.run)
        left.set()

    threads = [threading.Thread(target=earlier), threading.Thread(target=later)]
    threads[0].start()
    opened.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert [bad(run) for run in runs if run is not None] == [[], [("autocast-scope", "fail")]]
    assert taps() == before


WAYS: dict[str, Callable[[ThreadPool, Callable[[Any], Any]], Any]] = {
    "apply": lambda pool, work: pool.apply(work, (0,)),
    "map": lambda pool, work: pool.map(work, [0, 1]),
    "starmap": lambda pool, work: pool.starmap(work, [(0,), (1,)]),
    "imap": lambda pool, work: list(pool.imap(work, [0, 1])),
    "imap_unordered": lambda pool, work: list(pool.imap_unordered(work, [0, 1])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inside", [False, True])
def test_work_handed_to_a_pool_of_threads_is_followed_also_when_the_pool_was_made_before(
    way: str, inside: bool
) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def lost(number: int) -> None:
        model(x)

    def kept(number: int) -> None:
        with region():
            model(x)

    for work, found in ((lost, [("autocast-thread", "fail")]), (kept, [])):
        with ThreadPool(1) as made_before:

            def run(work: Callable[[int], None] = work, made_before: ThreadPool = made_before) -> None:
                if not inside:
                    with region():
                        WAYS[way](made_before, work)
                    return
                with region(), ThreadPool(1) as pool:
                    WAYS[way](pool, work)

            result = judged(run)
            assert bad(result) == found
            assert result.coverage.seen["thread ops"] > 0


def test_equal_code_in_two_files_is_named_by_its_own_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (
        "import torch\ndef run():\n    with torch.autocast('cpu', torch.bfloat16):\n"
        "        torch.ones(2, requires_grad=True).sum().backward()\n"
    )
    for name in ("first_copy.py", "second_copy.py"):
        (tmp_path / name).write_text(source)
        namespace = {}
        exec(compile(source, str(tmp_path / name), "exec"), namespace)
        with ampcheck.watch(checks=["autocast-scope"], fail_on="never") as seen:
            namespace["run"]()
        assert [f.where.file for f in seen.run.of(Verdict.FAIL)] == [name]


# --- a region for a device that this machine lacks

ABSENT = "cuda" if not torch.cuda.is_available() else "xpu"


def step_in_region_of(device: str, *, enabled: bool = True) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that it switches the region off
        with torch.autocast(device, BF16, enabled=enabled):  # for a device
            loss = nn.Linear(4, 1)(torch.ones(2, 4)).float().sum()
    loss.backward()


def test_a_step_in_a_region_for_a_device_that_is_not_there_is_incomplete_and_names_its_line() -> None:
    found = of(judged(lambda: step_in_region_of(ABSENT)), "autocast-scope")
    assert found.verdict is Verdict.INCOMPLETE
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[(found.where.line or 0) - 1].endswith("# for a device")
    assert f"this machine has no {ABSENT}" in found.message


def test_such_a_region_is_no_defect_where_it_is_off_or_another_is_on() -> None:
    for run in (lambda: step_in_region_of(ABSENT, enabled=False), lambda: [*map(step_in_region_of, (ABSENT, "cpu"))]):
        assert of(judged(run), "autocast-scope").verdict is Verdict.PASS


def test_under_emulation_such_a_region_acts() -> None:
    def run() -> None:
        with ampcheck.emulate("cuda"):
            step_in_region_of("cuda")

    assert of(judged(run), "autocast-scope").verdict is Verdict.PASS
