"""Durations of the stages of an audit when it last ran on this machine, in the user's cache folder. No verdict depends
on it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
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
        """The times of the last audit of a target from this folder, with these options, this PyTorch and this machine:
        a cache folder may be shared, or restored in a job of CI."""
        options = {**asdict(target), "severity": None, "fail_on": None}
        key = json.dumps([str(Path.cwd()), options, installed("torch"), platform.node(), os.cpu_count()])
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        file = cache_home() / "stages" / name
        with suppress(OSError, ValueError):
            if isinstance(data := read_json(file), dict):
                return cls(file, {s: float(t) for s, t in data.items() if is_number(t) and 0 <= t < 1e6})
        return cls(file)

    def expected(self, stages: Iterable[str], measured: Mapping[str, float]) -> float:
        """Seconds that these stages will take, 0 where nothing is known: those of the last time, times how much longer
        the stages that this run has measured took than then."""
        before = sum(self.seconds[stage] for stage in measured if stage in self.seconds)
        now = sum(time for stage, time in measured.items() if stage in self.seconds)
        return (now / before if before and now else 1.0) * sum(self.seconds.get(stage, 0.0) for stage in stages)

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
