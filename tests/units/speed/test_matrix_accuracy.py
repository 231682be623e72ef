"""Verdicts on the numbers of the cells of a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ampcheck.core.arm import Arm
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.speed.matrix import accuracy
from ampcheck.speed.matrix.accuracy import COMPILED, Judge, Judged, judged
from ampcheck.speed.matrix.measure import measure_matrix
from ampcheck.speed.steps import EAGER


class Lossy(nn.Module):
    """Adds and takes away so much that 16 bits keep nothing of its product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + 1024.0
        return found - 1024.0


def lossy() -> Subject:
    torch.manual_seed(0)
    return Subject((Lossy(), (torch.randn(8, 16),)), name="lossy")


def test_numbers_that_16_bits_ruin_are_wrong_in_16_bits_alone() -> None:
    judge = Judge(lossy(), trains=True)

    assert judge.of(EAGER, "float32").verdict is Verdict.PASS, "the digits that float32 loses are no loss of 16 bits"
    assert judge.of(EAGER, "bfloat16").verdict is Verdict.FAIL


def test_float16_without_a_scaler_is_judged_without_one() -> None:
    """A gradient of 1e-9 is zero in float16 unless the loss is scaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    subject = Subject((model, (torch.randn(4, 8),)), loss=lambda output: 1e-8 * output.float().square().mean())

    assert Judge(subject, trains=True, scaled=True).of(EAGER, "float16").verdict is Verdict.PASS
    assert Judge(subject, trains=True).of(EAGER, "float16").verdict is Verdict.FAIL


def test_gradients_are_not_judged_where_nothing_is_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    subject = Subject((model, (torch.randn(4, 8),)), loss=lambda output: 1e-8 * output.float().square().mean())

    assert Judge(subject).of(EAGER, "float16").verdict is Verdict.PASS


def test_a_judge_that_cannot_judge_says_so_and_raises_nothing() -> None:
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo: object) -> object:
            raise ValueError("no copies")

    found = Judge(Subject((Uncopied(2, 2), (torch.ones(1, 2),)))).of(EAGER, "bfloat16")
    assert found.verdict is Verdict.SKIP
    assert "no copies" in found.why


def test_of_two_verdicts_the_worse_counts_and_one_without_evidence_hides_nothing() -> None:
    right, wrong = Judged(Verdict.PASS, "right", 0.1), Judged(Verdict.FAIL, "wrong", 0.2)
    nothing = Judged(Verdict.SKIP, "nothing")

    assert right + wrong == wrong
    assert (wrong + right).verdict is Verdict.FAIL
    assert (wrong + right).error == 0.1
    assert (nothing + right).verdict is (right + nothing).verdict is Verdict.SKIP
    assert (wrong + nothing).verdict is (nothing + wrong).verdict is Verdict.FAIL
    assert (right + nothing).error is None, "eager mode's error is not that of compiled code"
    assert judged([], ["compiled-error"]).verdict is Verdict.SKIP


def test_compiled_code_whose_numbers_nobody_compared_is_not_judged() -> None:
    """That it has eager mode's dtypes, and raises nothing, says nothing of its numbers."""
    dtype = Finding("compiled-dtype", Verdict.PASS, "s", "the same dtypes")
    error = Finding("compiled-error", Verdict.PASS, "s", "near")
    none = Finding("compiled-error", Verdict.SKIP, "s", "not comparable: it draws random numbers")
    needed = ("compiled-error",)

    assert judged([dtype, none], COMPILED, needed).verdict is Verdict.SKIP
    assert "random numbers" in judged([dtype, none], COMPILED, needed).why
    assert judged([dtype], COMPILED, needed).verdict is Verdict.SKIP
    assert judged([dtype, error, none], COMPILED, needed).verdict is Verdict.PASS
    assert judged([dtype, error], COMPILED, (*needed, "compiled-gradient")).verdict is Verdict.SKIP


def test_a_compiled_model_that_draws_random_numbers_is_not_called_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs cannot be compared with eager mode's, which are right."""

    def measured(subject: Subject, **asked: object) -> AccuracyStats:
        shapes = {"output": "float32 [4, 8]"}
        return AccuracyStats(
            subject.name, Arm("float32"), "float32", graphs=1, incomparable="it draws random numbers",
            eager_shapes=shapes, compiled_shapes=shapes,
        )  # fmt: skip

    monkeypatch.setattr(accuracy, "measure_accuracy", measured)
    torch.manual_seed(0)
    judge = Judge(Subject((nn.Linear(8, 8).eval(), (torch.randn(4, 8),))))

    found = judge.of("default", "float32")
    assert judge.of(EAGER, "float32").verdict is Verdict.PASS
    assert (found.verdict, found.error) == (Verdict.SKIP, None)
    assert "random numbers" in found.why


def test_a_users_model_is_compiled_timed_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one real compilation here; how fast it is no test says."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    mine = Subject((nn.Linear(8, 8).eval().requires_grad_(False), (torch.randn(4, 8),)), name="mine")
    stats = measure_matrix(mine, modes=("eager", "default"), precisions=("float32",), budget=0.05)

    cell = stats.cell("default", "float32")
    assert cell.reason == ""
    assert cell.graphs == 1
    assert cell.accuracy == "pass"
    assert cell.compiling is not None
    assert cell.gain == cell.ratio
    assert cell.peak is not None
    assert stats.recompiled == 0


class WrongWithoutGradients(nn.Module):
    """Stands for a compiler whose code for inference alone is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        wrong = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        found: Tensor = self.linear(x)
        return found * 1.5 if wrong else found


def test_the_code_that_was_timed_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference is timed without gradients, for which other code is compiled than with them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    mine = Subject((WrongWithoutGradients().eval(), (torch.randn(4, 8),)), name="mine")
    caches = tmp_path / "caches"
    stats = measure_matrix(mine, modes=("eager", "default"), precisions=("float32",), budget=0.05, caches=caches)

    assert stats.cell("default", "float32").accuracy == "fail"
    assert stats.cell("eager", "float32").accuracy == "pass"


def test_judging_compiles_nothing_that_timing_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.utils import clear_caches

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).eval()
    kernels = list[int]()
    for judges in (False, True):
        clear_caches()  # in memory
        caches = tmp_path / f"caches_{judges}"  # g++ would split a name at spaces
        mine = Subject((model, (torch.randn(4, 8),)), name="mine")
        measure_matrix(
            mine, modes=("eager", "default"), precisions=("float32",), budget=0.05, accuracy=judges, caches=caches
        )
        kernels.append(len(list(caches.rglob("*.main.so"))))
    assert kernels[0] == kernels[1] > 0
