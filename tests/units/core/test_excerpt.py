"""A finding shows its line as a compiler does: numbered, with context, and what is at fault underlined."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from runs import excerpts

from ampcheck.core.excerpt import Excerpt, excerpt_of
from ampcheck.core.run import Finding, Verdict, Where, describe
from ampcheck.core.source import with_excerpts


def underlined(code: str, op: str = "", module: str = "", line: int = 1) -> str:
    """What is marked in a line of `code`."""
    excerpt = excerpt_of(code.splitlines(keepends=True), line, op, module)
    return excerpt.lines[excerpt.line - excerpt.first][excerpt.start : excerpt.end]


def test_a_line_stands_between_two_lines_before_and_one_after_it_and_is_underlined() -> None:
    source = [
        "def forward(self, x):\n",
        "    y = self.up(x)\n",
        "    z = x\n",
        "    y = y * 600.0\n",
        "    return y\n",
        "#",
    ]
    assert list(excerpt_of(source, 4, "aten::mul.Tensor").drawn()) == [
        "2 | y = self.up(x)",
        "3 | z = x",
        "4 | y = y * 600.0",
        "  |     ^^^^^^^^^",
        "5 | return y",
    ]


@pytest.mark.parametrize(
    ("code", "op", "marked"),
    [
        ("y = a + b * c", "aten::mul.Tensor", "b * c"),
        ("y = a * b * c + d", "aten::mul.Tensor", "a * b * c"),
        ("y = a + b * c", "aten::add.Tensor", "a + b * c"),
        ("y = x.exp() / x.exp().sum()", "aten::sum.dim_IntList", ".sum()"),
        ("y *= scale", "aten::mul_.Tensor", "y *= scale"),
        ("y = torch.softmax(x, -1) + 1", "aten::_softmax", "torch.softmax(x, -1)"),
        ("y = self.act(x).half() + 1", "aten::_to_copy", ".half()"),
        ("return (bits @ powers).long()", "aten::_to_copy", ".long()"),
        ("n = (x * y).sum().item()", "aten::_local_scalar_dense", ".item()"),
        ("y = x.clip(0, 1)", "aten::clamp", "x.clip(0, 1)"),
        ("y = q @ k.mT", "aten::bmm", "q @ k.mT"),
        ("y = F.layer_norm(x, (4,)) * 2", "aten::native_layer_norm", "F.layer_norm(x, (4,))"),
        ("y = F.conv2d(x, w) + b", "aten::convolution", "F.conv2d(x, w)"),
        ("y = x[0] + 1", "aten::select.int", "x[0]"),
        ("return -x if ok else x", "aten::neg", "-x"),
        ("keep = scores >= limit", "aten::ge.Tensor", "scores >= limit"),
        ("é = 'ü', a * b", "aten::mul.Tensor", "a * b"),
        ("y = a * b", "aten::erfinv", "y"),
        ("y = a * (b", "aten::mul.Tensor", "y"),
        ("\ty = a * b", "aten::mul.Tensor", "a * b"),
    ],
)
def test_the_expression_of_an_op_is_underlined_where_it_can_be_found(code: str, op: str, marked: str) -> None:
    assert underlined(code if code[0] != "\t" else f"if 1:\n{code}", op, line=1 if code[0] != "\t" else 2) == marked


def test_the_call_of_a_module_is_underlined_where_its_op_is_not_in_the_line() -> None:
    assert underlined("return x + self.down(hidden)", "aten::addmm", "blocks.0.down") == "self.down(hidden)"


def test_a_part_of_a_longer_expression_is_underlined_in_its_own_line() -> None:
    code = "y = (\n    first(a * b) +\n    second(c)\n)\n"
    assert underlined(code, "aten::mul.Tensor", line=2) == "a * b"
    assert underlined(code, "aten::add.Tensor", line=3) == "second(c)"


def test_a_line_that_is_not_there_has_no_excerpt() -> None:
    assert [excerpt_of(["a\n", "\n"], line).lines for line in (-1, 0, 2, 3)] == [()] * 4


@given(excerpts(), st.integers(12, 60))
def test_no_line_of_an_excerpt_exceeds_the_width_and_each_has_its_number(excerpt: Excerpt, width: int) -> None:
    lines = list(excerpt.drawn(width))
    assert all(cell_len(line) <= width for line in lines)
    numbers = [line.split("|")[0].strip() for line in lines]
    assert [n for n in numbers if n] == [str(excerpt.first + i) for i in range(len(excerpt.lines))]


def test_what_is_at_fault_is_visible_in_a_long_line() -> None:
    code = f"y = {' + '.join(f'term_{i}' for i in range(30))} + left * right"
    line, carets, *_ = excerpt_of([code], 1, "aten::mul.Tensor").drawn(40)
    assert line.endswith("left * right")
    assert carets.endswith("^" * len("left * right"))
    assert line.startswith("1 | …")


@pytest.mark.parametrize("numbers", [(0, 1, 0, 0), (1, 3, 0, 0), (1, 1, 2, 1), (1, 1, 0, 9), (10**9, 10**9, 0, 1)])
def test_numbers_that_do_not_fit_the_lines_are_refused(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="an excerpt must"):
        Excerpt(("y = x",), *numbers)


def test_a_problem_gets_the_excerpt_of_its_file_and_its_description_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("x = 1\ny = x * 2\n")
    where = Where("forward", op="aten::mul.Tensor", file=str(file), line=2)
    findings = [Finding("overflow", verdict, "s", "m", where) for verdict in (Verdict.FAIL, Verdict.PASS)]
    failed, passed = with_excerpts(findings)
    assert passed == findings[1]
    assert "    2 | y = x * 2\n      |     ^^^^^" in describe(failed)
    assert with_excerpts([failed])[0] is failed
