"""Verdicts become exceptions here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from ampcheck.core.current_test import current_test, pytest_command
from ampcheck.core.errors import SHOWS
from ampcheck.core.run import FAIL_ON, PROBLEMS, Finding, Run, Verdict, describe_causes, emit, nearest_first
from ampcheck.core.settings import load_settings
from ampcheck.outcome.accept import accept
from ampcheck.report.fitting import LIMIT, Part, fit, lines_of, plain


def verify(run: Run) -> Run:
    """Emit `run` without what the settings of the repository accept, then raise `AssertionError` with its failures.

    `fail-on` in `[tool.ampcheck]` is the mildest verdict that raises, by default `fail`.
    """
    __tracebackhide__ = True
    settings = load_settings()
    run = with_test(accept(run, settings))
    emit(run)
    raise_for(run, FAIL_ON[settings.fail_on])
    return run


def with_test(run: Run) -> Run:
    """The run whose problems name the command that runs this test alone; unchanged outside of tests."""
    test = current_test()
    if not test:
        return run
    command = pytest_command(test)
    return with_commands(run, lambda finding: command)


def with_commands(run: Run, command: Callable[[Finding], str]) -> Run:
    """The run whose problems name the commands that find them again."""
    if not any(finding.verdict in PROBLEMS for finding in run.findings):
        return run
    findings = (replace(f, reproduce=command(f)) if f.verdict in PROBLEMS else f for f in run.findings)
    return replace(run, findings=tuple(findings))


def raise_for(run: Run, verdicts: Collection[Verdict]) -> None:
    """Raise `AssertionError` with the findings of these verdicts, and with selected checks that did not run."""
    __tracebackhide__ = True
    judged = [*(finding for verdict in verdicts for finding in run.of(verdict))]
    if verdicts:
        judged += [f for f in run.findings if f.unjudged and f.check != "coverage" and f.verdict not in verdicts]
    if failures := nearest_first(judged):
        error = AssertionError("\n".join(_text(run, failures)))
        setattr(error, SHOWS, True)
        raise error


def _text(run: Run, failures: Collection[Finding]) -> Iterator[str]:
    """The causes of failures in 25 lines of any width: the first in full, others in full or by their message and what
    to do about it, each advice once; more lines where there are more causes."""
    parts, said = [], set[str]()
    for finding, text in describe_causes(run.findings, failures):
        lines = text.split("\n")
        advice = [line for line in lines if line.startswith("  hint: ") and line not in said]
        said.update(advice)
        parts.append(Part((lines_of([*lines, ""]), lines_of([*lines[:1], *advice])), verdict=finding.verdict))
    command = next((finding.reproduce for finding in failures if finding.reproduce), "")
    below = [f"reproduce: {command}"] if command else []
    more = f"`{command} --ampcheck -vv` shows all" if command else "the run shows all"
    shown = fit(parts, LIMIT - len(below), lambda counts: [f"shortened or left out: {counts}; {more}"])
    lines = [plain(line) for line in shown]
    yield from lines[:-1] if lines and not lines[-1] else lines
    yield from below
