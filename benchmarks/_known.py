"""`ampcheck/tools/known.json`: the defects of `reports/found` as `ampcheck known` reads them, and what repros do.

`python benchmarks/hunt.py --known` runs the repros on the installed releases and adds what they do to what was measured
before; `--release PACKAGE==VERSION` measures another release, which pip puts into a folder that is deleted afterwards.
A function counts only if its repro uses it, and its names are those by which the package has the same object.
"""

from __future__ import annotations

import json
import pkgutil
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from importlib import import_module
from importlib.metadata import distributions, version
from pathlib import Path

from _found import WAYS, _checks, about, by_seed, check, folders, over_seeds, rank
from packaging.utils import canonicalize_name
from packaging.version import Version

from ampcheck.core.json_files import to_plain
from ampcheck.tools.known import DATA, SCHEMA, WEIGHTS, Data, Defect, Function, Measurement, read_defects, used

COMMAND = "python benchmarks/hunt.py --known"


def package_of(folder: Path) -> str:
    """The distribution that a defect is of."""
    return about(folder)["package"].split()[0]


def way_of(folder: Path) -> str:
    return WAYS[rank(about(folder)["way"])]


def functions_of(folder: Path) -> tuple[Function, ...]:
    """The functions of `functions:` in the report, none where no single one breaks, as in code that is compiled.

    Raises `LookupError` for one that its package lacks.
    """
    names = filter(None, about(folder)["functions"].split(", "))
    return tuple(function for name in names for function in _function(name))


def _function(name: str) -> Iterator[Function]:
    if " of " in name:  # a function that breaks for objects of one class
        function, owner = name.split(" of ")
        yield Function(name, _names(owner), _names(function))
    elif name.startswith("torch.Tensor."):  # the function and the method are one op, and so is the method in place
        method = name.rpartition(".")[2]
        yield Function(name, () if method.endswith("__") else (f".{method}", f".{method}_"), ("torch",))
        if hasattr(import_module("torch"), method):
            yield Function(f"torch.{method}", (f"torch.{method}",))
    elif isinstance(pkgutil.resolve_name(owner := name.rpartition(".")[0]), type):  # a method of a class
        yield Function(name, _names(owner), (f".{name.rpartition('.')[2]}",))
    else:
        yield Function(name, _names(name))


def _names(name: str) -> tuple[str, ...]:
    """The public names of an object, the given one first: in the modules above that name and above its definition."""
    value = pkgutil.resolve_name(name)
    paths = [name.split("."), f"{getattr(value, '__module__', None) or name}.".split(".")]
    modules = {".".join(path[:end]) for path in paths for end in range(1, len(path))} & sys.modules.keys()
    names = {
        f"{key}.{attribute}" for key in modules for attribute, one in vars(sys.modules[key]).items() if one is value
    }
    return (name, *sorted(one for one in names - {name} if not re.search(r"(^|\.)_", one)))


def cure_of(folder: Path) -> str:
    """The section `Cure` of a report."""
    text = (folder / "report.md").read_text(encoding="utf-8")
    return text.partition("\n## Cure\n")[2].partition("\n## ")[0].strip()


def measure(folder: Path, place: Path | None = None) -> Measurement | str:
    """What a repro does with the installed release, or that in `place`; the reason where it cannot be measured."""
    package = package_of(folder)
    found = {canonicalize_name(one.name): one for one in distributions(**({"path": [str(place)]} if place else {}))}
    if canonicalize_name(package) not in found:
        return "absent"
    broken = []
    for device in ("cpu",) if way_of(folder) in WEIGHTS else ("cpu", "cuda"):
        state, last = check(folder, device, place)
        if state not in ("broken", "mended") and not broken:  # CPUs lack ops that autocast of CUDA runs in 16 bits
            return f"{state}: {last}"
        broken += [device] if state == "broken" else []
    torch = found["torch"].version if "torch" in found else version("torch")
    today, python = date.today().isoformat(), platform.python_version()
    return Measurement(found[canonicalize_name(package)].version, torch, python, today, tuple(broken))


def merged(before: Sequence[Measurement], new: Measurement | str) -> tuple[Measurement, ...]:
    """The measurements with a new one, in the place of one of the same release, torch and Python."""
    if isinstance(new, str):
        return tuple(before)
    keys = {(row.release, row.torch): row for row in (*before, new)}
    return tuple(sorted(keys.values(), key=lambda row: (Version(row.release), Version(row.torch))))


def defect_of(folder: Path, before: Defect | None, new: Measurement | str) -> Defect:
    """A defect as the file has it. Its functions are looked up where its package is installed."""
    known = about(folder)
    try:
        functions = functions_of(folder)
    except (ImportError, AttributeError):  # not installed here
        functions = before.functions if before else ()
    return Defect(
        name=folder.name,
        title=known["title"],
        package=package_of(folder),
        functions=functions,
        way=way_of(folder),
        dtypes=tuple(name for name in ("float16", "bfloat16") if re.search(rf"\b{name}\b", known["way"]))
        or (("float16",) if "half" in known["way"] else ()),
        severity=known["severity"],
        checks=tuple(filter(None, _checks(folder).split(", "))),
        measured=merged(before.measured if before else (), new),
        cure=cure_of(folder),
        repro=(folder / "repro.py").read_text(encoding="utf-8"),
    )


def write(names: list[str], releases: Sequence[str] = ()) -> int:
    """Run repros, add what they do to the file, and return how many could not tell. names: of their folders."""
    defects, errors = refreshed(), 0
    for release in releases or [""]:
        with tempfile.TemporaryDirectory() as place:
            at = installed_in(release, Path(place)) if release else None
            for folder in folders(names):
                if at and canonicalize_name(package_of(folder)) != canonicalize_name(release.split("==")[0]):
                    continue
                new = measure(folder, at)
                errors += isinstance(new, str) and new != "absent"
                what = new if isinstance(new, str) else f"{new.release}: {', '.join(new.broken) or 'mended'}"
                print(f"{folder.name}: {what[:160]}", flush=True)
                defects[folder.name] = defect_of(folder, defects[folder.name], new)
                save(defects)
                if not at and isinstance(new, Measurement) and new.broken:
                    errors += not is_proved(folder, defects[folder.name])
    return errors


def refreshed() -> dict[str, Defect]:
    """The defects of the file as the reports now have them, without a new measurement."""
    before = {one.name: one for one in read_defects()} if DATA.exists() else {}
    return {folder.name: defect_of(folder, before.get(folder.name), "not run") for folder in folders()}


def installed_in(release: str, place: Path) -> Path:
    """A folder with a release and nothing that it needs, which is installed."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), release)
    subprocess.run(pip, check=True)
    return place


def is_proved(folder: Path, defect: Defect) -> bool:
    """Whether the repro uses each function that the report names, as `ampcheck known` sees it, and each of its FORMS,
    which are other functions with the defect, is broken as well. What is not is printed."""
    wrong = []
    for name in filter(None, about(folder)["functions"].split(", ")):
        alone = replace(defect, functions=tuple(one for one in defect.functions if one.name == name))
        if not name.endswith("__") and not uses(folder / "repro.py", alone):
            wrong.append(f"the repro does not use {name}")
    given = runpy.run_path(str(folder / "repro.py"), run_name="repro") if by_seed(folder) else {}
    for name, form in given.get("FORMS", {}).items():
        errors = over_seeds({**given, "f": form}, "cpu")["error"]
        if not all(error == "nonfinite" or (isinstance(error, float) and error > given["LIMIT"]) for error in errors):
            wrong.append(f"{name} has errors of {errors}, the limit is {given['LIMIT']}")
    print(*(f"{folder.name}: {text}" for text in wrong), sep="\n", end="\n" if wrong else "", flush=True)
    return not wrong


def uses(path: Path, defect: Defect) -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        row = Measurement("0", "0", "0", "", ("cpu",))
        json.dump(to_plain(Data(SCHEMA, "", (replace(defect, measured=(row,)),))), file)
        file.flush()
        return bool(used([path], ways=(), data=file.name).findings)


def save(defects: dict[str, Defect]) -> None:
    """Write the file."""
    data = Data(SCHEMA, COMMAND, tuple(defects.values()))
    DATA.write_text(json.dumps(to_plain(data), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
