"""docs/messages.md explains messages that ampcheck still writes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ampcheck

PACKAGE = Path(ampcheck.__file__).parent
PAGE = PACKAGE.parent / "docs" / "messages.md"
ROWS = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def strings() -> str:
    """Every text in the source of the package, parts of f-strings included."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return "\0".join(" ".join(text.split()) for text in texts)


def test_every_explained_message_is_in_the_source(strings: str) -> None:
    parts = [" ".join(part.split()).strip("().;, ") for message in ROWS for part in message.split("…")]
    assert [part for part in parts if part not in strings] == []


def test_every_table_of_messages_is_read() -> None:
    assert len(ROWS) > 30
