"""No pass without evidence: every pass is built in one place, which turns one that rests on nothing into a skip."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck import Verdict, audit, demo

SOURCES = sorted(Path(ampcheck.__file__).parent.rglob("*.py"))


def passes(source: str) -> list[int]:
    """The lines that give `Verdict.PASS` to `Finding`, or to the builder of a check's findings."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    findings = (call for call in calls if ast.unparse(call.func).rpartition(".")[2] in ("Finding", "_build"))
    given = ((call, ast.unparse(a)) for call in findings for a in (*call.args, *(k.value for k in call.keywords)))
    return [call.lineno for call, argument in given if argument.endswith("Verdict.PASS")]


def test_a_pass_is_built_by_the_registry() -> None:
    builders = {path.name for path in SOURCES if passes(path.read_text(encoding="utf-8"))}
    assert builders == {"check.py"}
    assert passes("x = Finding('overflow', Verdict.PASS, 'model', 'text')") == [1]
    assert passes("x = record.Finding('overflow', subject='model', verdict=Verdict.PASS)") == [1]


def loop() -> dict[str, object]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}


@pytest.mark.parametrize(
    "subject",
    [
        lambda: demo.subject(),
        lambda: (nn.Linear(8, 8).half(), torch.randn(2, 8).half()),
        lambda: (lambda x: x.exp(), torch.randn(8)),
        loop,
        lambda: lambda: torch.ones(4).sum(),
    ],
    ids=["demo", "float16", "function", "loop", "callable"],
)
def test_every_pass_of_an_audit_counts_what_it_rests_on(subject) -> None:
    run = audit(subject(), compile=False)
    found = run.of(Verdict.PASS)
    assert found
    assert [f for f in found if not f.seen] == []
