"""What the recorded calls say by themselves: the gap between CPU and device, custom ops left alone, banned ops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcheck import Finding, Verdict, demo
from ampcheck.autocast.calls import measure_calls
from ampcheck.autocast.emulate import emulate
from ampcheck.autocast.locks.lock import gap_table
from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Table
from ampcheck.core.subject import load_subject
from ampcheck.records.policy import PolicyCalls, PolicyGap

MODELS = Path(__file__).parents[2] / "transformers_models.py"
SQUARE = torch.ones(4, 4)


def gap(subject: Any, device: str = "cuda", dtype: str = "float16") -> tuple[Finding, Table]:
    cpu, there = (measure_calls(subject, device=name, dtype=dtype) for name in ("cpu", device))
    both = PolicyGap(cpu, there)
    (finding,) = findings(both, Limits())
    return finding, gap_table(both)


def judged(calls: PolicyCalls, check: str) -> list[Finding]:
    return findings(calls, Limits(), [check])


def of(factory: str) -> Any:
    return load_subject(f"{MODELS}:{factory}")


# The gap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_op_that_the_device_computes_in_16_bits_and_the_cpu_does_not_is_a_warning(dtype: str) -> None:
    finding, table = gap((lambda x: torch.addmv(x[0], x, x[0]), (SQUARE,)), dtype=dtype)
    assert finding.verdict is Verdict.WARN
    assert f"aten::addmv computed in {dtype} there and wider on the cpu" in finding.message
    row = dict(zip(table.columns, next(row for row in table.rows if row[0] == "aten::addmv"), strict=True))
    assert (row["on cpu"], row["on cuda"], row["modules"]) == ("left alone", "lower_precision", "1 module: (the root)")


def test_an_op_that_the_device_alone_bans_is_a_warning() -> None:
    finding, table = gap((lambda x: F.binary_cross_entropy(x.sigmoid(), x), (torch.ones(4),)))
    assert finding.verdict is Verdict.WARN
    assert "aten::binary_cross_entropy banned there" in finding.message
    assert ("aten::binary_cross_entropy", "fp32", "banned") in [tuple(row[:3]) for row in table.rows]


def test_an_op_that_the_cpu_computes_in_fewer_bits_is_in_the_table_and_no_warning() -> None:
    finding, table = gap((lambda x: (x @ x).softmax(-1), (SQUARE,)))
    assert finding.verdict is Verdict.PASS
    assert "aten::softmax.int" in finding.message
    assert [row[0] for row in table.rows] == ["aten::softmax.int"]


def test_what_both_treat_the_same_leaves_the_table_empty() -> None:
    finding, table = gap((nn.Linear(4, 4), (SQUARE,)))
    assert (finding.verdict, list(table.rows)) == (Verdict.PASS, [])


def test_an_op_left_alone_that_widens_mixed_inputs_by_itself_is_no_warning() -> None:
    """The CPU's autocast promotes the tensors of `cat`; on CUDA `cat` promotes them without autocast."""

    def mixed(x: Tensor) -> Tensor:
        return torch.cat([x, x @ x])

    finding, table = gap((mixed, (SQUARE,)))
    assert finding.verdict is Verdict.PASS
    assert "aten::cat" in [row[0] for row in table.rows]
    for device in ("cpu", "cuda"):
        with emulate(device, torch.float16):
            assert mixed(SQUARE).dtype is torch.float32


def test_what_the_device_computes_inside_an_op_that_the_cpu_widens_as_a_whole_is_a_warning() -> None:
    """`cross_entropy` is float32 on the CPU; CUDA takes it apart, and its log_softmax keeps the dtype of the logits."""
    finding, _ = gap((lambda x, y: F.cross_entropy(x @ x, y), (SQUARE, torch.zeros(4, dtype=torch.int64))))
    assert finding.verdict is Verdict.WARN
    assert "aten::log_softmax.int computed in float16" in finding.message


def test_the_same_without_16_bit_logits_is_no_warning() -> None:
    def careful(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((x @ x).float(), y)

    finding, _ = gap((careful, (SQUARE, torch.zeros(4, dtype=torch.int64))))
    assert finding.verdict is Verdict.PASS


def test_ops_made_of_others_count_by_those() -> None:
    """`multi_dot` has a rule on CUDA alone; the products that it is made of are low precision on both."""
    finding, _ = gap((lambda x: torch.linalg.multi_dot([x, x, x]), (SQUARE,)))
    assert finding.verdict is Verdict.PASS


def test_an_op_made_of_others_of_which_none_is_low_precision_is_a_warning_and_named_before_what_follows() -> None:
    """An outer product by `einsum`, as of rotary positions, contracts nothing: on the CPU it stays float32."""

    def rotary(positions: Tensor) -> Tensor:
        angles = torch.einsum("i,j->ij", positions, positions)
        return torch.cat([angles, angles])

    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float16)):
        with emulate(device, torch.float16):
            assert rotary(torch.ones(4)).dtype is dtype
    finding, _ = gap((rotary, (torch.ones(4),)))
    assert finding.verdict is Verdict.WARN
    assert finding.where.op == "aten::einsum"
    assert "aten::einsum computed in float16 there and wider on the cpu" in finding.message
    assert "because of its inputs, is aten::cat" in finding.message


@pytest.mark.parametrize(("factory", "verdict"), [("gpt2", "pass"), ("vit", "pass"), ("t5", "warn")])
def test_the_gap_of_real_models(factory: str, verdict: str) -> None:
    finding, table = gap(of(factory))
    assert finding.verdict == verdict, finding.message
    assert len(table.rows) > 2


def test_the_demo_has_no_gap() -> None:
    finding, _ = gap(demo.subject())
    assert finding.verdict is Verdict.PASS


def test_a_run_that_raised_or_saw_nothing_is_skipped() -> None:
    def broken(x: Tensor) -> Tensor:
        return (x @ x).index_add(0, torch.zeros(1, dtype=torch.int64), x[:1])

    for subject in ((broken, (SQUARE,)), (lambda x: x + 1, (SQUARE,))):
        finding, _ = gap(subject)
        assert finding.verdict is Verdict.SKIP


# Banned ----------------------------------------------------------------------------------------------------------


def test_a_banned_op_fails_with_pytorchs_own_replacement() -> None:
    (finding,) = judged(measure_calls((nn.BCELoss(), (torch.full((4,), 0.5), torch.ones(4)))), "policy-banned")
    assert (finding.verdict, finding.where.op) == (Verdict.FAIL, "aten::binary_cross_entropy")
    assert "unsafe to autocast" in finding.message
    assert "binary_cross_entropy_with_logits" in finding.hint


def test_a_ban_that_the_model_caught_warns() -> None:
    def caught(x: Tensor) -> Tensor:
        try:
            return F.binary_cross_entropy(x.sigmoid(), x)
        except RuntimeError:
            return x @ x.T

    (finding,) = judged(measure_calls((caught, (SQUARE,))), "policy-banned")
    assert finding.verdict is Verdict.WARN


@pytest.mark.parametrize(
    ("function", "device", "verdict"),
    [
        (lambda x: F.binary_cross_entropy(x.sigmoid(), x), "cpu", "pass"),
        (lambda x: F.binary_cross_entropy_with_logits(x, x), "cuda", "pass"),
        (lambda x: x + 1, "cuda", "skip"),
    ],
)
def test_without_a_banned_op_it_passes_where_something_was_seen(function: Any, device: str, verdict: str) -> None:
    (finding,) = judged(measure_calls((function, (SQUARE,)), device=device), "policy-banned")
    assert finding.verdict == verdict


# Custom ops left alone -------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("ampcheck_lock", "FRAGMENT")
    made.define("scaled(Tensor x, Tensor w) -> Tensor")
    made.impl("scaled", lambda x, w: x @ w, "CPU")
    yield made
    made._destroy()


class Scaled(nn.Module):
    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        out: Tensor = torch.ops.ampcheck_lock.scaled(x, self.weight.to(x.dtype) if self.cast else self.weight)
        return out


def unregistered(cast: bool) -> Finding:
    (finding,) = judged(measure_calls((Scaled(cast), (SQUARE,))), "policy-unregistered")
    return finding


def test_a_custom_op_that_ran_without_a_kernel_warns_with_its_dtypes(library: torch.library.Library) -> None:
    finding = unregistered(cast=True)
    assert (finding.verdict, finding.where.op) == (Verdict.WARN, "ampcheck_lock::scaled")
    assert "float16 float16" in finding.message
    assert "register_autocast" in finding.hint


def test_a_custom_op_that_raised_on_mixed_dtypes_fails(library: torch.library.Library) -> None:
    finding = unregistered(cast=False)
    assert finding.verdict is Verdict.FAIL
    assert "float16 float32" in finding.message


@pytest.mark.needs_torch("2.7", "custom ops can be registered for autocast")
def test_registered_it_passes(library: torch.library.Library) -> None:
    torch.library.register_autocast("ampcheck_lock::scaled", "cuda", torch.float16, lib=library)
    assert unregistered(cast=False).verdict is Verdict.PASS


@pytest.mark.needs_torch("2.7", "custom ops can be registered for autocast")
def test_registered_for_another_device_it_fails_here(library: torch.library.Library) -> None:
    torch.library.register_autocast("ampcheck_lock::scaled", "cpu", torch.float16, lib=library)
    assert unregistered(cast=False).verdict is Verdict.FAIL
