"""The models of a script: those of a list, as `ampcheck sweep` reads it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from ampcheck import Subject, UsageError
from ampcheck.core.subject import load_subject, name_of_target
from ampcheck.tools.sweep.listing import Entry, read_list


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add LIST, `--models` and `--minutes`."""
    parser.add_argument("list", metavar="LIST", help="as of `ampcheck sweep`: ../shared/zoo, or a file of targets")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="models with such a name alone")
    parser.add_argument("--models", type=int, metavar="N", help="the first N: one of each family, then a second")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further model after that")


def entries(options: argparse.Namespace) -> list[Entry]:
    return read_list(options.list, options.only)[: options.models]


def models(options: argparse.Namespace, left: list[str]) -> Iterator[tuple[Entry, Subject]]:
    """Each model that can be built in this process. left: takes a line on each other, and on those not begun."""
    begun = time.monotonic()
    todo = entries(options)
    for number, entry in enumerate(todo):
        if time.monotonic() - begun > 60 * options.minutes:
            left += ["", f"{len(todo) - number} further models were not begun within {options.minutes:g} minutes."]
            return
        try:
            subject = load_subject(entry.target)
        except UsageError as error:  # such as a package that is not installed
            left += ["", f"{name_of_target(entry.target)} was not built: {error}"]
            continue
        yield entry, subject
