"""The history of measurements, each with its time, commit and machine: JSON lines that are only ever appended."""

from ampcheck.speed.history.records import History as History
from ampcheck.speed.history.records import Note as Note
from ampcheck.speed.history.records import Point as Point
from ampcheck.speed.history.storage import append as append
from ampcheck.speed.history.storage import commit_of as commit_of
from ampcheck.speed.history.storage import import_benchmarks as import_benchmarks
from ampcheck.speed.history.storage import load as load
