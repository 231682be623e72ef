"""Write docs/llms.txt, the list of the pages for language models: `python docs/site/llms.py`.

The pages are those of the site that exist as files, in its order, each with the first sentence of its text.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "llms.txt"


def text() -> str:
    """What the file should hold."""
    site = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    title, summary = (re.findall(rf"^site_{key}: (.*)$", site, re.MULTILINE)[0] for key in ("name", "description"))
    pages = [(name, Path(path)) for name, path in re.findall(r"^ +- ([^:\n]+): (\S+\.md)$", site, re.MULTILINE)]
    lines = [f"# {title}", "", f"> {summary}", ""]
    lines += ["`ampcheck guide` prints a page for coding agents; `ampcheck explain CHECK` the page of a check.", ""]
    lines += ["## Pages", "", f"- [README](../README.md): {_sentence(ROOT / 'README.md')}"]
    lines += [
        f"- [{name}]({path.as_posix()}): {_sentence(FILE.parent / path)}"
        for name, path in pages
        if (FILE.parent / path).exists()
    ]
    return "\n".join(lines) + "\n"


def _sentence(page: Path) -> str:
    """The first sentence of a page, without markup."""
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    first = next(part for part in prose.split("\n\n") if part.strip() and not part.startswith(("#", "|", "<")))
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(first.split()))
    return re.split(r"(?<=[.:]) (?=[A-Z`])", plain.replace("**", ""))[0].rstrip(".:") + "."


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
