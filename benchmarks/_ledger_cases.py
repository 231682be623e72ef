"""The cases of the ledger, by source: what is run, and what is expected of it.

A case is listed without being run: files of cases are read, not imported, until their own process runs them.
"""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import ampcheck
from ampcheck import Subject, audit, demo
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import load_subject

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
TESTS = ROOT / "tests"
LOW = ("float16", "bfloat16")
PROBLEMS = (Verdict.FAIL, Verdict.WARN)

for _folder in ("docs/site", "tests/corpus", "tests/hostile", "tests/shadow", "tests/training/loops", "tests/training"):
    sys.path.insert(0, str(ROOT / _folder))
sys.path.insert(0, str(TESTS))

Findings = Sequence[Finding]


@dataclass(frozen=True)
class Expected:
    """Which checks say so in a defect, and where; none of a healthy case. known: failures of it that are true."""

    checks: tuple[str, ...] = ()
    here: Callable[[Finding], bool] = lambda _: True
    known: tuple[str, ...] = ()


HEALTHY = Expected()
ANY = ("*",)


def outcome(expected: Expected | None, findings: Findings) -> str:
    """What a run is worth: of a defect `at`, `elsewhere` or `missed`; of a healthy case `silent`, `warned`, `alarm`."""
    if expected is None:
        return ""
    loud = [f for f in findings if f.verdict in PROBLEMS]
    if not expected.checks:
        loud = [f for f in loud if f.check not in expected.known]
        return ("alarm" if any(f.verdict is Verdict.FAIL for f in loud) else "warned") if loud else "silent"
    if any(f.check in expected.checks or expected.checks == ANY for f in loud if expected.here(f)):
        return "at"
    return "elsewhere" if loud else "missed"


@dataclass(frozen=True)
class Case:
    """run: returns the findings. expected: None where nothing is known. needs: modules that must be installed. seconds:
    of a processor that it may take."""

    source: str
    name: str
    variant: str
    run: Callable[[], Findings | Run]
    expected: Expected | None = None
    needs: tuple[str, ...] = ()
    seconds: int = 120

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.variant

    @property
    def available(self) -> bool:
        """Whether what it needs is installed."""
        return all(map(_installed, self.needs))


@cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True)
class Source:
    """A file of cases, read but not run."""

    path: Path
    functions: tuple[str, ...]
    constants: Mapping[str, Any]
    text: str
    imports: tuple[str, ...]

    @property
    def name(self) -> str:
        folder = SHARED if self.path.is_relative_to(SHARED) else ROOT
        name = str(self.path.relative_to(folder).with_suffix(""))
        return f"../shared/{name}" if folder == SHARED else name

    def forms(self) -> list[str]:
        return [form for form in ("buggy", "fixed", "healthy") if form in self.functions]

    def expected(self, form: str, defect: Expected | None) -> Expected | None:
        return defect if form == "buggy" else HEALTHY

    def load(self) -> Any:
        """The module; Dynamo resumes a broken graph by the module's name, so it stays registered."""
        name = re.sub(r"\W", "_", self.name)
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            sys.path.insert(0, str(self.path.parent))  # files of a folder import each other
            spec.loader.exec_module(module)
        return sys.modules[name]


def sources(folder: Path) -> Iterator[Source]:
    """The files of a folder."""
    for path in sorted(folder.glob("*.py")):
        if not path.stem.startswith(("test_", "_", "conftest")):
            yield source(path)


def source(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    functions, constants, imports = [], {}, []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            functions.append(node.name)
        elif isinstance(node, ast.Import):
            imports += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return Source(path, tuple(functions), constants, text, tuple(dict.fromkeys(imports)))


def judged(subject: Any, mode: str, *, compile: bool = False) -> Run:
    """The audit in the mode that a case asks for: `native` or `autocast:DTYPE`."""
    how, _, dtype = mode.partition(":")
    if how == "native":
        return audit(subject, compile=compile)
    return audit(subject, dtype=dtype, autocast=True, compile=compile)


def subject_of(file: Source, form: str) -> Any:
    """What a form returns, or for a case of kind `call` the form itself."""
    made = getattr(file.load(), form)
    called = file.constants.get("KIND") == "call" or "\nkind: call\n" in file.text
    return made if called else made()


def in_module(check: str, module: str, op: str | None = None) -> Expected:
    return Expected((check,), lambda f: f.where.module == module and op in (None, f.where.op))


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
        for form in file.forms():
            run = partial(lambda file, form: audit(subject_of(file, form)), file, form)
            yield Case("training", file.name, form, run, file.expected(form, Expected((check,))))


def handwritten() -> Iterator[Case]:
    from handwritten import CASES
    from handwritten.case import LOW as LOW_DTYPES

    from ampcheck.shadow import Shadow
    from ampcheck.shadow.faults import MASK

    def faults(function: Callable[[torch.dtype], Any], dtype: torch.dtype) -> Findings:
        with Shadow() as shadow:
            function(dtype)
        reaching = (fault for fault in shadow.faults if fault.reaches and fault.kind != MASK)
        return [Finding(f.kind, Verdict.FAIL, "[shadow]", "", f.where) for f in reaching]

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
    from healthy_loops import LOOPS

    assert all((healthy_optimizers, healthy_protocols, healthy_variants))  # they register their loops
    for name, make in LOOPS.items():
        run = partial(lambda make: audit(make()), make)
        yield Case("loops", f"{make.__module__}:{name}", "healthy", run, HEALTHY, seconds=240)


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
            name = f"tests/shadow/test_long_loops:{function.__name__}"
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
        import os
        import tempfile

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
        run = partial(lambda make: audit(make(), dtype="float16", compile=False), make)
        yield Case("hostile", f"{make.__module__}:{name}", "float16", run, expected.get(report.outcome))


def docs() -> Iterator[Case]:
    import examples

    for check in examples.documented():
        for side, expected in (("failing", Expected((check,))), ("mended", HEALTHY)):
            run = partial(examples.judged, check, side)
            yield Case("docs", f"docs/examples/checks/{check}", side, run, expected, seconds=240)
    yield Case("docs", "ampcheck.demo", "buggy", lambda: audit(demo.subject(), dtype=LOW), Expected(ANY))


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


def found() -> Iterator[Case]:
    from _found import FOUND, about, audit_function, by_seed, compares, folders

    def run(folder: Path, device: str) -> Findings:
        import contextlib
        import io
        import runpy

        script = str(folder / "repro.py")
        sys.argv = [script]

        def repro() -> None:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                runpy.run_path(script, run_name="__main__")

        if by_seed(folder):
            result = audit_function(runpy.run_path(script, run_name="repro"), device, folder.name)
        else:
            result = audit(repro, device=device, name=folder.name)
        plain = {id(f): {"where": {"file": f.where.file}, "message": f.message} for f in result.findings}
        return [f for f in result.findings if not compares(plain[id(f)])]

    for folder in folders():
        file = source(folder / "repro.py")
        text = (folder / "report.md").read_text(encoding="utf-8")
        check = re.search(r"^check: ([\w-]+)", text, re.MULTILINE)
        defect = None if check and check[1] == "missed" else Expected((check[1],) if check else ANY)
        devices = ("cpu", "cuda") if "autocast" in about(folder)["way"].lower() else ("cpu",)
        for device in devices:
            expected = defect if device == "cpu" or not re.search("emulated.*does not", text) else None
            name = str(folder.relative_to(FOUND.parents[1]))
            yield Case("found", name, device, partial(run, folder, device), expected, file.imports, 240)


def shared_corpus() -> Iterator[Case]:
    import test_compiled_corpus
    import test_corpus
    import test_training_corpus

    controls = test_compiled_corpus.CONTROLS
    loops = test_training_corpus.EXPECTED
    compiled = {name: check for name, (_, check) in test_compiled_corpus.EXPECTED.items()}

    def forward(file: Source, form: str, mode: str) -> Run:
        return judged(test_corpus.declared(file.path.stem, subject_of(file, form)), mode)

    for file in sources(SHARED / "corpus"):
        name = file.path.stem
        mode = next((line.split()[1] for line in file.text.splitlines() if line.startswith("run: ")), "")
        for form in file.forms():
            if name in test_corpus.SHARED_EXPECTED:
                defect, run = in_module(*test_corpus.SHARED_EXPECTED[name]), partial(forward, file, form, mode)
            else:
                check = {**loops, **compiled}.get(name)
                defect = Expected((check,)) if check else HEALTHY if name in controls else None
                run = partial(lambda file, form: audit(subject_of(file, form)), file, form)
            seconds = 400 if name.startswith("cm") else 240
            yield Case("shared corpus", file.name, form, run, file.expected(form, defect), seconds=seconds)


def reported() -> Iterator[Case]:
    folder = SHARED / "reported"
    for file in sources(folder / "models"):
        how = dict(file.constants.get("HOW", {}))
        how.pop("compile_only", None)
        line = file.constants.get("LINE", "")
        here = partial(lambda file, line, f: line in _source_line(file, f), file, line)
        for form in file.forms():
            run = partial(lambda file, form, how: audit(subject_of(file, form), **how), file, form, how)
            expected = file.expected(form, Expected(tuple(file.constants.get("WANT", ANY)), here))
            yield Case("reported", file.name, form, run, expected, seconds=400)
    for file in sources(folder / "training"):
        ranks = "dist." in file.text
        forms = file.forms() or [f for f in file.functions if f not in ("mlp", "_t")]
        for form in forms:
            run = partial(_on_two_ranks if ranks else _as_it_is, file, form)
            yield Case("reported", file.name, form, run, file.expected(form, Expected(ANY)), seconds=240)
    for file in (*sources(folder / "scripts"), *sources(folder / "robustness")):
        yield from _odd(file)


def _odd(file: Source) -> Iterator[Case]:
    """Scripts and odd subjects: those whose number in `sub(...)` is not 0 should fail."""
    decorated = re.findall(r"^@sub\(\[?(\d*)[^)]*\)\ndef (\w+)", file.text, re.MULTILINE)
    numbers = {name: number for number, name in decorated}
    names = [f for f in file.functions if f in numbers or f.startswith(("main", "subject")) or not numbers]
    for name in names:
        expected = None if name not in numbers else HEALTHY if numbers[name] in ("", "0") else Expected(ANY)
        run = partial(_as_it_is if name.startswith("main") else _odd_subject, file, name)
        yield Case("reported", file.name, name, run, expected, seconds=60)


def _odd_subject(file: Source, name: str) -> Run:
    return audit(getattr(file.load(), name)(), compile=file.path.stem == "raise_compiled", dtype="float16")


def _source_line(file: Source, finding: Finding) -> str:
    lines, number = file.text.splitlines(), finding.where.line
    own = Path(finding.where.file).name == file.path.name
    return lines[number - 1] if own and number is not None and number <= len(lines) else ""


def _as_it_is(file: Source, form: str) -> Run:
    return audit(load_subject(f"{file.path}:{form}", trains=True))


def _on_two_ranks(file: Source, form: str) -> Run:
    """The first rank's run of an audit under torchrun."""
    import os
    import subprocess
    import tempfile

    written = Path(tempfile.mkdtemp()) / "run.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ampcheck"]
    command += ["audit", f"{file.path}:{form}", "--json", str(written)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    subprocess.run(command, env=environment, capture_output=True, timeout=600, check=False)
    return Run.load(written)


ZOO_MODELS, ZOO_COMPILED = 100, 30


def zoo() -> Iterator[Case]:
    folder = SHARED / "zoo"
    if not (folder / "results.csv").is_file():
        return
    families: dict[str, list[str]] = {}
    needs: dict[str, str] = {}
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            families.setdefault(row["family"], []).append(row["name"])
            needs[row["name"]] = row["cls"].partition(".")[0]
    turns = range(max(map(len, families.values())))
    names = [members[turn] for turn in turns for members in families.values() if turn < len(members)]
    judged = json.loads((ROOT / "benchmarks" / "zoo_judged.json").read_text(encoding="utf-8"))
    true = {(entry["model"], entry["check"]) for entry in judged if entry["judgement"] in ("true", "PyTorch's")}

    def run(name: str, dtype: str, compile: bool) -> Run:
        return audit(load_subject(f"{folder / 'zoo.py'}:ZOO[{name}]"), dtype=dtype, compile=compile)

    for number, name in enumerate(names[:ZOO_MODELS]):
        expected = Expected(known=tuple(check for model, check in sorted(true) if model == name))
        for dtype in LOW:
            yield Case("zoo", name, dtype, partial(run, name, dtype, False), expected, (needs[name],), 240)
        if number < ZOO_COMPILED:
            compiled = partial(run, name, "bfloat16", True)
            yield Case("zoo", name, "bfloat16 compiled", compiled, expected, (needs[name],), 600)


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
}
OUTSIDE = ("shared corpus", "reported", "zoo")
"""Sources that lie beside the repository."""


def every_case(names: Sequence[str] = ()) -> Iterator[Case]:
    """The cases of all sources, or of those with such a name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, cases in SOURCES.items():
            if not names or name in names:
                yield from cases()
