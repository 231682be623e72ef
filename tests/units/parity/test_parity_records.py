"""Records beside options, other inputs, other names of arguments, and files that are no records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampcheck import UsageError, assert_parity
from ampcheck.cli.main import main
from ampcheck.parity.assert_parity import sides_of
from ampcheck.parity.calls import Side
from ampcheck.parity.recorded import load_record, record, save_record


def make(*, seed: int = 0, keyword: bool = False, dtype: torch.dtype = torch.float32, columns: int = 8) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, columns, generator=torch.Generator().manual_seed(seed))
    return module.to(dtype), *(((), {"input": x.to(dtype)}) if keyword else ((x.to(dtype),),))


def saved(path: Path, build: Callable[[], Any] = make, **options: Any) -> Path:
    save_record(record(Side("a", build=build, **options)), path)
    return path


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return saved(tmp_path / "ours.npz")


def test_options_beside_a_record_are_refused_or_are_those_of_the_record(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="modules name those of two sides that run; a is a record"):
        assert_parity(ours, make, modules={"0": "0"})
    with pytest.raises(UsageError, match="a was recorded without a dtype; found bfloat16"):
        assert_parity(ours, make, dtype="bfloat16")
    narrow = saved(tmp_path / "narrow.npz", dtype=torch.bfloat16)
    assert_parity(narrow, make, dtype="bfloat16")
    with pytest.raises(UsageError, match="b was recorded under autocast to bfloat16; found float16"):
        assert_parity(make, narrow, dtype="float16")


def test_without_backward_gradients_of_a_record_are_left_out(ours: Path) -> None:
    assert assert_parity(ours, make, backward=False).findings[0].seen == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_other_names_of_arguments_are_a_note(ours: Path, recorded: bool) -> None:
    run = assert_parity(ours if recorded else make, lambda: make(keyword=True))
    assert run.findings[0].seen == 3, "the output and the parameters"
    assert "not compared, as b has no argument of this name: gradient argument 0.0 of a" in run.findings[0].message


def test_a_gradient_of_an_argument_of_both_is_missed(ours: Path) -> None:
    def detached() -> Any:
        module, args = make()
        return lambda x: module(x.detach()), args

    for a in (ours, make):
        with pytest.raises(AssertionError, match=r"only a gives gradient argument 0\.0"):
            assert_parity(a, detached)


def test_a_write_to_an_argument_of_another_name_is_a_note() -> None:
    x = torch.ones(3)
    run = assert_parity(lambda: (lambda x: x.mul_(2) + 1, (x,)), lambda: (lambda y: y.mul_(2) + 1, (), {"y": x}))
    assert "as a has no argument of this name: written argument 1.y of b" in run.findings[0].message


def test_records_of_other_inputs_say_so(ours: Path, tmp_path: Path) -> None:
    for other in (lambda: make(seed=1), lambda: (make()[0], (torch.ones(3, 8),))):
        with pytest.raises(AssertionError, match=r"the inputs differ: argument 0\.0") as raised:
            assert_parity(ours, saved(tmp_path / "other.npz", other))
        assert "hint: give both sides the same inputs" in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_roundings_of_one_input_are_the_same_input(ours: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    other = saved(tmp_path / "other.npz", lambda: make(dtype=dtype))
    a, b = sides_of(ours, other)
    assert "inputs differ" not in assert_parity(a, b, relation="function").findings[0].message


def test_gradients_are_compared_where_gradients_are_on(ours: Path) -> None:
    layer = nn.Linear(8, 5)
    for pair in ((make, make), (ours, make)):
        with torch.no_grad():
            run = assert_parity(*pair)
        assert "gradients are not compared: gradients are off" in run.findings[0].message
        assert "gradients are off" not in assert_parity(*pair).findings[0].message
    with torch.no_grad():
        run = assert_parity(layer, lambda x: F.linear(x, layer.weight, layer.bias), (torch.ones(2, 8),), backward=False)
    assert "gradients are off" not in run.findings[0].message


def test_what_no_op_is_named_for_has_a_hint_of_its_own(ours: Path) -> None:
    x = torch.randn(4, 8)
    hints: list[tuple[Any, Any, str]] = [
        (lambda x: (x, x * 2), lambda x: {"y": x, "z": x * 2}, "let both give the same results"),
        (lambda x: x.sum(0), lambda x: x.sum(1), "let both give the same results"),
        (lambda x: 3, lambda x: 4, "return what the number is computed from as well"),
        (lambda x: x.argmax(1), lambda x: x.argmin(1), "return what the number is computed from as well"),
    ]
    for a, b, hint in hints:
        with pytest.raises(AssertionError, match=f"hint: {hint}"):
            assert_parity(a, b, (x,))
    with pytest.raises(AssertionError, match="two sides that run in one comparison have their ops named"):
        assert_parity(ours, lambda: (lambda x: make()[0](x) * 2, make()[1]), backward=False)


def test_bits_that_no_op_is_named_for_say_why(ours: Path) -> None:
    def scaled(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(out * 1.01 for out in graph(*args))

    torch.compiler.reset()  # the limit of recompilations is that of the process
    module, args = make()
    with pytest.raises(AssertionError, match="no op of b is named: compiled code runs in eager mode") as raised:
        assert_parity(module, torch.compile(module, backend=scaled), args, relation="bitwise", backward=False)
    assert "hint: compare by rounding" in str(raised.value)
    with pytest.raises(AssertionError, match="a record keeps the bits of results, and of no op"):
        assert_parity(ours, lambda: (lambda x: make()[0](x) * 2, make()[1]), relation="bitwise", backward=False)


def test_an_iterator_is_no_argument_of_two_sides() -> None:
    rows = [torch.ones(2)]
    for args in (iter(rows), (iter(rows),), ({"rows": [(row for row in rows)]},), {"rows": map(torch.neg, rows)}):
        with pytest.raises(UsageError, match=r"arguments must last for both sides; found a \w+: give a list"):
            assert_parity(lambda rows: torch.ones(2), lambda rows: torch.ones(2), args)


def edited(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A file with other arrays, or another head."""

    def write(path: Path) -> None:
        arrays = dict(numpy.load(path))
        head = json.loads(str(arrays["head"]))
        change(arrays, head)
        numpy.savez(path, **{**arrays, "head": numpy.array(json.dumps(head))})

    return write


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.write_text("hello", encoding="utf-8"),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:300]),
    "another archive": lambda path: numpy.savez(path, a=numpy.ones(3)),
    "shape": edited(lambda arrays, head: arrays.update({"0.exact": arrays["0.exact"][:2]})),
    "moved": edited(lambda arrays, head: arrays.update({"0.moved": arrays["0.moved"].astype("float64")})),
    "lost": edited(lambda arrays, head: arrays.pop("1.value")),
    "no entries": edited(lambda arrays, head: head.update(entries=[])),
    "one run": edited(lambda arrays, head: head.update(entries=head["entries"][:2])),
    "dtype": edited(lambda arrays, head: head["entries"][0].update(dtype="int64")),
    "no dtype": edited(lambda arrays, head: head["entries"][0].update(dtype="nn")),
    "argument": edited(lambda arrays, head: arrays.pop("argument 0")),
    "entry": edited(lambda arrays, head: head.update(entries=[3])),
    "terms": edited(lambda arrays, head: head["entries"][0].update(terms=None)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_file_that_is_no_record_gets_one_sentence(
    ours: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    DAMAGED[damage](ours)
    with pytest.raises(UsageError, match="no recorded execution could be read from"):
        load_record(ours, "a")
    assert main(["parity", str(ours), str(ours)]) == 2
    error = capsys.readouterr().err
    assert "pickle" not in error
    assert "Traceback" not in error
