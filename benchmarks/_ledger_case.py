"""A case of the ledger: what is run, and what is expected of it.

Files of cases are read, not imported, until their own process runs them.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ampcheck import audit
from ampcheck.core.run import Finding, Run, Verdict

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
TESTS = ROOT / "tests"
LOW = ("float16", "bfloat16")
PROBLEMS = (Verdict.FAIL, Verdict.WARN)

_FOLDERS = (
    "tests docs/site tests/promises/corpus tests/hostile tests/units/shadow tests/units/training/loops"
    " tests/training/loops tests/training"
)


def importable() -> None:
    """Let this process import the modules of the tests that hold cases."""
    sys.path[:0] = [path for name in _FOLDERS.split() if (path := str(ROOT / name)) not in sys.path]


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


def in_module(check: str | tuple[str, ...], module: str, op: str | None = None) -> Expected:
    checks = (check,) if isinstance(check, str) else check
    return Expected(checks, lambda f: f.where.module == module and op in (None, f.where.op))
