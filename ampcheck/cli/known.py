"""`ampcheck known`: functions of installed packages that are known to break in 16 bits, and where code uses them."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcheck.cli.output import Commands, Stdout
from ampcheck.core import run as records
from ampcheck.core.errors import UsageError
from ampcheck.core.json_files import to_plain
from ampcheck.core.run import PROBLEMS, Run
from ampcheck.core.text import clean, counted, did_you_mean, listed
from ampcheck.report.github import annotations_in_job

if TYPE_CHECKING:
    from ampcheck.tools.known import Defect, Known


def add_command(commands: Commands) -> None:
    """Add `known` to the parser's commands."""
    summary = "list functions of installed packages that are known to break in 16 bits, and where code uses them"
    parser = commands.add_parser(
        "known",
        help=summary,
        description="List the functions of the installed packages that were measured to break in 16 bits: in which "
        "dtype and releases, with a repro and the cure. Neither PyTorch nor the packages are imported. With "
        "--fail-if-used, exit code 0: the code uses none; 1: it uses one that breaks in the installed release; 2: "
        "usage error. `# ampcheck: ignore[NAME] reason` on or above a line accepts the defect NAME.",
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="in full (default: all in short)")
    parser.add_argument("--fail-if-used", nargs="+", metavar="PATH", help="report where files and folders use them")
    ways, others = ("autocast", "bfloat16", "half", "documented"), "those that matter; may be given several times"
    text = f"{others}: autocast, weights and data in bfloat16 or in half (default: all, with --fail-if-used autocast)"
    parser.add_argument("--way", dest="ways", action="append", choices=ways, help=text)
    parser.add_argument("--dtype", dest="dtypes", action="append", choices=("float16", "bfloat16"), help=others)
    parser.add_argument("--device", dest="devices", action="append", choices=("cpu", "cuda"), help=others)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON; with --fail-if-used a run")
    form.add_argument("--repro", metavar="NAME", help="print the script that shows a defect")
    form.add_argument("--schema", action="store_true", help="print the JSON Schema of the data")
    parser.add_argument("--data", metavar="FILE", help="newer data than those of this release")
    parser.set_defaults(command=_known)


def _known(options: argparse.Namespace) -> int:
    from ampcheck.tools.known import DATA, known, used

    matter = {name: getattr(options, name) or () for name in ("ways", "dtypes", "devices")}
    alone = "--schema" if options.schema else "" if options.repro is None else "--repro NAME"
    if alone and (options.packages or options.fail_if_used or any(matter.values())):
        raise UsageError(f"{alone} prints nothing else: leave out what chooses among packages, uses, ways and devices")
    data, failed = options.data or str(DATA), False
    if options.schema:
        text = Path(records.__file__).with_name("known.schema.json").read_text(encoding="utf-8").rstrip()
    elif alone:
        text = _repro(options.repro, data)
    elif options.fail_if_used:
        if options.packages:
            raise UsageError("--fail-if-used looks for the defects of all packages: leave out PACKAGE")
        run = used(options.fail_if_used, data=data, **{**matter, "ways": options.ways or ("autocast",)})
        text, failed = json.dumps(run.to_json(), indent=1) if options.json else _uses(run), run.failed
    else:
        every = [one for one in known(options.packages, data=data) if one.defect.matters(**matter)]
        text = json.dumps(list(map(_plain, every)), indent=1) if options.json else _list(every, options.packages)
    with Stdout() as out:
        print(text)
    return out.code(failed)


def _repro(name: str, data: str) -> str:
    from ampcheck.tools.known import read_defects

    repros = {defect.name: defect.repro.rstrip() for defect in read_defects(data)}
    if name not in repros:
        meant = did_you_mean(name, repros) or "`ampcheck known` lists them"
        raise UsageError(f"{name!r:.60} is no known defect: {meant}")
    return repros[name]


def _uses(run: Run) -> str:
    """The findings of a run, a line each, and what was looked at. In a job of GitHub Actions annotations follow."""
    problems = [finding for finding in run.findings if finding.verdict in PROBLEMS]
    lines = [clean(f"{one.where.place}: {one.verdict.value} {one.check} {one.message}") for one in problems]
    others = {"accepted": len(run.findings) - len(problems), **run.coverage.unseen}
    left = "".join(f", {counted(count, what)}" for what, count in others.items() if count)
    lines += [f"{counted(len(problems), 'uses of functions with a known defect')}{left}; looked at {run.coverage}"]
    return "\n".join([*lines, *annotations_in_job(run, Path.cwd())])


def _plain(one: Known) -> dict[str, Any]:
    """A known defect as data: that of the file, the release that is installed, and what follows."""
    defect, command = one.defect, _command(one.defect)
    follows = {"state": one.state, "since": defect.since, "mended": defect.mended, "command": command}
    return {"release": one.release, **follows, **to_plain(defect)}


def _command(defect: Defect) -> str:
    return f"ampcheck known --repro {defect.name} | python -"


def _list(every: Sequence[Known], packages: Sequence[str]) -> str:
    """The defects, in full those of `packages`."""
    if not every:
        return f"no defect of {', '.join(packages) or 'an installed package'} is known; that is no measurement"
    if packages:
        return clean("\n\n".join(map(_in_full, every)))
    more = "`ampcheck known PACKAGE` has releases, repros and cures; what is not listed was not measured"
    return clean("\n".join([*sorted(map(_in_short, every), key=str.lower), more]))


def _in_short(one: Known) -> str:
    """Package, functions, dtypes, state and name of a defect in a line."""
    defect = one.defect
    what = listed((function.name for function in defect.functions), 2) or defect.title
    return f"{defect.package} {one.release}: {what} in {defect.met}: {one.state} ({defect.name})"


def _in_full(one: Known) -> str:
    defect = one.defect
    measured = ", ".join(f"{of} {'broken' if broken else 'mended'}" for of, broken in defect.releases.items())
    rows = {
        "functions": ", ".join(function.name for function in defect.functions) or "none by itself",
        "breaks": f"in {defect.met} ({defect.severity})",
        "here": f"{one.state} {one.release}".rstrip(),
        "measured": f"{measured}, with torch {', '.join(dict.fromkeys(row.torch for row in defect.measured))}",
        "an audit": f"reports it by {', '.join(defect.checks)}" if defect.checks else "misses it",
        "repro": _command(defect),
    }
    lines = [f"  {name + ':':10} {text}" for name, text in rows.items()]
    return "\n".join([f"{defect.name}: {defect.title}", *lines, "  cure:", textwrap.indent(defect.cure, "    ")])
