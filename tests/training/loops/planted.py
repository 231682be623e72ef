"""Planted mistakes: a script, what is changed in it, and the check and the line that must name it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

SCRIPTS = Path(__file__).with_name("scripts")

PRECISIONS = MappingProxyType(
    {
        "nanogpt": ("float32", "bfloat16", "float16", "pure bfloat16"),
        "reference": ("float32", "bfloat16", "float16"),
        "accelerated": ("no", "bf16"),
        "llama_trainer": ("float32", "bfloat16"),
        "lightning_module": ("32-true", "bf16-mixed"),
    }
)
"""The precisions that each script supports, by its name."""


@dataclass(frozen=True)
class Plant:
    """A mistake in a script.

    check: the check that names it; line: the source line that it names. changes: lines to replace, in hunks between
    lines of dots, each line with a sign: ' ' stays, '-' goes, '+' comes. follows: checks that fail because of it.
    beside: checks that fail at another line, for a reason of their own that the same lines plant.
    steps: how many training steps show it. warns: the check warns only.
    """

    name: str
    script: str
    precision: str
    check: str
    line: str
    changes: str
    follows: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    steps: int = 8
    warns: bool = False

    @property
    def source(self) -> str:
        """The script with the mistake."""
        text = healthy_source(self.script, self.precision)
        for hunk in self.changes.strip("\n").split("\n...\n"):
            lines = [line or " " for line in hunk.split("\n")]
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in signs) for signs in (" -", " +"))
            assert f"\n{text}".count(f"\n{old}") == 1, f"{self.name}: these lines are not unique in the script:\n{old}"
            text = f"\n{text}".replace(f"\n{old}", f"\n{new}", 1)[1:]
        assert any(line.strip() == self.line for line in text.splitlines()), f"{self.name}: no line {self.line}"
        return text


def healthy_source(script: str, precision: str) -> str:
    """A script as it is, in one of its precisions."""
    text = (SCRIPTS / f"{script}.py").read_text(encoding="utf-8")
    return re.sub(r'^PRECISION = ".*?"', f'PRECISION = "{precision}"', text, count=1, flags=re.MULTILINE)
