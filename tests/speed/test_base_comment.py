"""The comment: the verdict first, one table, the rest folded, and nothing in it that a stranger could make active."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest

from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict
from ampcheck.report.markdown import LENGTH, comment_of, escaped

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
    assert comment_of(run(text)).count(text) == comment_of(run()).count(text)


def test_line_ends_and_steering_characters_cannot_break_a_row():
    assert escaped("a\n| b\x1b[31m\u202e") == "a &#124; b&#92;x1b&#91;31m&#92;u202e"


def test_the_verdict_stands_first_and_the_evidence_is_folded():
    lines = comment_of(run()).splitlines()
    assert re.fullmatch("<!-- ampcheck speed [0-9a-f]{8} -->", lines[0])
    assert lines[1] == "### ❌ plain: 1 failed"
    assert lines[3].startswith("- ❌ **regression**: plain")
    shown, folded = comment_of(run()).split("<details>")
    assert "| arm | plain |" in shown
    assert "Launches" in folded
    assert folded.endswith("</details>\n")


def test_each_target_has_a_marker_of_its_own_and_keeps_it():
    def marker(title, **environment):
        return comment_of(replace(run(title), environment=environment)).splitlines()[0]

    assert marker("one") == marker("one", base="other") != marker("two")
    assert marker("one", target="m:f, mode default") == marker("two", target="m:f, mode default")
    assert marker("one", target="m:f, mode default") != marker("one", target="m:f")
    assert marker("--> <b>").count("-->") == 1


def test_an_undecided_run_tells_its_reason():
    assert "- ❔ **regression**: plain" in comment_of(run(verdict=Verdict.UNDECIDED))
    assert "- ✅ **regression**: plain" in comment_of(run(verdict=Verdict.PASS))


def test_a_comment_is_never_longer_than_github_takes():
    long = comment_of(run("word " * 50, rows=2000))
    assert len(long) > LENGTH - 1000
    assert len(long) <= 65_536
    assert long.endswith("</details>\n")
