"""The main job: every verdict has evidence, bad input is one clear sentence, and nothing of the user's is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcheck
from ampcheck import Subject, Verdict, assert_numerics, audit, demo, watch
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Listener, listening
from ampcheck.core.run import Run, collect
from ampcheck.numerics.checks import OBSERVABLE

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, which is used then")


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        nn.init.constant_(self.inner.weight, 100.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x.abs() + 1))


def _checks(run: Run, verdict: Verdict) -> set[str]:
    return {finding.check for finding in run.of(verdict)}


def test_the_demo_is_safe_in_both_formats_forward_and_backward() -> None:
    run = audit(demo.subject(), compile=False)
    assert not run.failed
    assert set(run.counts()) == {Verdict.PASS, Verdict.SKIP}
    assert {f.check for f in run.of(Verdict.SKIP)} == {
        "integer-cast",
        "policy-unregistered",
    }  # no integer cast, no custom op
    assert {"ops", "tensors", "modules", "outputs", "gradients"} <= set(run.coverage.seen)
    phases = {site.phase for model_map in run.maps for site in model_map.sites}
    assert phases == {"forward", "backward"}
    assert run.environment["torch"] == torch.__version__


def test_every_verdict_says_what_it_looked_at() -> None:
    run = audit(demo.subject(), dtype="bfloat16", compile=False)
    for finding in run.of(Verdict.PASS):
        assert finding.seen, finding


def test_the_compiled_model_is_judged_against_float64_too() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    run = audit((model, torch.randn(4, 16)), dtype="bfloat16")
    compiled = [f for f in run.findings if "compiled" in f.subject]
    assert {f.check for f in compiled} >= {"overflow", "precision-loss", "nonfinite-gradient", "coverage"}
    assert run.coverage.seen["graphs"] >= 1
    assert not run.failed


def test_a_compiled_run_without_a_graph_is_not_a_pass() -> None:
    class Excluded(nn.Module):
        @torch._dynamo.disable
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    run = audit((Excluded(), torch.randn(4).bfloat16()))
    (coverage,) = [f for f in run.findings if f.check == "coverage" and "compiled" in f.subject]
    assert coverage.verdict in (Verdict.FAIL, Verdict.SKIP)
    assert "compile" in coverage.message


def test_a_recurrent_network_that_dynamo_declines_is_skipped_with_its_reason() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x)[0]

    run = audit((Recurrent(), torch.randn(3, 2, 4)), dtype="bfloat16")
    assert not run.failed, [f.message for f in run.of(Verdict.FAIL)]


def test_the_callers_autocast_does_not_reach_the_judge() -> None:
    class Rough(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1000) - 1000

    model = nn.Sequential(nn.Linear(16, 16), Rough())
    with torch.autocast("cpu", torch.bfloat16):
        run = audit((model, torch.randn(8, 16)), dtype="bfloat16", compile=False)
    assert "precision-loss" in _checks(run, Verdict.FAIL)


def test_positions_that_the_model_itself_rounds_are_whole_in_the_judge() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            position = torch.arange(x.shape[1]).to(torch.bfloat16)
            return self.head(self.embed(x) + (position[:, None] * 0.3).sin())

    run = audit((Positions(), torch.randn(1, 600, 8)), dtype="bfloat16")
    failed = {(f.check, "eager" in f.subject) for f in run.of(Verdict.FAIL)}
    assert ("integer-cast", True) in failed
    assert ("precision-loss", True) in failed


def test_modules_in_a_closure_are_copied_too() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    run = audit((lambda x: net(x), torch.randn(8, 4)), dtype="bfloat16", compile=False)
    assert run.coverage.seen["gradients"] == 4
    assert int(net[1].num_batches_tracked) == 0
    assert all(parameter.grad is None for parameter in net.parameters())


def test_complex_buffers_keep_their_imaginary_part_in_the_reference() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)
            self.register_buffer("turns", torch.polar(torch.ones(6, 4), torch.arange(24.0).view(6, 4)))

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(self.proj(x).float().unflatten(-1, (4, 2)).contiguous())
            return torch.view_as_real(pairs * self.turns.to(pairs.dtype)).flatten(-2)

    assert not audit((Rotary(), torch.randn(2, 6, 8)), dtype="bfloat16", compile=False).failed


def test_a_near_tie_does_not_excuse_an_error_of_another_origin() -> None:
    class Rough(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1000) - 1000

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), Rough(), nn.Flatten(), nn.Linear(8 * 49, 4))
    run = audit((net, torch.randn(4, 3, 16, 16)), dtype="bfloat16", compile=False)
    assert "precision-loss" in _checks(run, Verdict.FAIL)


def test_successive_calls_and_regional_blocks_are_subjects() -> None:
    linear = nn.Linear(4, 4)
    several = audit((linear, [(torch.randn(2, 4),), (torch.randn(3, 4),)]), dtype="bfloat16", compile=False)
    assert several.coverage.seen["outputs"] == 2
    blocks = audit(([nn.Linear(4, 4), nn.Linear(4, 4)], [(torch.randn(2, 4),)]), dtype="bfloat16", compile=False)
    assert not blocks.failed
    assert blocks.coverage.seen["gradients"] == 4


def test_a_subject_that_computes_nothing_is_a_failure() -> None:
    run = audit((lambda x: None, torch.randn(3)), compile=False)
    assert "coverage" in _checks(run, Verdict.FAIL)


def test_a_model_kept_in_16_bits_is_run_as_it_is() -> None:
    run = audit((nn.Linear(4, 4).half(), torch.randn(2, 4).half()), compile=False)
    assert {f.subject for f in run.findings} == {"subject [float64]", "subject [float16 native, eager]"}


def test_state_of_the_model_is_not_run_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    audit((model, torch.randn(8, 4)), compile=False)
    assert int(model[1].num_batches_tracked) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autocast_state_is_left_as_it_was() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        audit((nn.Linear(4, 4), torch.randn(2, 4)), dtype="float16", compile=False)
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_noise_is_the_same_in_every_arm_so_random_models_are_comparable_in_eager_mode() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.mT + torch.randn(4, 4, dtype=x.dtype)

    run = audit((Noisy(), torch.randn(4, 8).bfloat16()), compile=False)
    assert not run.failed


def test_a_random_model_draws_the_same_numbers_when_compiled() -> None:
    run = audit((nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train(), torch.randn(4, 8)), dtype="bfloat16")
    compared = [f for f in run.findings if f.subject.endswith("compiled]") and f.check == "compiled-error"]
    assert [f.verdict for f in compared] == [Verdict.PASS]


def test_an_exception_of_compiled_code_alone_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("planted")

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_with(model, backend=broken))
    run = audit((lambda x: x * 2, torch.randn(4).bfloat16()))
    assert "compiled-exception" in _checks(run, Verdict.FAIL)


def test_an_exception_that_two_stages_find_is_reported_once_with_its_line() -> None:
    class ByHand(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            context = torch.autocast("cpu", torch.bfloat16)
            context.__enter__()
            torch._dynamo.graph_break()
            y = x @ x
            context.__exit__(None, None, None)
            return y.float()

    compiled = torch.compile(ByHand(), backend="eager")
    found = [f for f in audit((compiled, [torch.ones(4, 4)])).of(Verdict.FAIL) if f.check == "compiled-exception"]
    assert [bool(f.where.line) for f in found] == [True]


def test_the_assertion_lists_every_failure_with_place_and_hint() -> None:
    with collect() as runs, pytest.raises(AssertionError) as caught:
        assert_numerics(Overflows(), torch.randn(2, 8), dtype="float16", name="planted")
    text = str(caught.value)
    assert "[overflow] fail: planted" in text
    assert "where: forward, inner, aten::addmm" in text
    assert "hint:" in text
    assert len(runs) == 1
    assert runs[0].failed


def test_the_same_model_is_safe_in_bfloat16() -> None:
    run = assert_numerics(Overflows(), torch.randn(2, 8), dtype="bfloat16")
    assert run.coverage.total > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"checks": ["overflows"]},
            "checks must be one of low-precision-error, nonfinite-reference",
        ),
        ({"dtype": "float32"}, "dtype must be one of float16, bfloat16; found float32"),
        ({"dtype": "float17"}, "float17"),
        ({"device": "gpu"}, "'gpu' is no device"),
        ({"autocast": False}, "needs a model with 16-bit weights or inputs"),
    ],
)
def test_bad_input_is_one_clear_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        audit((nn.Linear(4, 4), torch.randn(2, 4)), **options)  # type: ignore[arg-type]
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def trained(steps_inside: bool) -> dict[str, object]:
    """A training loop whose optimizer steps inside or outside of the autocast region."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
            if steps_inside:
                loss.backward()
                optimizer.step()
        if not steps_inside:
            loss.backward()
            optimizer.step()
        return float(loss)

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


def test_the_use_of_autocast_in_a_training_loop_is_judged() -> None:
    run = audit(trained(steps_inside=True))
    assert _checks(run, Verdict.FAIL) == {"autocast-scope"}
    assert run.title == "audit of subject"
    assert not audit(trained(steps_inside=False)).failed


def test_the_use_of_autocast_in_a_callable_is_judged() -> None:
    def leaks() -> None:
        torch.set_autocast_enabled("cpu", True)

    run = audit(leaks, checks=["autocast-state"])
    assert _checks(run, Verdict.FAIL) == {"autocast-state"}
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(UsageError, match="of kind 'call', which is judged by"):
        audit(leaks, checks=["low-precision-error"])


def _divides() -> None:
    _ = 1 / 0


@pytest.mark.parametrize(
    ("call", "checks", "verdict"),
    [
        (lambda: None, None, Verdict.INCOMPLETE),
        (lambda: None, ["tf32"], Verdict.FAIL),
        (_divides, ["tf32"], Verdict.FAIL),
        (_divides, None, Verdict.FAIL),
        (lambda: torch.ones(3) @ torch.ones(3), ["tf32"], Verdict.PASS),
    ],
)
def test_a_callable_is_judged_by_the_ops_that_it_runs(call: Any, checks: Any, verdict: Verdict) -> None:
    run = audit(call, checks=checks)
    assert [f.verdict for f in run.findings if f.check == "coverage"] == [verdict], run


def test_a_loss_that_autocast_bans_on_cuda_is_found_without_cuda() -> None:
    """The CPU's autocast runs binary_cross_entropy in float32; CUDA's raises."""

    class Banned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return nn.functional.binary_cross_entropy(self.linear(x).sigmoid(), target)

    subject = (Banned(), (torch.randn(2, 4), torch.ones(2, 1)))
    run = audit(subject, device="cuda", dtype="float16", compile=False)
    (found,) = [f for f in run.of(Verdict.FAIL) if f.check == "policy-banned"]
    assert "binary_cross_entropy_with_logits" in found.hint
    assert found.where.op == "aten::binary_cross_entropy"
    assert not audit(subject, device="cpu", dtype="float16", compile=False).failed


class Attention(nn.Module):
    """Scores that float16 holds and whose exponentials it does not; autocast on CUDA keeps softmax in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1).log_softmax(-1)


@no_cuda
def test_a_device_that_is_not_there_is_emulated_and_every_verdict_says_so() -> None:
    run = audit((nn.Linear(4, 4), torch.randn(2, 4)), device="cuda", dtype="float16")
    assert not run.failed
    assert run.environment["autocast policy"] == "cuda, emulated"
    assert all("cuda" in finding.subject and "emulated" in finding.subject for finding in run.findings)
    assert {finding.subject for finding in run.findings} == {
        "subject [float64, cuda emulated]",
        "subject [float16, eager, cuda emulated]",
        "subject [float16, compiled, cuda emulated]",
        "subject [cuda float16, emulated]",
    }


@no_cuda
def test_an_emulated_audit_follows_the_device_and_not_the_cpu() -> None:
    """CUDA's autocast keeps softmax in float32; the CPU's leaves it in what it is given."""
    declared = {"": torch.float32}

    def verdict(device: str) -> Verdict:
        subject = Subject((Attention(), torch.randn(2, 4, 4)), dtypes=declared)
        run = audit(subject, device=device, dtype="float16", compile=False, checks=["dtype"])
        return next(f.verdict for f in run.findings if f.check == "dtype")

    assert (verdict("cuda"), verdict("cpu")) == (Verdict.PASS, Verdict.FAIL)


@no_cuda
def test_what_cuda_overflows_is_found_without_cuda() -> None:
    """The CPU's autocast leaves a matrix times a vector in float32; CUDA's runs it in float16."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mv(x, x.sum(0))

    x = torch.full((8, 8), 100.0)
    on_cpu = audit((Model(), x), device="cpu", dtype="float16", compile=False, checks=["overflow"])
    on_cuda = audit((Model(), x), device="cuda", dtype="float16", compile=False, checks=["overflow"])
    assert (on_cpu.failed, on_cuda.failed) == (False, True)


@pytest.mark.cuda
def test_the_demo_is_safe_on_cuda() -> None:
    assert not audit(demo.subject(), device="cuda", compile=False).failed


def test_observing_a_block_finds_the_overflow_and_its_line() -> None:
    with pytest.raises(AssertionError, match="overflow"), watch(checks=["overflow"]):
        squared = torch.full((4,), 300.0, dtype=torch.float16) ** 2
    assert squared.isinf().all()
    with watch(checks=["overflow"]):
        squared = torch.full((4,), 3.0, dtype=torch.float16) ** 2


def test_observing_a_block_that_computes_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="coverage"), watch(checks=OBSERVABLE):
        pass


def test_observing_does_not_hide_the_exception_of_the_block() -> None:
    def body() -> None:
        with watch(checks=OBSERVABLE):
            torch.ones(2) + 1
            raise ZeroDivisionError

    with collect() as runs, pytest.raises(ZeroDivisionError):
        body()
    assert len(runs) == 1


def test_progress_is_told_before_each_stage() -> None:
    told: list[tuple[str, int, int]] = []
    with listening(Listener(lambda *stage: told.append(stage))):
        audit((nn.Linear(4, 4), torch.randn(2, 4)), compile=False)
    assert [done for _, done, _ in told] == [0, 1, 2, 3]
    assert {total for _, _, total in told} == {3}


def test_public_names() -> None:
    assert callable(ampcheck.audit)
    assert ampcheck.Subject is type(demo.subject())


def _slugs(run: Run) -> set[str]:
    return {finding.check for finding in run.findings}


def test_a_failure_of_compiled_code_in_16_bits_is_listed_once_with_the_setting_that_helps() -> None:
    class Pooled(nn.Module):
        """The gradient of a largest element is divided by how many are equal to it; none is to one that is rounded."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, generator=torch.Generator().manual_seed(0)).bfloat16())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = x * self.weight
            return (scaled * scaled.sigmoid()).amax(1)

    x = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    run = audit((Pooled(), [(x,)]))
    failures = [f for f in run.of(Verdict.FAIL) if f.check == "compiled-gradient"]
    assert len(failures) == 1
    assert "it passes with" in failures[0].message


def test_what_is_to_be_compiled_is_judged_in_low_precision_when_such_a_check_is_asked_for() -> None:
    run = audit((nn.Linear(4, 4), [(torch.randn(2, 4),)]), checks=["overflow"])
    assert "overflow" in _slugs(run)


def test_a_check_of_graphs_that_is_asked_for_is_judged_of_a_plain_subject_too() -> None:
    class Breaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y

    run = audit((Breaks(4, 4), (torch.randn(2, 4),)), dtype="bfloat16", checks=["graph-break"])
    assert any(f.check == "graph-break" and f.verdict is Verdict.FAIL for f in run.findings)


def test_a_callable_without_caches_is_not_passed_by_a_check_of_caches_alone() -> None:
    run = audit(lambda: torch.ones(2) + 1, checks=["cache-artifacts"])
    assert run.findings
    assert not run.of(Verdict.PASS)
