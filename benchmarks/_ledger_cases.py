"""The cases of the ledger, by source: those of the repository, and a table of all."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _ledger_case import (
    ANY,
    HEALTHY,
    LOW,
    ROOT,
    TESTS,
    Case,
    Expected,
    Findings,
    importable,
    in_module,
    judged,
    sources,
    subject_of,
)  # fmt: skip
from _ledger_case import outcome as outcome
from _ledger_outside import found, reported, shared_corpus, suites, zoo

import ampcheck
from ampcheck import Subject, audit, demo
from ampcheck.core.run import Finding, Run, Verdict


def corpus() -> Iterator[Case]:
    from test_corpus import COMPILED

    for file in sources(TESTS / "corpus"):
        wanted = file.constants.get("EXPECTED", {})
        defect = in_module(wanted["check"], wanted.get("module", ""), wanted.get("op")) if wanted else None
        for form in file.forms():
            for mode in file.constants.get("RUNS", (file.constants.get("RUN"),)):
                arms = (False, True) if file.path.stem in COMPILED and form != "healthy" else (False,)
                for compile in arms:
                    run = partial(
                        lambda file, form, mode, **k: judged(subject_of(file, form), mode, **k), file, form, mode
                    )
                    variant = f"{form} {mode}" + " compiled" * compile
                    expected = file.expected(form, defect)
                    yield Case("corpus", file.name, variant, partial(run, compile=compile), expected)


def training() -> Iterator[Case]:
    for file in sources(TESTS / "corpus" / "training"):
        check = file.constants.get("EXPECTED", {}).get("check", "")
        checks = (check,) if isinstance(check, str) else tuple(check)
        for form in file.forms():
            run = partial(lambda file, form: audit(subject_of(file, form)), file, form)
            yield Case("training", file.name, form, run, file.expected(form, Expected(checks)))


def handwritten() -> Iterator[Case]:
    from handwritten import CASES
    from handwritten.case import LOW as LOW_DTYPES

    from ampcheck.core.arm import Arm
    from ampcheck.records.faults import MASK
    from ampcheck.shadow import Shadow

    def faults(function: Callable[[torch.dtype], Any], dtype: torch.dtype) -> Findings:
        with Shadow() as shadow:
            function(dtype)
        reaching = (fault for fault in shadow.faults if fault.reaches and fault.kind != MASK)
        return [Finding(f.kind, Verdict.FAIL, "", "", f.where, arm=Arm(mode="shadow")) for f in reaching]

    for case in CASES:
        long = case.kind in ("drift", "absorption")
        for dtype in (*LOW_DTYPES, torch.float32):
            if long and dtype not in (*case.formats, torch.float32):
                continue  # hundreds of steps
            lines = case.fault_lines
            expected = HEALTHY
            if dtype in case.formats:
                expected = Expected(ANY, partial(lambda lines, f: f.where.line in lines, lines))
            name = f"tests/handwritten/{case.family}:{case.name}"
            yield Case("handwritten", name, _name(dtype), partial(faults, case.function, dtype), expected)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def loops() -> Iterator[Case]:
    import healthy_optimizers
    import healthy_protocols
    import healthy_variants
    import narrow_loops
    from healthy_loops import LOOPS
    from own_loss_scales import TESTS, own_loss_scale

    assert all((healthy_optimizers, healthy_protocols, healthy_variants))  # they register their loops
    for name, make in LOOPS.items():
        run = partial(lambda make: audit(make()), make)
        yield Case("loops", f"{make.__module__}:{name}", "healthy", run, HEALTHY, seconds=240)
    for name, test in TESTS.items():
        run = partial(lambda test: audit(own_loss_scale(test)), test)
        yield Case("loops", f"own_loss_scales:{name}", "healthy", run, HEALTHY)
    for change in narrow_loops.KEEP_UPDATES:
        run = partial(lambda change: audit(narrow_loops.with_optimizer(change, 1e-4)), change)
        yield Case("loops", f"narrow_loops:{change.__name__}", "healthy", run, HEALTHY)


def optimizers() -> Iterator[Case]:
    from _evidence import read_rows
    from optimizer_runs import CHECKS, PURE, Problem, _eagerly
    from optimizer_subjects import SUBJECTS
    from optimizers import agreement, damage

    def run(subject: Any, arm: str) -> Run:
        with _eagerly():
            return audit(Problem(subject, arm).mapping(), checks=CHECKS, name=subject.name)

    measured = read_rows(ROOT / "reports" / "evidence" / "optimizers.json")
    for key, subject in SUBJECTS.items():
        row = measured.get(key)
        for arm in PURE:
            expected = None
            if row is not None and row["audits"] and agreement(row, arm) not in ("", "later", "guard"):
                expected = Expected(CHECKS) if damage(row, arm) else HEALTHY
            needs = (subject.path.partition(".")[0],)
            yield Case("optimizers", ": ".join(key), arm, partial(run, subject, arm), expected, needs)


def long_runs() -> Iterator[Case]:
    from stopping_loops import CASES, STEPS
    from test_long_loops import DRIFTS, _line

    def watched(function: Callable[[torch.dtype], Any], dtype: torch.dtype) -> Run:
        with ampcheck.watch(fail_on="never") as seen:
            function(dtype)
        return seen.run

    for function in DRIFTS:
        here = partial(lambda line, f: f.where.line == line, _line(function))
        for dtype, expected in ((torch.bfloat16, Expected(ANY, here)), (torch.float32, HEALTHY)):
            name = f"tests/units/shadow/test_long_loops:{function.__name__}"
            yield Case("long", name, _name(dtype), partial(watched, function, dtype), expected)
    stops = Expected(("stagnation",))
    for case in CASES:
        for dtype, expected in ((case.dtype, stops), (torch.float32, HEALTHY)):
            run = partial(lambda case, dtype: audit({**case.make(dtype), "horizon": STEPS}), case, dtype)
            name = f"tests/training/stopping_loops:{case.kind}, {case}"
            yield Case("long", name, _name(dtype), run, expected)


def scripts() -> Iterator[Case]:
    from planted import PRECISIONS, healthy_source
    from test_training_scripts import NEEDS, PLANTS, line_of, loaded

    def run(source: str, script: str, steps: int) -> Run:
        os.chdir(tempfile.mkdtemp())
        return audit(loaded(source, Path.cwd(), script).main, steps=steps)

    for plant in PLANTS:
        here = partial(lambda plant, f: line_of(f, plant.source) == plant.line, plant)
        needs = tuple(NEEDS[s] for s in NEEDS if s == plant.script)
        call = partial(lambda plant: run(plant.source, plant.script, plant.steps), plant)
        yield Case(
            "scripts", f"{plant.script}: {plant.name}", "buggy", call, Expected((plant.check,), here), needs, 240
        )
    for script, precisions in PRECISIONS.items():
        needs = tuple(NEEDS[s] for s in NEEDS if s == script)
        for precision in precisions:
            call = partial(lambda s, p: run(healthy_source(s, p), s, 24), script, precision)
            yield Case("scripts", script, f"healthy {precision}", call, HEALTHY, needs, 240)


def hostile() -> Iterator[Case]:
    import odd_calls
    import odd_forwards
    import odd_modules
    import odd_neighbours
    import odd_values
    from odd_rows import ROWS

    assert all((odd_calls, odd_forwards, odd_modules, odd_neighbours, odd_values))  # they add their rows
    for name, (make, report) in ROWS.items():
        expected = {"passes": HEALTHY, "fails": Expected(report.checks or ANY), "warns": Expected(report.checks or ANY)}
        expected["raises"] = HEALTHY  # what it raises goes through
        run = partial(_odd, make, report.error or ())
        yield Case("hostile", f"{make.__module__}:{name}", "float16", run, expected.get(report.outcome))


def _odd(make: Callable[[], Any], promised: Any) -> Run:
    try:
        return audit(make(), dtype="float16", compile=False)
    except promised:
        return Run()


def docs() -> Iterator[Case]:
    import examples

    for check in examples.documented():
        for side, expected in (("failing", Expected((check,))), ("mended", HEALTHY)):
            run = partial(examples.judged, check, side)
            yield Case("docs", f"docs/examples/checks/{check}", side, run, expected, seconds=240)
    yield Case("docs", "ampcheck.demo", "healthy", lambda: audit(demo.subject(), dtype=LOW), HEALTHY, seconds=400)


def models() -> Iterator[Case]:
    import transformers_models

    for name in ("gpt2", "t5", "vit", "t5_hot"):
        for dtype in LOW:
            factory = getattr(transformers_models, name)
            run = partial(lambda f, d: audit(Subject(f(), name=f.__name__), dtype=d, compile=False), factory, dtype)
            hot = name == "t5_hot" and dtype == "float16"
            expected = Expected(("overflow",), lambda f: "DenseReluDense" in f.where.module) if hot else HEALTHY
            yield Case("models", f"tests/transformers_models:{name}", dtype, run, expected, ("transformers",))
    run = partial(lambda: audit(Subject(transformers_models.gpt2(), name="gpt2"), dtype="bfloat16"))
    yield Case("models", "tests/transformers_models:gpt2", "bfloat16 compiled", run, HEALTHY, ("transformers",), 400)


SOURCES: Mapping[str, Callable[[], Iterator[Case]]] = {
    "corpus": corpus,
    "training": training,
    "handwritten": handwritten,
    "docs": docs,
    "hostile": hostile,
    "shared corpus": shared_corpus,
    "reported": reported,
    "found": found,
    "models": models,
    "long": long_runs,
    "loops": loops,
    "scripts": scripts,
    "optimizers": optimizers,
    "zoo": zoo,
    "suites": suites,
}
OUTSIDE = ("shared corpus", "reported", "zoo", "suites")
"""Sources that lie beside the repository."""


def every_case(names: Sequence[str] = ()) -> Iterator[Case]:
    """The cases of all sources, or of those with such a name."""
    importable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, cases in SOURCES.items():
            if not names or name in names:
                yield from cases()
