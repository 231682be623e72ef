"""What the checks of a watched block say beside a fault of another check, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ampcheck
from ampcheck import Finding, Run, Verdict, emulate


def only(run: Run, check: str) -> Finding:
    (finding,) = (finding for finding in run.findings if finding.check == check)
    return finding


def watched(check: str | None, compute: Any) -> Run:
    with ampcheck.watch(checks=None if check is None else [check], fail_on="never") as seen:
        compute()
    return seen.run


def squares(scale: float) -> float:
    x = torch.full((4,), scale, dtype=torch.float16)
    return (x * x).sum().item()


def test_headroom_alone_passes_no_value_that_overflowed() -> None:
    overflowed = only(watched("headroom", lambda: squares(300.0)), "headroom")
    assert overflowed.verdict is Verdict.SKIP
    assert "see overflow" in overflowed.message
    assert only(watched("headroom", lambda: squares(3.0)), "headroom").verdict is Verdict.PASS
    assert only(watched("headroom", lambda: squares(120.0)), "headroom").verdict is Verdict.WARN


def test_headroom_of_zeros_is_no_infinite_factor() -> None:
    run = watched("headroom", lambda: (torch.zeros(4).half() * 2).tolist())
    assert "no op made a value of 16 bits larger" in only(run, "headroom").message


@pytest.mark.parametrize(("factor", "verdict"), [(1e-3, Verdict.SKIP), (1.0, Verdict.PASS)])
def test_flush_alone_passes_no_tensor_that_vanished(factor: float, verdict: Verdict) -> None:
    def scaled() -> float:
        return (torch.full((8,), 1e-4).half() * factor * 1e-1 * 1e1).float().sum().item()

    def vanishing() -> float:
        return (torch.full((8,), 1e-5).half() * 1e-3).float().sum().item()

    flush = only(watched("flush", vanishing if factor < 1 else scaled), "flush")
    assert flush.verdict is verdict
    assert ("see silent-zero" in flush.message) is (factor < 1)


def test_a_result_that_is_infinite_throughout_is_said_to_be() -> None:
    overflow = only(watched("overflow", lambda: squares(300.0)), "overflow")
    assert "inputs reach 300 and no result is finite; float64 reaches 90000" in overflow.message


def test_a_tensor_that_was_compared_is_one_that_no_arithmetic_read() -> None:
    def compared() -> bool:
        x = torch.full((4,), 300.0, dtype=torch.float16)
        return bool((x * x >= 0).all())

    overflow = only(watched("overflow", compared), "overflow")
    assert overflow.message.endswith("it reaches a tensor that no later arithmetic read")


def test_a_tensor_that_was_read_by_numpy_is_one_that_no_arithmetic_read() -> None:
    def read() -> Any:
        x = torch.full((4,), 300.0, dtype=torch.float16)
        return (x * x).numpy()

    overflow = only(watched("overflow", read), "overflow")
    assert overflow.verdict is Verdict.FAIL
    assert "it reaches a number that left the run at " in overflow.message
    assert overflow.message.endswith(", a tensor that no later arithmetic read")


def test_a_block_without_tensors_is_told_to_run_an_op() -> None:
    coverage = only(watched("overflow", lambda: None), "coverage")
    assert coverage.verdict is Verdict.FAIL
    assert "inside the block" in coverage.hint


def test_findings_under_an_emulated_device_name_it(request: pytest.FixtureRequest) -> None:
    with emulate("cuda"):
        run = watched(None, lambda: squares(2.0))
        audited = ampcheck.audit(lambda: squares(2.0))
    assert {finding.subject for finding in run.findings} == {f"{request.node.nodeid} [cuda emulated]"}
    assert audited.environment["autocast policy"] == "cuda, emulated"
    assert "autocast policy" not in ampcheck.audit(lambda: squares(2.0)).environment


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda: torch.set_float32_matmul_precision("medium"), "restore the switch"),
        (lambda: torch.set_default_dtype(torch.float64), "restore the switch"),
        (lambda: torch.set_autocast_enabled("cpu", True), "torch.compile'd function leaves the region open"),
    ],
)
def test_a_switch_that_is_left_is_told_how_to_be_restored(change: Any, hint: str) -> None:
    def leave() -> None:
        torch.ones(2).sum()
        change()

    assert hint in only(watched("autocast-state", leave), "autocast-state").hint


@pytest.mark.parametrize(
    ("dtype", "values", "check", "hint"),
    [
        (torch.bfloat16, [1.0, 3.0], "overflow", "float32 (torch.autocast"),
        (torch.float16, [1e5, 3.0], "overflow", "bfloat16 or float32 (torch.autocast"),
        (torch.float16, [1e-9, 2e-9], "silent-zero", "scale the values up before this op"),
    ],
)
def test_hints_inside_graphs_are_of_the_format_and_the_phase(
    dtype: torch.dtype, values: list[float], check: str, hint: str
) -> None:
    scale = 3.4e38 if dtype is torch.bfloat16 else 1.0
    compiled = torch.compile(lambda x: ((x * scale).to(dtype) * 4).float())
    with ampcheck.watch(compiled, fail_on="never") as seen:
        compiled(torch.tensor(values * 8))
    finding = next(finding for finding in seen.run.findings if finding.check == check)
    assert finding.verdict in (Verdict.FAIL, Verdict.WARN)
    assert hint in finding.hint
    assert ("bfloat16" in finding.hint) is (dtype is torch.float16)
