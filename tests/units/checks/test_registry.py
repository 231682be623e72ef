"""The pages of help: one for each check that can be emitted, none besides, each of them whole."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import ampcheck
from ampcheck.checks import REGISTRY, VERDICTS, explain, for_kind
from ampcheck.cli.main import main
from ampcheck.core.check import Check
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict, Where
from ampcheck.core.subject import Kind

SOURCES = sorted(Path(ampcheck.__file__).parent.rglob("*.py"))


def calls(source: str) -> list[str]:
    """The names that a source file calls, without what they belong to."""
    functions = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [ast.unparse(function).rpartition(".")[2] for function in functions]


def builders(source: str) -> int:
    """How many calls of a source file build a `Finding` themselves."""
    return calls(source).count("Finding")


def test_each_record_that_a_check_needs_is_made_outside_of_the_checks() -> None:
    made = {name for path in SOURCES if "checks" not in path.parts for name in calls(path.read_text(encoding="utf-8"))}
    needed = {record for check in REGISTRY.values() for record in check.needs}
    assert needed <= made


def test_only_a_declared_check_builds_findings() -> None:
    assert {path.name for path in SOURCES if builders(path.read_text(encoding="utf-8"))} == {"check.py"}


def test_a_finding_that_is_built_elsewhere_would_be_seen() -> None:
    assert builders('x = Finding("graph-break", v, s, m)\ny = run.Finding("tf32", v, s, m)') == 2


def test_every_kind_of_subject_has_checks() -> None:
    for kind in Kind:
        assert "coverage" in for_kind(kind)
        assert len(for_kind(kind)) > 5


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.PASS])
def test_a_finding_carries_the_name_and_the_unit_of_its_check(verdict: Verdict) -> None:
    check = Check("flush", "range", "Requires: R.", unit="bits")
    plain = check.finding(verdict, "model", "text")
    assert (plain.check, plain.verdict, plain.subject, plain.message) == ("flush", verdict, "model", "text")
    assert plain.unit == "", "without a number there is nothing to give a unit to"
    measured = check.finding(verdict, "model", "text", observed=3, limit=2, where=Where("forward"), hint="do")
    assert (measured.observed, measured.limit, measured.unit, measured.hint) == (3.0, 2.0, "bits", "do")
    assert check.finding(verdict, "model", "text", observed=1, unit="ops").unit == "ops"


def test_a_pass_over_nothing_is_a_skip() -> None:
    check = explain("flush")
    assert check.passed("model", "all is well", 3).verdict is Verdict.PASS
    nothing = check.passed("model", "all is well", 0, observed=1.0, limit=2.0)
    assert (nothing.verdict, nothing.seen, nothing.observed) == (Verdict.SKIP, 0, None)
    with pytest.raises(ValueError, match="count of observations"):
        check.finding(Verdict.PASS, "model", "all is well")


@pytest.mark.parametrize("slug", REGISTRY)
def test_a_page_has_all_four_texts(slug: str) -> None:
    page = explain(slug)
    assert page.slug == slug
    written = [getattr(page, name) for name in ("requires", "measured", "causes", "fix")]
    assert len(written) == len(set(written)) == 4
    for text in written:
        assert len(text) > 20
        assert text[0].isupper() or text.split()[0] in {
            *REGISTRY,
            "float16",
            "bfloat16",
            "torch.arange(n).to(x.dtype)",
            "eps=1e-8",
        }
        assert text == text.strip()
        assert text.endswith(".")
        assert "  " not in text
        assert "\n" not in text


@pytest.mark.parametrize("slug", ["nope", "", "qqq"])
def test_an_unknown_slug_lists_the_checks(slug: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain(slug)
    assert repr(slug) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(known in str(caught.value) for known in REGISTRY)


def test_the_pages_cannot_be_changed() -> None:
    pages: Any = REGISTRY
    with pytest.raises(TypeError):
        pages["overflow"] = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(explain("overflow"), "page", "")  # noqa: B010  # a plain assignment does not pass the type checker


def test_every_verdict_is_explained_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(VERDICTS) == {verdict.value for verdict in Verdict}
    assert not set(VERDICTS) & set(REGISTRY)
    assert main(["explain", "incomplete"]) == 0
    assert "prevents a requested check" in capsys.readouterr().out
