"""Promise: a training script is handed over by one line; healthy it is silent, and its mistake is named at its line."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import planted_calls as calls
import planted_values as values
import pytest
from planted import PRECISIONS, Plant, healthy_source

import ampcheck
from ampcheck.core.run import Finding, Run, Verdict, followers

# The libraries warn of their own doings, and so may a user's script.
pytestmark = pytest.mark.filterwarnings("ignore")

NEEDS = {"accelerated": "accelerate", "llama_trainer": "transformers", "lightning_module": "lightning"}

PLANTS = (
    *(calls.SCALER + calls.SCHEDULER + calls.SCOPE + calls.CONSTRUCTION + calls.ACCUMULATION),
    *(values.DTYPE + values.AVERAGES + values.METRICS),
)


_numbers = itertools.count()


def loaded(source: str, folder: Path, script: str) -> ModuleType:
    """A script as a module in a file of its own."""
    if script in NEEDS:
        pytest.importorskip(NEEDS[script])
    if script in ("accelerated", "llama_trainer"):  # it keeps its settings for the whole process
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    name = f"{script}_{next(_numbers)}"  # Python remembers the source lines of a file by its name
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def line_of(finding: Finding, source: str) -> str:
    """The source line that a finding names."""
    where, lines = finding.where, source.splitlines()
    known = where.file.endswith(".py") and where.line is not None and where.line <= len(lines)
    return lines[where.line - 1].strip() if known and where.line is not None else ""


def shown(findings: list[Finding], source: str) -> str:
    return "\n".join(f"{f.verdict.value} {f.check} at `{line_of(f, source)}`: {f.message}" for f in findings)


def require_named(run: Run, plant: Plant) -> None:
    """One cause is shown: the expected check names the mistake at its line, and the other failures follow from it."""
    verdict = Verdict.WARN if plant.warns else Verdict.FAIL
    problems = [f for f in run.findings if f.verdict in (Verdict.FAIL, verdict)]
    named = [f for f in problems if f.check == plant.check and f.verdict is verdict]
    report = shown(problems, plant.source)
    assert any(line_of(f, plant.source) == plant.line for f in named), f"not named:\n{report}"
    causes = [f for f in problems if not f.cause and (f.verdict is Verdict.FAIL or plant.warns)]
    (cause,) = [f for f in causes if f.check == plant.check and line_of(f, plant.source) == plant.line] or [None]
    assert cause is not None, f"the mistake follows from something else:\n{report}"
    assert cause.code == plant.line or plant.line in cause.message
    beside = {f.check for f in causes if f is not cause}
    assert beside <= set(plant.beside), f"more than one cause:\n{report}"
    failed = {f.check for f in problems if f.verdict is Verdict.FAIL and f.cause == cause.key}
    assert failed <= {plant.check, *plant.follows}, f"more fails than the mistake explains:\n{report}"
    shown_below = {f.check for f in followers(run.findings).get(id(cause), ())}
    assert failed <= shown_below
    assert [f.cause for f in Run.from_json(run.to_json()).findings] == [f.cause for f in run.findings]
    if shown_below:
        lines = [line for line in str(run).splitlines() if line.startswith("  it explains ")]
        assert any(all(check in line for check in shown_below) for line in lines)


HEALTHY = [(script, precision, 24) for script, precisions in PRECISIONS.items() for precision in precisions]
NARROWEST = [
    *(("nanogpt", "float16", 4), ("nanogpt", "pure bfloat16", 4), ("reference", "float16", 4)),
    *(("accelerated", "bf16", 4), ("llama_trainer", "bfloat16", 4), ("lightning_module", "bf16-mixed", 4)),
]


@pytest.mark.parametrize(("script", "precision", "steps"), [*NARROWEST, *HEALTHY])
def test_a_healthy_script_is_silent(script: str, precision: str, steps: int, folder: Path) -> None:
    source = healthy_source(script, precision)
    run = ampcheck.audit(loaded(source, folder, script).main, steps=steps)
    problems = [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]
    assert not problems, shown(problems, source)
    assert run.coverage.seen["steps"] == steps


@pytest.mark.parametrize("plant", [pytest.param(plant, id=plant.name) for plant in PLANTS])
def test_a_planted_mistake_is_named_at_its_line(plant: Plant, folder: Path) -> None:
    main = loaded(plant.source, folder, plant.script).main
    require_named(ampcheck.audit(main, steps=plant.steps), plant)


PAIRS = (
    ("backward inside autocast", "weights averaged by hand in bfloat16"),
    ("backward inside autocast", "a running loss in a bfloat16 local"),
    ("a schedule that steps first", "a meter that overflows"),
    ("a schedule that steps first", "a sum of squares in float16"),
    ("no update", "the norm of scaled gradients in float16"),
    ("beta2 of 0.999 in bfloat16", "weights averaged by hand in float16"),
)
"""Mistakes that have nothing to do with each other, in the same script."""


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_mistakes_stay_two_findings(pair: tuple[str, str], folder: Path) -> None:
    first, second = (next(plant for plant in PLANTS if plant.name == name) for name in pair)
    both = replace(first, changes=f"{first.changes.strip(chr(10))}\n...\n{second.changes.strip(chr(10))}")
    run = ampcheck.audit(loaded(both.source, folder, both.script).main, steps=max(first.steps, second.steps))
    problems = [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]
    for plant in (first, second):
        assert any(line_of(f, both.source) == plant.line and not f.cause for f in problems), (
            f"{plant.name} is no finding of its own:\n{shown(problems, both.source)}"
        )


WATCHED = ("clip without unscale", "weights averaged in bfloat16", "a running loss in a bfloat16 local")


@pytest.mark.parametrize("plant", [p for p in PLANTS if p.name in WATCHED], ids=lambda plant: plant.name)
def test_a_watch_around_the_script_names_the_same_line(plant: Plant, folder: Path) -> None:
    main = loaded(plant.source, folder, plant.script).main
    with ampcheck.watch(fail_on="never") as watched:
        main()
    require_named(watched.run, plant)


@pytest.mark.parametrize(("script", "precision"), [("nanogpt", "float16"), ("reference", "float16")])
def test_a_watch_around_a_healthy_script_is_silent(script: str, precision: str, folder: Path) -> None:
    source = healthy_source(script, precision)
    main = loaded(source, folder, script).main
    with ampcheck.watch(fail_on="never") as watched:
        main()
    problems = [f for f in watched.run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]
    assert not problems, shown(problems, source)


def test_the_command_takes_a_script_and_its_function(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ampcheck.cli.main import main as command

    plant = next(p for p in PLANTS if p.name == "clip before unscale")
    (folder / "train.py").write_text(plant.source, encoding="utf-8")
    assert command(["audit", "train.py:main", "--steps", "4"]) == 1
    assert "scaler-protocol" in capsys.readouterr().out
    (folder / "healthy.py").write_text(healthy_source("nanogpt", "float16"), encoding="utf-8")
    assert command(["audit", "healthy.py:main", "--steps", "4"]) == 0


def test_there_are_at_least_thirty_mistakes_and_each_can_be_planted() -> None:
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 30
    for plant in PLANTS:
        assert plant.source != healthy_source(plant.script, plant.precision)
