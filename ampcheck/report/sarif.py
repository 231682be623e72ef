"""A run as SARIF 2.1.0, the format of code scanning: failures and warnings at their lines, with rules of the checks.

What was not judged (undecided, incomplete, skip) is a notification of the invocation; passes are the rules without
results. The sections named below are those of the standard, OASIS SARIF 2.1.0.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from ampcheck.core.json_files import tag_nonfinite, to_plain
from ampcheck.core.run import Finding, Run, Verdict, Where, followers
from ampcheck.core.source import IN_SOURCE, fingerprint_of, path_in, repository_of
from ampcheck.report.text import clean

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
HOME = "https://github.com/ampcheck/ampcheck"

_ROOT = "SRCROOT"
"""The base of files of the repository; a file outside of it has its whole path, one that is not found here no base."""

_LEVELS = {Verdict.FAIL: "error", Verdict.WARN: "warning", Verdict.ACCEPTED: "warning"}
_UNJUDGED = {Verdict.UNDECIDED: "warning", Verdict.INCOMPLETE: "warning", Verdict.SKIP: "note"}


class Rule(Protocol):
    """The page of a check, as the registry has it."""

    @property
    def family(self) -> str:
        """Its group of checks, such as range."""

    @property
    def requires(self) -> str:
        """The requirement; its first sentence is the short description."""

    @property
    def measured(self) -> str:
        """The measurement."""

    @property
    def causes(self) -> str:
        """The usual causes of a finding."""

    @property
    def fix(self) -> str:
        """The remedy."""


def sarif_of(run: Run, rules: Mapping[str, Rule], folder: Path) -> dict[str, Any]:
    """`run` as data for `json.dumps`.

    rules: the pages of the checks by name; a check that it lacks has a rule without text. folder: a folder of the
    repository, to whose root files are relative. Fingerprints do not depend on line numbers (`fingerprint_of`).
    """
    root = repository_of(folder)
    checks = list(dict.fromkeys(finding.check for finding in run.findings))
    version = run.environment.get("ampcheck")
    driver: dict[str, Any] = {"name": "ampcheck", "informationUri": HOME}
    if isinstance(version, str) and version:
        driver["version"] = clean(version)
    driver["rules"] = [_rule(check, rules.get(check)) for check in checks]
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [
                    {"executionSuccessful": True, "toolExecutionNotifications": list(_notifications(run, checks))}
                ],
                "originalUriBaseIds": {_ROOT: {"uri": root.as_uri().rstrip("/") + "/"}},
                "results": list(_results(run, checks, root)),
                "properties": {
                    "title": clean(run.title),
                    "environment": {clean(k): _plain(v) for k, v in run.environment.items()},
                    "coverage": {
                        name: {clean(what): count for what, count in counts.items()}
                        for name, counts in to_plain(run.coverage).items()
                    },
                },
            }
        ],
    }


def _rule(check: str, page: Rule | None) -> dict[str, Any]:
    rule: dict[str, Any] = {"id": clean(check)}
    if page is None:
        return rule
    parts = {"How it is measured": page.measured, "What usually causes it": page.causes, "How to fix it": page.fix}
    return {
        **rule,
        "shortDescription": {"text": re.split(r"(?<=\.)\s", page.requires, maxsplit=1)[0]},
        "fullDescription": {"text": page.requires},
        "help": {
            "text": "\n\n".join(f"{title}: {text}" for title, text in parts.items()),
            "markdown": "\n\n".join(f"**{title}.** {text}" for title, text in parts.items()),
        },
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": [page.family]},
    }


def _results(run: Run, checks: list[str], root: Path) -> Iterator[dict[str, Any]]:
    """Failures and warnings, accepted ones too (suppressed, §3.27.23)."""
    following = followers(run.findings)
    causes = {id(follower): f for f in run.findings for follower in following.get(id(f), ())}
    seen: Counter[str] = Counter()
    for finding in run.findings:
        if finding.verdict not in _LEVELS:
            continue
        fingerprint = fingerprint_of(finding, root)
        seen[fingerprint] += 1
        fingerprint = f"{fingerprint}:{seen[fingerprint]}"  # of equal places the second is another result
        result = {
            "ruleId": clean(finding.check),
            "ruleIndex": checks.index(finding.check),
            "level": _LEVELS[finding.verdict],
            "message": {"text": _message(finding)},
            "locations": [_location(finding, root)],
            "fingerprints": {"ampcheckPlace/v1": fingerprint},
            "partialFingerprints": {"primaryLocationLineHash": fingerprint},  # the one that GitHub reads
            "properties": _properties(finding),
        }
        cause = causes.get(id(finding))
        related = [(other, "follows from this finding") for other in following.get(id(finding), ())]
        related += [(cause, "the cause of this finding")] if cause is not None else []
        if related:
            result["relatedLocations"] = [
                {**_location(other, root), "id": number, "message": {"text": clean(f"{other.check}: {relation}")}}
                for number, (other, relation) in enumerate(related, 1)
            ]
        if finding.verdict is Verdict.ACCEPTED:
            kind = "inSource" if IN_SOURCE in finding.accepted.partition(":")[0] else "external"
            suppression = {"kind": kind, "status": "accepted", "justification": clean(finding.accepted)}
            result["suppressions"] = [suppression]
        yield result


def _notifications(run: Run, checks: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what was not judged, and why (§3.58)."""
    for finding in run.findings:
        if finding.verdict in _UNJUDGED:
            yield {
                "level": _UNJUDGED[finding.verdict],
                "message": {"text": f"{finding.verdict}: {_message(finding)}"},
                "associatedRule": {"id": clean(finding.check), "index": checks.index(finding.check)},
            }


def _message(finding: Finding) -> str:
    hint = f"\nHint: {finding.hint}" if finding.hint else ""
    return clean(f"{finding.subject}: {finding.message}{hint}")


def _properties(finding: Finding) -> dict[str, Any]:
    where, numbers = finding.where, (finding.observed, finding.limit, finding.seen)
    texts = {
        "verdict": finding.verdict.value,
        "subject": finding.subject,
        "phase": where.phase,
        "op": where.op,
        "unit": finding.unit,
        "reproduce": finding.reproduce,
    }
    named = dict(zip(("observed", "limit", "seen"), numbers, strict=True)) | {"step": where.step}
    return {name: clean(text) for name, text in texts.items() if text} | {
        name: tag_nonfinite(value) for name, value in named.items() if value is not None
    }


def _plain(value: object) -> Any:
    return clean(value) if isinstance(value, str) else tag_nonfinite(value)


def _location(finding: Finding, root: Path) -> dict[str, Any]:
    """The file and the lines (§3.29), and the module, or else the subject, as a logical location (§3.33)."""
    where = finding.where
    location: dict[str, Any] = {}
    if where.file:
        location["physicalLocation"] = {"artifactLocation": _artifact(where.file, root), **_region(finding, where)}
    name = where.module or finding.subject
    location["logicalLocations"] = [{"fullyQualifiedName": clean(name), "kind": "module" if where.module else "object"}]
    return location


def _artifact(file: str, root: Path) -> dict[str, str]:
    path = path_in(root, file)
    path = os.path.abspath(file) if path.startswith("../") else path
    path = path if os.path.exists(file) else path.replace("\\", "/")  # a run on Windows may be read anywhere
    if re.match("[A-Za-z]:/", path):
        return {"uri": f"file:///{path[:2]}{_quoted(path[2:])}"}
    if path.startswith("//"):  # //server/share
        return {"uri": f"file:{_quoted(path)}"}
    if path.startswith("/"):
        return {"uri": f"file://{_quoted(path)}"}
    return {"uri": _quoted(path), **({"uriBaseId": _ROOT} if os.path.exists(file) else {})}


def _quoted(path: str) -> str:
    """A path as that of a URI; bytes that are no UTF-8 stay those bytes."""
    try:
        data = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        data = path.encode("utf-8", "surrogatepass")
    return quote(data)


def _region(finding: Finding, where: Where) -> dict[str, Any]:
    if where.line is None or where.line < 1:
        return {}
    code, excerpt = finding.code, finding.excerpt
    region: dict[str, Any] = {"startLine": where.line, **({"snippet": {"text": clean(code)}} if code else {})}
    last = excerpt.first + len(excerpt.lines) - 1
    if len(excerpt.lines) < 2 or not excerpt.first <= where.line <= last:
        return {"region": region}
    snippet = {"text": clean("\n".join(excerpt.lines))}
    return {"region": region, "contextRegion": {"startLine": excerpt.first, "endLine": last, "snippet": snippet}}
