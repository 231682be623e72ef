"""The comment: the verdict first, one table, the rest folded, and nothing in it that a stranger could make active."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from runs import HOSTILE_RUN, RUNS

from ampcheck.core.arm import Arm
from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict, Where
from ampcheck.report.markdown import LENGTH, comment_of, escaped, tables_of

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "@everyone",
    "fixes #1",
    "](https://example.com)",
    "| a | b |",
    "`code` *bold* _it_ ~~no~~",
    "![x](y)",
    "www.example.com",
    "1. list",
    "</details>",
    "&lt;b&gt;",
    "[^1]: x",
    "$$x$$",
    "-->",
]


def comment_of_speed(run):
    return comment_of(run, "speed")


def run(text="plain", verdict=Verdict.FAIL, rows=1):
    return Run(
        environment={"base": text},
        findings=(Finding("regression", verdict, text, text, hint=text),),
        coverage=Coverage({"launches": 9}),
        tables=(
            Table("head against base", ("arm", text), [(text, 1.0)] * rows, note=text),
            Table("Launches", ("round",), [(text,)]),
        ),
        title=text,
    )


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_text_from_outside_stays_text(text):
    safe = escaped(text)
    assert html.unescape(safe) == text
    assert not re.search(r"[<>|`*_~\[\]()!@#:$^]", safe.replace("&#", "&"))
    assert comment_of_speed(run(text)).count(text) == comment_of_speed(run()).count(text)


def test_line_ends_and_steering_characters_cannot_break_a_row():
    assert escaped("a\n| b\x1b[31m\u202e") == "a &#124; b&#92;x1b&#91;31m&#92;u202e"


def test_the_verdict_stands_first_and_the_evidence_is_folded():
    lines = comment_of_speed(run()).splitlines()
    assert re.fullmatch("<!-- ampcheck speed [0-9a-f]{8} -->", lines[0])
    assert lines[1] == "### ❌ plain: 1 failed"
    assert lines[3].startswith("- ❌ **regression**: plain")
    shown, folded = comment_of_speed(run()).split("<details>")
    assert "| arm | plain |" in shown
    assert "Launches" in folded
    assert folded.endswith("</details>\n")


def test_each_target_has_a_marker_of_its_own_and_keeps_it():
    def marker(title, **environment):
        return comment_of_speed(replace(run(title), environment=environment)).splitlines()[0]

    assert marker("one") == marker("one", base="other") != marker("two")
    assert marker("one", target="m:f, mode default") == marker("two", target="m:f, mode default")
    assert marker("one", target="m:f, mode default") != marker("one", target="m:f")
    assert marker("--> <b>").count("-->") == 1


def test_an_undecided_run_tells_its_reason():
    assert "- ❔ **regression**: plain" in comment_of_speed(run(verdict=Verdict.UNDECIDED))
    assert "- ✅ **regression**: plain" in comment_of_speed(run(verdict=Verdict.PASS))


def test_a_comment_is_never_longer_than_github_takes():
    long = comment_of_speed(run("word " * 50, rows=2000))
    assert len(long) > LENGTH * 0.7  # a quarter is kept for the evidence
    assert len(long) <= 65_536
    assert long.endswith("</details>\n")


# Of audits and policies ----------------------------------------------------------------------------------------------


def audited(*findings, tables=()):
    return Run({"torch": "2.13"}, findings, Coverage({"ops": 9}), tables, title="audit of m.py:f")


def test_each_kind_has_a_marker_of_its_own():
    markers = {kind: comment_of(audited(), kind).splitlines()[0] for kind in ("audit", "policy", "speed")}
    assert all(marker.startswith(f"<!-- ampcheck {kind} ") for kind, marker in markers.items())
    assert len({marker.partition(kind)[2] for kind, marker in markers.items()}) == 1


def test_a_problem_of_an_audit_has_its_subject_place_and_source_line():
    where = Where("forward", "ffn", "aten::mul", "m.py", 3)
    failed = Finding(
        "overflow", Verdict.FAIL, "f [float16]", "too large", where, code="y = x * 2", hint="scale", arm=Arm("float16")
    )
    other = replace(failed, subject="f [bfloat16]", arm=Arm("bfloat16"))
    (item,) = (line for line in lines_of(audited(failed, other)) if "too large" in line)
    assert html.unescape(item) == (
        "- ❌ **overflow** (float16 and bfloat16): too large<br>forward, ffn, aten::mul, m.py:3<br>"
        "<code>y = x * 2</code> <sub>Hint: scale</sub>"
    )


def test_many_passes_are_one_line_of_counts_and_skips_are_folded():
    passes = [Finding("overflow", Verdict.PASS, "m", f"finite {n}") for n in range(5)]
    skips = [Finding(check, Verdict.SKIP, "m", "no GPU") for check in ("tf32", "tf32", "resume", "stagnation")]
    shown, folded = comment_of(audited(*passes, *skips)).split("<details>")
    assert "- ✅ pass: overflow ×5" in shown
    assert "- ➖ skip: tf32 ×2, resume, stagnation" in shown
    assert "no GPU" in folded
    assert "no GPU" not in shown
    assert "finite" not in shown + folded


def test_tables_of_an_audit_are_evidence_and_folded():
    shown, folded = comment_of(audited(tables=(Table("Modules", ("name",), (("ffn",),)),))).split("<details>")
    assert "Modules" in folded
    assert "ffn" not in shown


def test_what_follows_is_beneath_its_cause():
    cause = Finding("overflow", Verdict.FAIL, "m", "too large")
    follower = Finding("flush", Verdict.WARN, "m", "off", cause=cause.key)
    problems = [line for line in lines_of(audited(follower, cause)) if line.lstrip().startswith("- ")]
    assert problems == ["- ❌ **overflow**: too large", "  - it explains flush"]


def lines_of(run):
    return comment_of(run).splitlines()


@pytest.mark.parametrize("kind", ["audit", "speed"])
@given(run=RUNS)
@example(run=HOSTILE_RUN)
@example(run=audited(*[Finding("overflow", Verdict.FAIL, "m", "word " * 400)] * 2000))
@example(run=audited(tables=(Table("t", ("c",), (("word " * 400,),) * 2000),) * 2))
def test_of_any_run_the_comment_fits_is_whole_and_has_one_marker(kind, run):
    comment = comment_of(run, kind)
    assert len(comment) <= 65_536
    comment.encode()
    assert comment.count("<details>") == comment.count("</details>") == comment.count("<!--") == 1
    assert comment.endswith("</details>\n")
    assert "\r" not in comment
    assert set(re.findall(r"<[^>]*>", comment.partition("\n")[2])) <= {
        "<details>", "</details>", "<summary>", "</summary>", "<sub>", "</sub>", "<br>", "<code>", "</code>",
    }  # fmt: skip


PAIRS = "bullet_list list_item paragraph heading strong table thead tbody tr th td"
OURS = {
    *"inline html_block html_inline text softbreak hardbreak".split(),
    *(f"{name}_{end}" for name in PAIRS.split() for end in ("open", "close")),
}
"""Kinds of tokens that a comment consists of: no link, image, code, rule, quote or emphasis."""


ACTIVE = st.text(st.sampled_from("-*_#>`~[](){}<>!|&;:.1 \n\t\\+=@/w"), max_size=12)


@given(run=RUNS, text=st.sampled_from(HOSTILE) | ACTIVE)
@example(run=HOSTILE_RUN, text="")
def test_a_parser_of_markdown_finds_nothing_in_text_from_outside(run, text):
    finding = Finding("overflow", Verdict.FAIL, text, text, Where(text, text, text, text), hint=text, code=text)
    table = Table(text, (text, text), ((text, text),), note=text)
    markdown = comment_of(replace(run, findings=(*run.findings, finding), tables=(*run.tables, table), title=text))
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    kinds = {token.type for token in tokens} | {inner.type for token in tokens for inner in token.children or ()}
    assert kinds - OURS == set()


@given(text=st.sampled_from(HOSTILE) | ACTIVE)
def test_a_file_of_tables_shows_text_from_outside_as_it_stands(text):
    """Read by people too: backslashes where a character is markup, and no numbers of characters."""
    markdown = tables_of(
        Run(tables=(Table("Targets", ("name", "verdict"), ((text or "a", "fail"),)),), title="a sweep")
    )
    assert "&#" not in markdown.replace("\\&", "")
    rows = [token for token in MarkdownIt("commonmark").enable("table").parse(markdown) if token.type == "inline"]
    (cell,) = [token for token in rows if token.map == rows[-1].map][:1]
    assert {inner.type for inner in cell.children or ()} <= {"text"}


def test_names_of_python_need_no_escape_in_a_file_of_tables():
    table = Table("Targets", ("name",), (("zoo.py:vit_tiny (float16)",),))
    assert "| zoo.py:vit_tiny (float16) |" in tables_of(Run(tables=(table,), title="a sweep"))
