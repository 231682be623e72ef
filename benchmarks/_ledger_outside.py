"""The cases of the ledger that need more than the repository: public libraries, and what lies in ../shared."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from _ledger_case import (
    ANY,
    HEALTHY,
    LOW,
    ROOT,
    SHARED,
    Case,
    Expected,
    Findings,
    Source,
    in_module,
    judged,
    source,
    sources,
    subject_of,
)  # fmt: skip

from ampcheck import audit
from ampcheck.core.run import Finding, Run, collect
from ampcheck.core.subject import load_subject


def found() -> Iterator[Case]:
    from _found import FOUND, about, audit_function, by_seed, compares, folders

    def run(folder: Path, device: str) -> Findings:
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
            asserts = "assert_sharded" in file.text  # which starts the ranks
            run = partial(_asserted if asserts else _on_two_ranks if ranks else _as_it_is, file, form)
            yield Case("reported", file.name, form, run, file.expected(form, Expected(ANY)), seconds=240)
    for file in (*sources(folder / "scripts"), *sources(folder / "robustness")):
        yield from _odd(file)


_TRUE = {"long_forward": ("precision-loss",)}
"""Failures that odd subjects have beside what they were made for: a sum of 20,000 terms in float16 stands still."""


def _odd(file: Source) -> Iterator[Case]:
    """Scripts and odd subjects: those whose number in `sub(...)` is not 0 should fail."""
    decorated = re.findall(r"^@sub\(\[?(\d*)[^)]*\)\ndef (\w+)", file.text, re.MULTILINE)
    numbers = {name: number for number, name in decorated}
    names = [f for f in file.functions if f in numbers or f.startswith(("main", "subject")) or not numbers]
    for name in names:
        sound = Expected(known=_TRUE.get(name, ()))
        expected = None if name not in numbers else sound if numbers[name] in ("", "0") else Expected(ANY)
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


def _asserted(file: Source, form: str) -> Run:
    """The run of an assertion of ours that a function makes; the ranks that it starts import the file by its name."""
    sys.path.insert(0, str(file.path.parent))
    module = importlib.import_module(file.path.stem)
    with collect() as runs, contextlib.suppress(AssertionError):
        getattr(module, form)()
    return runs[-1]


def _on_two_ranks(file: Source, form: str) -> Run:
    """The first rank's run of an audit under torchrun."""
    written = Path(tempfile.mkdtemp()) / "run.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ampcheck"]
    command += ["audit", f"{file.path}:{form}", "--json", str(written)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    subprocess.run(command, env=environment, capture_output=True, timeout=600, check=False)
    return Run.load(written)


SUITES = ROOT.parent / "suites"
ZOO_MODELS, ZOO_COMPILED = 100, 30


def zoo() -> Iterator[Case]:
    folder = SHARED / "zoo"
    if not (folder / "results.csv").is_file():
        return
    families: dict[str, list[str]] = {}
    needs: dict[str, str] = {}
    ops: dict[str, int] = {}
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            families.setdefault(row["family"], []).append(row["name"])
            needs[row["name"]] = row["cls"].partition(".")[0]
            ops[row["name"]] = int(row["n_ops"])
    turns = range(max(map(len, families.values())))
    names = [members[turn] for turn in turns for members in families.values() if turn < len(members)]
    judged = json.loads((ROOT / "benchmarks" / "zoo_judged.json").read_text(encoding="utf-8"))
    true = {(entry["model"], entry["check"]) for entry in judged if entry["judgement"] in ("true", "PyTorch's")}

    def run(name: str, dtype: str, compile: bool) -> Run:
        return audit(load_subject(f"{folder / 'zoo.py'}:ZOO[{name}]"), dtype=dtype, compile=compile)

    chosen = names[:ZOO_MODELS]
    compiled_too = sorted(chosen, key=ops.__getitem__)[:ZOO_COMPILED]  # the compiler needs a second for ten ops
    for name in chosen:
        expected = Expected(known=tuple(check for model, check in sorted(true) if model == name))
        for dtype in LOW:
            yield Case("zoo", name, dtype, partial(run, name, dtype, False), expected, (needs[name],), 240)
        if name in compiled_too:
            compiled = partial(run, name, "bfloat16", True)
            yield Case("zoo", name, "bfloat16 compiled", compiled, expected, (needs[name],), 600)


def suites() -> Iterator[Case]:
    """Parts of public suites, where `python benchmarks/suites.py --fetch` has put their distributions beside the
    repository: a measure of false alarms in real code."""
    from suites import NIGHTLY, PARTS, judgements, run, unpacked

    def watched(name: str) -> Run:
        with tempfile.TemporaryDirectory() as folder:
            data, _ = run(name, unpacked(name, SUITES), Path(folder) / "run.json")
        return Run.from_json(data)

    for name in NIGHTLY:
        if unpacked(name, SUITES).is_dir():
            part = PARTS[name]
            true = {key.split()[0] for key, said in judgements(name).items() if said["judgement"] != "false"}
            known = Expected(known=tuple(sorted(true)))
            yield Case(
                "suites", f"../suites/{name}", part.dtype, partial(watched, name), known, part.needs, part.seconds
            )
