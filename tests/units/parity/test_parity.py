"""What is promised of `assert_parity`, of circumstances, records and the command."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.pairs import NORM, PAIRS, draw, rms_norm
from torch import nn
from torch.nn import functional as F

from ampcheck import UsageError, Verdict, assert_parity
from ampcheck.cli.main import main
from ampcheck.parity import Batch, Chunks, Microbatches, Permutation, Repeat, Threads
from ampcheck.parity.calls import Side
from ampcheck.parity.compare import compare
from ampcheck.parity.recorded import load_record, record, save_record
from ampcheck.records.parity import AGREE, ANOTHER
from ampcheck.search import Padding, Shift

BF16 = torch.bfloat16


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 12)).to(BF16)


def test_a_pass_counts_the_results_and_shows_both_errors() -> None:
    run = assert_parity(rms_norm, lambda x, w: F.rms_norm(x, (192,), w, 1e-6), NORM)
    (finding,) = run.findings
    assert (finding.check, finding.verdict, finding.seen) == ("parity", Verdict.PASS, 3)
    assert [row[0] for row in run.tables[0].rows] == ["output", "gradient argument 0.0", "gradient argument 0.1"]


def test_state_random_numbers_and_arguments_are_as_before() -> None:
    norm = nn.BatchNorm1d(8)
    before, x = copy.deepcopy(norm.state_dict()), torch.randn(6, 8)
    drawn, kept = torch.get_rng_state(), x.clone()
    assert_parity(nn.Sequential(norm, nn.Dropout(0.5)), nn.Sequential(copy.deepcopy(norm), nn.Dropout(0.5)), (x,))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(("scale", "outcome"), [(1e-7, ANOTHER), (1e-9, AGREE)])
def test_how_small_a_difference_is_another_function(scale: float, outcome: str) -> None:
    b = Side("b", lambda x, w: rms_norm(x, w) * (1 + scale), NORM)
    assert compare(Side("a", rms_norm, NORM), b).outcome == outcome


def test_modules_of_a_port_are_compared_by_the_names_of_the_original() -> None:
    class Port(nn.Module):
        def __init__(self, of: nn.Module) -> None:
            super().__init__()
            self.first, self.norm, _, self.last = copy.deepcopy(of)

        def forward(self, x: Any) -> Any:
            return self.last(F.relu(self.norm(self.first(x))))

    ours, x = model(), draw(6, 16)
    theirs, names = Port(ours), {"0": "first", "1": "norm", "3": "last"}
    run = assert_parity(ours, theirs, (x,), modules=names)
    assert run.findings[0].seen == 3 + 1 + 1 + 6, "modules, the output, the argument, parameters of modules"
    theirs.norm.eps = 1e-3
    with pytest.raises(AssertionError, match="module 1: exact values differ"):
        assert_parity(ours, theirs, (x,), modules=names)
    with pytest.raises(UsageError, match="there is no 'nrom'"):
        assert_parity(ours, theirs, (x,), modules={"0": "nrom"})


def test_compiled_code_is_judged_by_the_exact_values_of_eager_mode() -> None:
    def negated(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(-out for out in graph(*args))

    ours, x = model(), draw(6, 16)
    assert_parity(ours, torch.compile(ours, backend="eager"), (x,))
    with pytest.raises(AssertionError, match="compiled, output must keep the bound"):
        assert_parity(ours, torch.compile(ours, backend=negated), (x,), backward=False)


def test_compiled_code_is_compared_in_float64_where_16_bits_hide_a_difference() -> None:
    def scaled(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(out * 1.001 for out in graph(*args))

    def narrow(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            if args[0].dtype is torch.float64:
                raise RuntimeError("no kernel for float64")
            return graph(*args)

        return run

    ours, x = model(), draw(6, 16)
    before = {name: (id(p), p.dtype, p.detach().clone()) for name, p in ours.named_parameters()}
    with pytest.raises(
        AssertionError, match=r"compiled, output must be the function of eager mode: compiled in float64"
    ):
        assert_parity(ours, torch.compile(ours, backend=scaled), (x,), backward=False)
    run = assert_parity(ours, torch.compile(ours, backend=narrow), (x,), backward=False)
    assert "was not compared in float64: " in run.findings[0].message
    own = lambda x: x.bfloat16() * 1.5  # noqa: E731  # which rounds in float64 too
    run = assert_parity(own, torch.compile(own, backend="eager"), (torch.randn(4, 8),), backward=False)
    assert "eager mode does not give its exact values in float64" in run.findings[0].message
    for name, parameter in ours.named_parameters():
        number, dtype, value = before[name]
        assert (id(parameter), parameter.dtype) == (number, dtype)
        assert torch.equal(parameter, value)


def test_functions_that_build_are_called_inside_so_that_tables_are_followed() -> None:
    def make(base: float) -> Any:
        frequencies = base ** -(torch.arange(0, 32, 2).float() / 32)
        return lambda x: x * torch.outer(torch.arange(8).float(), frequencies).cos(), (draw(8, 16),)

    assert_parity(lambda: make(1e4), lambda: make(1e4))
    with pytest.raises(AssertionError, match=r"then a runs .*aten::pow"):
        assert_parity(lambda: make(1e4), lambda: make(10001.0))


def test_what_a_call_returns_beside_tensors_is_compared() -> None:
    x = draw(4, 8)
    with pytest.raises(AssertionError, match="output 1 is 3 in a and 4 in b"):
        assert_parity(lambda x: (x * 2, 3), lambda x: (x * 2, 4), (x,))
    with pytest.raises(AssertionError, match="output 1 is None in a and missing in b"):
        assert_parity(lambda x: (x * 2, None), lambda x: (x * 2,), (x,))
    assert_parity(lambda x: x.float().sum().item(), lambda x: x.sum().item(), (x,))
    run = assert_parity(lambda x: x.float(), lambda x: x * 1, (x,))
    assert "output is float32 in a and bfloat16 in b" in run.findings[0].message


def test_a_buffer_or_a_gradient_that_one_model_alone_has_is_missed() -> None:
    class Averaged(nn.Module):
        def __init__(self, writes: bool, detaches: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.writes, self.detaches = nn.Linear(8, 8), writes, detaches
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Any) -> Any:
            weight = self.layer.weight.detach() if self.detaches else self.layer.weight
            if self.writes:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return F.linear(x, weight, self.layer.bias)

    x = draw(4, 8, dtype=torch.float32)
    with pytest.raises(AssertionError, match="only a gives buffer mean"):
        assert_parity(Averaged(True, False), Averaged(False, False), (x,))
    with pytest.raises(AssertionError, match=r"only a gives gradient parameter layer\.weight"):
        assert_parity(Averaged(True, False), Averaged(True, True), (x,))


def test_arguments_that_share_memory_do_so_in_the_copies_and_odd_tensors_are_taken() -> None:
    base = torch.arange(6.0)

    def added(x: Any, view: Any) -> Any:
        with torch.no_grad():
            x.data.add_(1)
        return view * 2

    with pytest.raises(AssertionError, match="one function"):
        assert_parity(added, lambda x, view: view * 2, (base, base[2:]), backward=False)
    sparse = torch.eye(3).to_sparse()
    assert_parity(lambda s: (s * 2).to_dense(), lambda s: s.to_dense() + s.to_dense(), (sparse,))
    assert_parity(lambda x: x.sum(0), lambda x: x[0] * 8, (draw(1, 8).expand(8, 8),), backward=False)


def test_bits_are_those_of_the_run_without_a_shadow() -> None:
    def scaled(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(out * 1.01 for out in graph(*args))

    torch.compiler.reset()  # the limit of recompilations is that of the process
    layer, x = nn.Linear(8, 8), draw(4, 8, dtype=torch.float32)
    with pytest.raises(AssertionError, match="output has other bits"):
        assert_parity(layer, torch.compile(layer, backend=scaled), (x,), relation="bitwise", backward=False)
    with pytest.raises(AssertionError, match=r"output 1 is 1\.0 in a and 2\.0 in b"):
        assert_parity(lambda x: (x + 1, 1.0), lambda x: (x + 1, 2.0), (x,), relation="bitwise")


def test_state_in_buffers_and_attributes_does_not_leak_into_the_next_run() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(8, 8), torch.ones(())
            self.register_buffer("calls", torch.ones(()))

        def forward(self, x: Any) -> Any:
            self.calls.add_(1)
            self.factor = self.factor * 0.5 + 1
            return self.layer(x) * self.calls * self.factor

    counted, x = Counted(), draw(4, 8, dtype=torch.float32)
    assert_parity(counted, Repeat(), (x,), relation="bitwise")
    assert_parity(counted, torch.compile(counted, backend="eager"), (x,))
    assert (counted.calls, counted.factor) == (1, 1)


def test_relations_ask_for_less_or_more() -> None:
    noisy, exact = PAIRS["layer_norm_by_moments"].make()[1], PAIRS["layer_norm_by_moments"].make()[0]
    args = PAIRS["layer_norm_by_moments"].make()[2]
    assert_parity(exact, noisy, args, relation="function")
    with pytest.raises(AssertionError, match=r"other bits; they part at .*aten::"):
        assert_parity(exact, noisy, args, relation="bitwise")
    assert_parity(exact, exact, args, relation="bitwise")
    with pytest.raises(UsageError, match="relation"):
        assert_parity(exact, exact, args, relation="close")


def test_a_backward_that_raises_on_one_side_leaves_gradients_out_with_a_note() -> None:
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise RuntimeError("no backward")

    run = assert_parity(Forward.apply, lambda x: x * 2, (draw(4, 4),))
    assert "gradients are not compared: a raised" in run.findings[0].message


@pytest.mark.parametrize(
    ("circumstance", "relation"),
    [
        (Batch(), "rounding"),
        (Batch(4), "rounding"),
        (Permutation(0), "rounding"),
        (Threads(1), "rounding"),
        (Repeat(), "bitwise"),
    ],
)
def test_an_honest_model_holds_in_each_circumstance(circumstance: Any, relation: str) -> None:
    assert_parity(model(), circumstance, (draw(6, 16),), relation=relation)


def test_behind_a_cast_to_8_bits_a_sum_is_judged_by_its_own_format() -> None:
    def summed(x: Any, dtype: torch.dtype) -> Any:
        total = torch.zeros(x.shape[1], dtype=dtype)
        for row in x.to(torch.float8_e4m3fn).to(dtype):
            total = total + row
        return total.to(BF16)

    x = draw(600, 16).abs()
    with pytest.raises(AssertionError, match="b is beyond the bound of its own rounding"):
        assert_parity(lambda x: summed(x, torch.float32), lambda x: summed(x, BF16), (x,), backward=False)
    assert_parity(lambda x: summed(x, torch.float32), lambda x: summed(x, BF16), (x[:60],), backward=False)


def test_a_norm_over_the_batch_depends_on_it() -> None:
    with pytest.raises(AssertionError, match="rows of a batch alone: two executions must compute one function"):
        assert_parity(lambda x: x - x.mean(0, keepdim=True), Batch(), (draw(6, 16),))


@pytest.mark.parametrize(
    "circumstance", [Batch(6), Batch(64), Chunks(16, step=lambda f, x, h: (f(x), h)), Permutation(2)]
)
def test_a_circumstance_that_changes_nothing_is_refused(circumstance: Any) -> None:
    with pytest.raises(UsageError, match="must be smaller than the whole"):
        assert_parity(lambda x: x - x.mean(0, keepdim=True), circumstance, (draw(6, 16, 1),))


def test_every_permutation_moves_something() -> None:
    for length in range(2, 9):
        with pytest.raises(AssertionError, match="must compute one function"):
            assert_parity(lambda x: x * torch.arange(1.0, x.shape[1] + 1), Permutation(1), (torch.ones(2, length),))


def test_threads_are_compared_with_another_number_of_them() -> None:
    for count in (torch.get_num_threads(), torch.get_num_threads() + 1):
        with pytest.raises(AssertionError, match="must compute one function"):
            assert_parity(lambda x: x * torch.get_num_threads(), Threads(count), (torch.ones(4, 4),))


def test_nothing_has_no_equal_bits() -> None:
    run = assert_parity(lambda x: None, lambda x: None, (draw(2, 4),), relation="bitwise")
    assert run.findings[0].verdict is Verdict.UNDECIDED


def test_a_kernel_excuses_its_own_results_alone() -> None:
    first, second = (torch.library.custom_op(f"parity_tests::{name}", _cosine, mutates_args=()) for name in "ab")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert_parity(lambda x: (first(x.detach()), x * 2), lambda x: (second(x.detach()), x * 2), (x,))
    with pytest.raises(AssertionError, match="output 1: exact values differ"):
        assert_parity(lambda x: (first(x.detach()), x * 2), lambda x: (second(x.detach()), x * 3), (x,))
    with pytest.raises(AssertionError, match="output 1: exact values differ"):
        assert_parity(
            lambda x: (first(x.detach()), x.bfloat16() * 1.003), lambda x: (x.detach() + 0, x.bfloat16() * 1.0), (x,)
        )


def _cosine(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


def test_invariances_of_the_search_are_circumstances() -> None:
    assert_parity(lambda x: x.float().softmax(-1), Shift(1.0), (draw(4, 16),))
    with pytest.raises(AssertionError, match="padding along dimension -1"):
        assert_parity(lambda x: x.float().softmax(-1), Padding(), (draw(4, 16),))


def test_a_recurrent_model_in_chunks() -> None:
    torch.manual_seed(0)
    recurrent = nn.GRU(8, 8, batch_first=True)

    def step(function: Any, chunk: Any, state: Any) -> Any:
        return function(chunk, state)

    x = draw(2, 12, 8, dtype=torch.float32)
    assert_parity(recurrent, Chunks(5, step=step), (x,))
    with pytest.raises(AssertionError, match="one function"):
        assert_parity(recurrent, Chunks(5, step=lambda f, c, s: (f(c)[0], None)), (x,))
    with pytest.raises(UsageError, match=r"Chunks needs step\(function, chunk, state\)"):
        assert_parity(nn.Linear(8, 8), Chunks(5), (x,))


def test_circumstances_keep_the_structure_and_split_what_is_named() -> None:
    layer, x = nn.Linear(16, 16).to(BF16), draw(6, 16)
    assert_parity(lambda x: (layer(x), None), Batch(), (x,))
    assert_parity(lambda x, w: x @ w, Batch(inputs=(0,)), (draw(16, 16), draw(16, 16, seed=1)))
    assert_parity(layer, Batch(), {"input": x}, relation="bitwise")
    with pytest.raises(UsageError, match="must be smaller than the whole"):
        assert_parity(layer, Batch(), (torch.zeros(0, 16, dtype=BF16),))
    with pytest.raises(UsageError, match="dim of Batch must be a whole number"):
        Batch(dim="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="modules= names those of a second function"):
        assert_parity(layer, Batch(), (x,), modules={"": ""})


def test_microbatches_of_a_mean_over_tokens_are_another_gradient() -> None:
    classify = nn.Linear(16, 4)

    def loss(x: Any, classes: Any) -> Any:
        return F.cross_entropy(classify(x), classes)

    x, classes = draw(8, 16, dtype=torch.float32), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    assert_parity(loss, Microbatches(4), (x, classes))
    classes[:1] = -100  # one token fewer in the first
    with pytest.raises(AssertionError, match="4 micro-batches: two executions must compute one function"):
        assert_parity(loss, Microbatches(4), (x, classes))


def test_what_is_no_side_gets_one_sentence() -> None:
    with pytest.raises(UsageError, match="a must be a module or function"):
        assert_parity(3, model(), (draw(2, 16),))
    with pytest.raises(UsageError, match="a is a module: give args"):
        assert_parity(model(), model())
    with pytest.raises(UsageError, match="other way round"):
        assert_parity(Batch(), model(), (draw(2, 16),))
    with pytest.raises(UsageError, match="give args"):
        assert_parity(model(), Batch())
    with pytest.raises(UsageError, match=r"side b raised RuntimeError.*test_parity\.py"):
        assert_parity(lambda x: x, lambda x: x @ x, (draw(2, 16),))


def test_a_record_is_compared_with_what_runs_here(tmp_path: Path) -> None:
    path = tmp_path / "ours.npz"
    side = Side("a", rms_norm, NORM)
    save_record(record(side), path)
    stored = load_record(path, "a")
    assert compare(stored, Side("b", lambda x, w: F.rms_norm(x, (192,), w, 1e-6), NORM)).outcome == AGREE
    found = compare(stored, Side("b", lambda x, w: rms_norm(x, w, 1e-4), NORM))
    assert (found.outcome, found.key) == (ANOTHER, "output")
    pair = Side("a", lambda x, w: (rms_norm(x, w), None, 0.5), NORM)
    save_record(record(pair), path)
    assert compare(load_record(path, "a"), replace(pair, name="b")).outcome == AGREE
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UsageError, match="no recorded execution could be read"):
        load_record(path, "a")


TARGETS = """
import torch

def make(eps):
    norm = torch.nn.LayerNorm(16, eps=eps)
    return norm, (torch.randn(4, 16),)

def ours(): return make(1e-5)
def same(): return make(1e-5)
def other(): return make(1e-3)
"""


def test_the_command_compares_targets_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sides.py").write_text(TARGETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["parity", "sides.py:ours", "sides.py:same"]) == 0
    assert main(["parity", "sides.py:ours", "sides.py:other", "--json", "run.json"]) == 1
    assert "native_layer_norm" in capsys.readouterr().out
    assert main(["record", "sides.py:ours", "-o", "ours.npz"]) == 0
    assert main(["parity", "ours.npz", "sides.py:same"]) == 0
    assert main(["parity", "ours.npz", "sides.py:other"]) == 1
    assert main(["record", "sides.py:ours", "-o", "ours.txt"]) == 2
    assert main(["parity", "sides.py:ours", "missing.npz"]) == 2
    assert "ends with .npz" in capsys.readouterr().err
