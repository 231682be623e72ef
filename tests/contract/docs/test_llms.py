"""docs/llms.txt lists the pages that there are."""

from __future__ import annotations

import re

import llms


def test_the_list_of_pages_is_current() -> None:
    assert llms.FILE.read_text(encoding="utf-8") == llms.text(), "run python docs/site/llms.py"


def test_every_page_is_listed_with_a_sentence() -> None:
    docs = llms.FILE.parent
    listed = dict(re.findall(r"^- \[[^\]]+\]\(([^)]+)\): (\S.*\.)$", llms.text(), re.MULTILINE))
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md") if "examples" not in path.parts}
    assert pages | {"../README.md"} == set(listed)
    assert all((docs / page).is_file() for page in listed)
