"""Defects of public libraries in 16 bits, as `reports/found` has measured them: what is installed here, what code uses.

Nothing is imported but metadata: neither torch, nor the packages, nor the code.
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from packaging.utils import canonicalize_name

from ampcheck.core.check import Check
from ampcheck.core.environment import installed
from ampcheck.core.errors import UsageError, brief, require_schema
from ampcheck.core.json_files import from_plain, read_json, untag_nonfinite
from ampcheck.core.run import Coverage, Finding, Run, Where
from ampcheck.core.syntax import dotted
from ampcheck.core.text import counted, did_you_mean
from ampcheck.lint.engine import UNREAD, content_of, is_binary, parse, python_files
from ampcheck.lint.source import Source
from ampcheck.outcome.comments import commented

DATA = Path(__file__).with_name("known.json")
SCHEMA = 1

WEIGHTS = ("bfloat16", "half")
"""Ways to meet a defect without autocast: weights and data in that format."""

OTHERS = "defects whose way, dtype or device does not matter"

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

State: TypeAlias = Literal["broken", "mended", "unmeasured", "not installed"]


@dataclass(frozen=True, slots=True)
class Function:
    """Function that breaks. name: as the library documents it. names: dotted names that mean it in source, or its
    class; those of methods of any receiver begin with a dot. beside: a file uses it only where it also has one of
    these."""

    name: str
    names: tuple[str, ...]
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """Outcome of the repro with one release. broken: the devices whose autocast it broke under, that of `cuda` emulated
    on a CPU; without autocast `cpu` alone is measured. Empty: mended."""

    release: str
    torch: str
    python: str
    date: str
    broken: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Defect:
    """One folder of `reports/found`. way: autocast, one of `WEIGHTS`, or documented by the library. checks: those by
    which an audit reports it. cure: Markdown. repro: a script that exits with 1 while the library is broken."""

    name: str
    title: str
    package: str
    functions: tuple[Function, ...]
    way: str
    dtypes: tuple[str, ...]
    severity: str
    checks: tuple[str, ...]
    measured: tuple[Measurement, ...]
    cure: str
    repro: str

    @property
    def releases(self) -> dict[str, bool]:
        """The measured releases from the oldest, and whether each was broken, with any PyTorch."""
        return {
            row.release: any(one.broken for one in self.measured if one.release == row.release) for row in self.measured
        }

    @property
    def since(self) -> str:
        """The oldest release that was measured to be broken; empty without one."""
        return next((release for release, broken in self.releases.items() if broken), "")

    @property
    def mended(self) -> str:
        """The oldest measured release after the last broken one; empty without one."""
        mended = ""
        for release, broken in self.releases.items():
            mended = "" if broken else mended or release
        return mended

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices under whose autocast any release was measured to be broken."""
        return tuple(sorted({device for row in self.measured for device in row.broken}))

    @property
    def met(self) -> str:
        """Dtypes and circumstances of the defect, in words."""
        names = {"cpu": "the CPU", "cuda": "CUDA, emulated"}
        autocast = f"under autocast of {' and of '.join(names.get(device, device) for device in self.devices)}"
        return f"{' and '.join(self.dtypes)}, {'with 16-bit weights, on a CPU' if self.way in WEIGHTS else autocast}"

    def matters(self, *, ways: Sequence[str], dtypes: Sequence[str], devices: Sequence[str]) -> bool:
        """Return whether it is met in one of these, each empty for all; without autocast no device matters."""
        chosen = [(ways, (self.way,)), (dtypes, self.dtypes)]
        chosen += [(devices, self.devices)] if self.way not in WEIGHTS else []
        return all(not wanted or set(wanted) & set(those) for wanted, those in chosen)


@dataclass(frozen=True, slots=True)
class Data:
    """The file. command: which wrote it."""

    schema: int
    command: str
    defects: tuple[Defect, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A defect, and the release of its package that is installed here; empty without one."""

    defect: Defect
    release: str

    @property
    def state(self) -> State:
        """Measured state of the installed release; a label such as `+cpu` makes no other."""
        if not self.release:
            return "not installed"
        measured = {of.partition("+")[0]: broken for of, broken in self.defect.releases.items()}
        broken = measured.get(self.release.partition("+")[0])
        return "unmeasured" if broken is None else "broken" if broken else "mended"


def read_defects(path: str | os.PathLike[str] = DATA) -> tuple[Defect, ...]:
    """The defects in a file that `benchmarks/hunt.py --known` wrote. Raises `UsageError` for a damaged one."""
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the known defects in {os.fspath(path)}: {error}") from error
    require_schema(data, os.fspath(path), "list of known defects", SCHEMA)
    try:
        return from_plain(Data, untag_nonfinite(data)).defects
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"the list of known defects in {os.fspath(path)} is damaged: {brief(error)}") from error


def known(packages: Sequence[str] = (), *, data: str | os.PathLike[str] = DATA) -> list[Known]:
    """The known defects of packages, with the state of the installed release.

        from ampcheck.tools.known import known

        for one in known(["torchmetrics"]):
            print(one.state, one.defect.title)

    packages: names of distributions, by default all that are installed. data: a newer file than that of the wheel.
    Raises `UsageError` for a package that is neither known nor installed, and for a damaged file.
    """
    defects = read_defects(data)
    names = {canonicalize_name(defect.package): defect.package for defect in defects}
    for package in packages:
        if canonicalize_name(package) not in names and not installed(package):
            meant = did_you_mean(package, names.values()) or f"there are {', '.join(names.values())}"
            raise UsageError(f"{package!r:.60} is not installed, and no defect of it is known: {meant}")
    chosen = set(map(canonicalize_name, packages))
    every = [Known(one, installed(one.package)) for one in defects]
    return [one for one in every if (canonicalize_name(one.defect.package) in chosen if chosen else one.release)]


def used(
    paths: Iterable[str | os.PathLike[str]],
    *,
    ways: Sequence[str] = ("autocast",),
    dtypes: Sequence[str] = (),
    devices: Sequence[str] = (),
    data: str | os.PathLike[str] = DATA,
) -> Run:
    """A run with a finding for each line that uses a function with a known defect.

        from ampcheck.tools.known import used

        print(used(["src"], dtypes=["bfloat16"]))

    The finding fails where the installed release was measured to be broken, and warns where it was not measured, or is
    not installed. Its check is the name of the defect, by which a comment accepts it. Mended releases have none.
    paths: files, and folders that are searched for `*.py`. ways, dtypes, devices: those that matter here; each empty
    for all. Raises `UsageError` for a path that cannot be read, where no file is Python, and for damaged data.
    """
    defects = read_defects(data)
    matter = [defect for defect in defects if defect.matters(ways=ways, dtypes=dtypes, devices=devices)]
    if not matter:
        text = f"{counted(len(defects), 'defects')} is met in the ways, dtypes and devices that were asked for"
        raise UsageError(f"none of {text}: ask for more, or leave an option out")
    every = [one for one in (Known(defect, installed(defect.package)) for defect in matter) if one.state != "mended"]
    findings, broken, files, mentioned = list[Finding](), list[str](), 0, _mentions(every)
    for path in python_files(paths := list(paths)):
        content = content_of(path)
        source = parse(path, content if is_binary(content) or mentioned(content) else b"")  # it takes most of the time
        if source is None:
            broken.append(path)
            continue
        files, lines = files + 1, _lines_by_name(source)
        findings += [_finding(one, path, line, name) for one in every for line, name in _uses(one.defect, lines)]
    names = ", ".join(os.fspath(path) for path in paths)
    if not files:
        where = ", ".join(broken) or names
        raise UsageError(f"known needs a file of Python; found none in {where:.200}")
    unseen = {UNREAD: len(broken), OTHERS: len(defects) - len(matter)}
    findings.sort(key=lambda finding: (finding.where.file, finding.where.line or 0))
    seen = {"files": files, "defects": len(matter)}
    coverage = Coverage(seen, {what: count for what, count in unseen.items() if count})
    return Run(findings=tuple(findings), coverage=coverage, title=f"known defects in {names:.200}")


def _mentions(every: Iterable[Known]) -> Callable[[bytes], bool]:
    """Return whether a file has the package and the end of a name of one of these, as one that uses it does in its
    import."""
    ends = defaultdict[bytes, set[re.Pattern[bytes]]](set)
    for function in (function for one in every for function in one.defect.functions):
        for name in function.names:
            package = (function.name if name.startswith(".") else name).partition(".")[0]
            ends[package.encode()].add(re.compile(name.rpartition(".")[2].encode() + rb"\b"))
    return lambda content: any(
        package in content and any(end.search(content) for end in patterns) for package, patterns in ends.items()
    )


def _finding(one: Known, path: str, line: int, name: str) -> Finding:
    defect, check = one.defect, Check(one.defect.name, "known", "")
    build = check.fail if one.state == "broken" else check.warn
    unsure = {"unmeasured": ", not measured", "not installed": ", not installed here"}.get(one.state, "")
    message = f"{name} of {f'{defect.package} {one.release}'.strip()}{unsure}: {defect.title} ({defect.met})"
    hint = f"`ampcheck known {defect.package}` has the cure"
    return commented(build(os.path.basename(path), message, where=Where(file=path, line=line), hint=hint))


def _uses(defect: Defect, lines: Mapping[str, Sequence[int]]) -> list[tuple[int, str]]:
    """Where a file uses a function with the defect, and which; a line once."""
    at: dict[int, str] = {}
    for function in defect.functions:
        if not function.beside or any(name in lines for name in function.beside):
            at = {line: function.name for name in function.names for line in lines.get(name, ())} | at
    return sorted(at.items())


def _lines_by_name(source: Source) -> Mapping[str, Sequence[int]]:
    """The lines of each dotted name that a file uses, and of each part that it begins with; imports resolved."""
    lines = defaultdict[str, list[int]](list)
    for name, line in _names(source.tree, source):
        lines[name].append(line)
    return lines


def _names(tree: ast.Module, source: Source) -> Iterator[tuple[str, int]]:
    """The names in a file, but for annotations, for what `isinstance` compares, and for those that something else has:
    a parameter, a variable or a function of the file, `self.name` of a class with the method `name`."""
    nodes: list[tuple[ast.AST, frozenset[str]]] = [(tree, _redefined(tree))]
    while nodes:
        node, hidden = nodes.pop()
        if isinstance(node, ast.Call) and source.resolve(node.func) in ("isinstance", "issubclass"):
            continue
        written, name = dotted(node), source.resolve(node)
        first = written.partition(".")[0]
        if isinstance(node, ast.Attribute) and first not in source.imports.keys() - hidden and written not in hidden:
            yield f".{node.attr}", node.end_lineno or node.lineno
        if isinstance(node, (ast.Attribute, ast.Name)) and name:
            parts = name.split(".") if first not in hidden else []
            yield from ((".".join(parts[:end]), node.lineno) for end in range(1, len(parts) + 1))
            continue
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                inside = value if isinstance(value, list) else [value]
                around = _inside(node, hidden) if field == "body" else hidden
                nodes += [(part, around) for part in inside if isinstance(part, ast.AST)]


def _redefined(tree: ast.Module) -> frozenset[str]:
    """Functions and classes of a file, but for those in an `if` or `try`, as where an import may fail."""
    names = set[str]()
    for node in tree.body:
        names |= {node.name} if isinstance(node, _DEFINITIONS) else set()
        names -= _imported([node])
    return frozenset(names)


def _inside(node: ast.AST, hidden: frozenset[str]) -> frozenset[str]:
    """The names that are hidden in the body of a node: a function hides those of its parameters and variables, and none
    that it imports; a class `self.method`."""
    if isinstance(node, ast.ClassDef):
        return hidden | {f"self.{part.name}" for part in node.body if isinstance(part, _DEFINITIONS)}
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return hidden
    within = list(ast.walk(node))
    parameters = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
    variables = {part.id for part in within if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return (hidden | parameters | variables) - _imported(within)


def _imported(nodes: Iterable[ast.AST]) -> set[str]:
    imports = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    return {alias.asname or alias.name.partition(".")[0] for alias in imports}
