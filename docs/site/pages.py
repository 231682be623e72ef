"""The hook of mkdocs that writes what is generated: the front page, the checks, the lists of evidence, the reference.

Pages link to files of the repository, so that they can be read there; links to what the site generates are replaced.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "site")]

import examples  # noqa: E402

from ampcheck.checks import REGISTRY  # noqa: E402
from ampcheck.core.check import Check  # noqa: E402

FAMILIES = {
    "range": "Range and precision of values",
    "dtype": "Dtypes",
    "policy": "Autocast's policy",
    "autocast": "Use of autocast",
    "compile": "Compiled code",
    "training": "Training",
    "parity": "Two executions",
    "formats": "Narrow formats",
    "property": "Search",
    "speed": "Speed",
    "always": "Always",
    "outcome": "Always",
}
"""The heading of each family of checks, in the order of the page."""

_SUBJECTS = {
    "FORWARD": "models",
    "COMPILE": "models with several calls",
    "REGIONAL": "blocks that are compiled one by one",
    "TRAINING": "training loops",
    "CALL": "functions and watched blocks",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for path, text in _generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to generated pages, and to files that the site lacks, to where they are; list the evidence."""
    if page.file.src_uri == "evidence.md":
        markdown += _evidence()
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+reports/evidence/(\w+)\.md\)", rf"]({up}evidence/\1.md)", markdown)
    return re.sub(r"\]\((?:\.\./)+ampcheck/checks\)", f"]({up}checks.md)", markdown)


def _generated() -> dict[str, str]:
    pages = {"index.md": _front(), "checks.md": _checks(), "api.md": _api()}
    pages |= {f"checks/{check.slug}.md": _check(check) for check in REGISTRY.values()}
    for path in _measured():
        pages[f"evidence/{path.name}"] = path.read_text(encoding="utf-8")
    return pages


def _front() -> str:
    """README.md with its links as the site has them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace("](reports/evidence)", "](evidence.md)")
    text = text.replace("](ampcheck/checks)", "](checks.md)")
    return re.sub(r"\n## Develop\n.*", "\n", text, flags=re.DOTALL)


def _checks() -> str:
    parts = [
        "# Checks\n\nEvery verdict names one of these checks; `ampcheck explain CHECK` prints its page. Most pages "
        "have an example that fails, and the same example mended.\n"
    ]
    for title in dict.fromkeys(FAMILIES.values()):
        checks = [check for check in REGISTRY.values() if FAMILIES[check.family] == title]
        parts.append(f"\n## {title}\n\n| check | requires |\n|---|---|\n")
        parts += [f"| [{c.slug}](checks/{c.slug}.md) | {_first_sentence(c.requires)} |\n" for c in checks]
    return "".join(parts)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".").replace("|", "\\|") + "."


def _check(check: Check) -> str:
    subjects = ", ".join(_SUBJECTS[kind.name] for kind in check.subjects) or "its own assertion or command"
    parts = [f"# {check.slug}\n\n{_escaped(check.requires)}\n\nJudges: {subjects}."]
    titles = {"How it is measured": check.measured, "Usual causes": check.causes, "How to fix it": check.fix}
    parts += [f"## {title}\n\n{_escaped(text)}" for title, text in titles.items()]
    if check.slug in examples.documented():
        failing, mended = (examples.example(check.slug, side) for side in examples.SIDES)
        parts += [
            f"## Example\n\n{failing.text}",
            f'```python title="failing.py"\n{failing.code}```',
            f"```sh\n{failing.run}\n```",
            f"```text\n{_wrapped(examples.finding_of(check.slug))}\n```",
            f"## Mended\n\n{mended.text}",
            f'```python title="mended.py"\n{mended.code}```',
        ]
    else:
        parts.append(f"## Example\n\nThis check has none: {examples.WITHOUT[check.slug]}.")
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Plain prose as Markdown: names with underscores and stars stay as they are."""
    return re.sub(r"([*_<\[\]])", r"\\\1", text) if "`" not in text else text


def _wrapped(finding: str) -> str:
    """A finding in lines that fit the page."""
    indents = [(line, "    " if line.startswith(" ") else "  ") for line in finding.splitlines()]
    return "\n".join(textwrap.fill(line, 88, subsequent_indent=indent) for line, indent in indents)


def _measured() -> list[Path]:
    return sorted((ROOT / "reports" / "evidence").glob("*.md"))


def _evidence() -> str:
    rows = []
    for path in _measured():
        text = path.read_text(encoding="utf-8")
        command = next((line for line in text.splitlines() if line.startswith("`")), "")
        rows.append(f"| [{path.stem}](evidence/{path.name}) | {command} |\n")
    return (
        "\n## Everything that is measured\n\nError rates, costs and judged models, each written by the command beside "
        "it.\n\n| figures | written by |\n|---|---|\n" + "".join(rows)
    )


def _api() -> str:
    """The public names, from the source of the package alone."""
    tree = ast.parse((ROOT / "ampcheck" / "__init__.py").read_text(encoding="utf-8"))
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "_MODULES" for target in node.targets)
    )
    modules: dict[str, str] = ast.literal_eval(table)
    names = sorted(modules, key=lambda name: (name[0].isupper(), name))
    entries = [f"::: ampcheck.{modules[name]}.{name}\n    options:\n      heading: ampcheck.{name}\n" for name in names]
    return "# API\n\nThe names of `ampcheck`. Everything else is internal and may change.\n\n" + "\n".join(entries)
