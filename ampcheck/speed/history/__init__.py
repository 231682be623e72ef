"""The history: what was measured, when, of which commit, on which machine; lines that are only ever added."""

from ampcheck.speed.history.imported import Imported, import_benchmarks
from ampcheck.speed.history.lines import append, load
from ampcheck.speed.history.points import History, Note, Point, SeriesKey, SpeedSeries, Times
from ampcheck.speed.history.working_tree import Commit, commit_of

__all__ = [
    "Commit",
    "History",
    "Imported",
    "Note",
    "Point",
    "SeriesKey",
    "SpeedSeries",
    "Times",
    "append",
    "commit_of",
    "import_benchmarks",
    "load",
]
