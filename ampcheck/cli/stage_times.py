"""How long the stages of an audit took when it last ran, in the user's cache folder. No verdict depends on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ampcheck.core.environment import installed
from ampcheck.core.errors import UsageError
from ampcheck.core.files import cache_home, write_atomically
from ampcheck.core.json_files import read_json
from ampcheck.core.settings import Target
from ampcheck.core.text import is_number


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds by stage. file: where they are kept; a file that is damaged or cannot be written is ignored."""

    file: Path
    seconds: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Target) -> StageTimes:
        """The times of the last audit of a target from this folder, with these options and this PyTorch."""
        key = json.dumps([str(Path.cwd()), {**asdict(target), "severity": None, "fail_on": None}, installed("torch")])
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        file = cache_home() / "stages" / name
        with suppress(OSError, ValueError):
            if isinstance(data := read_json(file), dict):
                return cls(file, {s: float(t) for s, t in data.items() if is_number(t) and 0 <= t < 1e6})
        return cls(file)

    def save(self, seconds: Mapping[str, float]) -> None:
        """Keep the times of an audit that came to its end."""
        with suppress(OSError, UsageError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, json.dumps({stage: round(time, 3) for stage, time in seconds.items()}))


def about(seconds: float) -> str:
    """A rough duration, such as `about 40 s` or `about 3 min`."""
    if seconds < 1:
        return "less than 1 s"
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"
