"""A run in a job of GitHub Actions: annotations of source lines, and the summary of the job.

The runner obeys lines of the output that begin with `::`; text from outside is escaped, so that it cannot form one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Run, Verdict, follow_line
from ampcheck.core.source import path_in, repository_of
from ampcheck.report.markdown import comment_of
from ampcheck.report.sections import arrange
from ampcheck.report.text import clean, shortened

ACTIONS, SUMMARY = "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"
"""Variables of a job: `true`, and the file of the step's part of the summary."""

_COMMANDS = {Verdict.FAIL: "error", Verdict.WARN: "warning", Verdict.UNDECIDED: "notice", Verdict.INCOMPLETE: "notice"}
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})


def annotations_in_job(run: Run, folder: Path, *, always: bool = False) -> list[str]:
    """`workflow_commands` in a job of GitHub Actions, or `always`; elsewhere none."""
    return list(workflow_commands(run, folder)) if always or os.environ.get(ACTIONS) == "true" else []


def append_summary(run: Run, kind: str) -> None:
    """Append `comment_of` to the summary of a job of GitHub Actions; elsewhere do nothing.

    Raises `UsageError` if it cannot be written.
    """
    if path := os.environ.get(SUMMARY):
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(comment_of(run, kind) + "\n")
        except (OSError, ValueError) as error:
            raise UsageError(f"the summary of the job cannot be written to ${SUMMARY}: {error}") from error


def workflow_commands(run: Run, folder: Path) -> Iterator[str]:
    """The annotation of each cause, failures first, as GitHub shows the first ten errors and warnings of a step.

    folder: a folder of the repository, to whose root GitHub's paths are relative. A file outside of it is left out.
    """
    content, root = arrange(run), repository_of(folder)
    problems = [(cause.finding, cause.following) for cause in content.causes]
    for finding, following in (*problems, *((finding, ()) for finding in content.unjudged)):
        if command := _COMMANDS.get(finding.verdict):
            parts = [finding.message, finding.hint and f"Hint: {finding.hint}"]
            parts += [finding.reproduce and f"Reproduce: {finding.reproduce}"]
            parts += [follow_line(following)] if following else []
            text = shortened(clean("\n".join(part for part in parts if part)))
            yield f"::{command} {_properties(finding, root)}::{text.translate(_DATA)}"


def _properties(finding: Finding, root: Path) -> str:
    where = finding.where
    properties = {"title": shortened(clean(f"{finding.check}: {finding.subject}"), 200)}
    path = path_in(root, where.file)
    if path and os.path.isfile(where.file) and not os.path.isabs(path) and not path.startswith("../"):
        properties["file"] = clean(path)
        if where.line is not None and where.line > 0:
            properties["line"] = str(where.line)
    return ",".join(f"{name}={value.translate(_PROPERTY)}" for name, value in properties.items())
