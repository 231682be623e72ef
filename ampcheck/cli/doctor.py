"""`ampcheck doctor`: what this machine can and cannot judge, and why."""

from __future__ import annotations

import argparse

from ampcheck.cli.output import Commands, Stdout
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.text import clean, counted

_MARKS = {True: "yes", False: "no", None: "?"}


def add_command(commands: Commands) -> None:
    """Add `doctor` to the parser's commands."""
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can and cannot judge, and why",
        description="Probe PyTorch, devices, torch.compile, kernels and packages. Each line says yes or no; a no says "
        "what is skipped without it and how to get it; ? is what --quick does not try. Exit code 0, whatever is "
        "missing; 2: torch cannot be imported.",
    )
    doctor.add_argument("--quick", action="store_true", help="compile nothing (seconds instead of up to a minute)")
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    try:
        from ampcheck.tools.doctor import examine
    except (ImportError, OSError, RuntimeError) as error:  # a torch that is missing or broken
        raise UsageError(f"nothing can be judged, since torch cannot be imported: {brief(error)}") from error
    missing, untried, out = 0, 0, Stdout()
    for fact in examine(quick=options.quick):
        missing += fact.present is False
        untried += fact.present is None
        lines = [f"{_MARKS[fact.present]:3}  {fact.name}: {fact.found}"]
        if fact.present is False:
            lines += [f"       without it: {fact.without}", f"       to get it: {fact.cure}"]
        with out:
            print("\n".join(map(clean, lines)), flush=True)
    with out:
        ending = f"{counted(missing, 'parts')} missing" if missing else "nothing is missing"
        print(f"\n{ending}{f'; {untried} not tried' if untried else ''}")
    return out.code()
