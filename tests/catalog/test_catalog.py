"""The pages of help: one for each check that can be emitted, none besides, each of them whole."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import ampcheck
from ampcheck.autocast.guards.guard import GUARD_CHECKS
from ampcheck.catalog import EXPLANATIONS, VERDICTS, Explanation, explain
from ampcheck.cli.main import main
from ampcheck.compiled.accuracy.checks import CHECKS as ACCURACY_CHECKS
from ampcheck.compiled.graph.checks import GRAPH_CHECKS
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict
from ampcheck.numerics import CHECKS, OBSERVABLE
from ampcheck.search.checks import CHECKS as SEARCH_CHECKS
from ampcheck.training.judge import CHECKS as TRAINING_CHECKS

SOURCES = sorted(Path(ampcheck.__file__).parent.rglob("*.py"))


def emitted(source: str) -> set[str]:
    """The slugs that a source file gives to `Finding`, written there or kept in a name `check` or `slug`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Finding", "passed") and node.args:
            found |= texts(node.args[0])
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") in ("check", "slug") for t in node.targets):
            found |= texts(node.value)
    return found


def texts(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_there_is_a_page_for_each_check_that_can_be_emitted_and_none_besides() -> None:
    assert set(EXPLANATIONS) == {
        *CHECKS,
        *ACCURACY_CHECKS,
        "blame",
        "policy-drift",
        "policy-gap",
        "policy-unregistered",
        "policy-banned",
        *GUARD_CHECKS,
        *GRAPH_CHECKS,
        *TRAINING_CHECKS,
        *SEARCH_CHECKS,
        "speedup",
        "regression",
        "start-up",
        "compile-time",
        "peak-memory",
    }
    assert set(OBSERVABLE) <= set(EXPLANATIONS)


def test_every_slug_that_the_source_writes_into_a_finding_has_a_page() -> None:
    slugs = set().union(*(emitted(path.read_text(encoding="utf-8")) for path in SOURCES))
    assert len(slugs) >= 10, "this test no longer sees the findings"
    assert slugs - set(EXPLANATIONS) == set()


def test_a_slug_without_a_page_would_be_seen() -> None:
    planted = 'check = "tf32"\nFinding("graph-break", v, s, m)\nFinding("a" if x else "b", v, s, m)\n'
    assert emitted(planted) == {"tf32", "graph-break", "a", "b"}


@pytest.mark.parametrize("slug", EXPLANATIONS)
def test_a_page_has_all_four_texts(slug: str) -> None:
    page = explain(slug)
    assert page.slug == slug
    written = [getattr(page, f.name) for f in dataclasses.fields(Explanation) if f.name != "slug"]
    assert len(written) == len(set(written)) == 4
    for text in written:
        assert len(text) > 20
        assert text[0].isupper() or text.split()[0] in {
            *EXPLANATIONS,
            "float16",
            "bfloat16",
            "torch.arange(n).to(x.dtype)",
            "eps=1e-8",
        }
        assert text == text.strip()
        assert text.endswith(".")
        assert "  " not in text
        assert "\n" not in text


@pytest.mark.parametrize("slug", ["nope", "", "Overflow", "overflow ", "float"])
def test_an_unknown_slug_lists_the_checks(slug: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain(slug)
    assert repr(slug) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(known in str(caught.value) for known in EXPLANATIONS)


def test_the_pages_cannot_be_changed() -> None:
    pages: Any = EXPLANATIONS
    with pytest.raises(TypeError):
        pages["overflow"] = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(explain("overflow"), "mend", "")  # noqa: B010  # a plain assignment does not pass the type checker


def test_every_verdict_is_explained_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(VERDICTS) == {verdict.value for verdict in Verdict}
    assert not set(VERDICTS) & set(EXPLANATIONS)
    assert main(["explain", "incomplete"]) == 0
    assert "prevents a check that was asked for" in capsys.readouterr().out
