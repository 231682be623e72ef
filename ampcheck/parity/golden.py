"""Goldens that know rounding: a file keeps exact values and bounds, and only a change of these is a change.

Of each result the file keeps, in float64, all elements of a small one, and for a large one two numbers of each of its
groups: a weighted sum and the norm, which a change of any element moves. The real values may differ in their last
digits, as they do in another release, on another CPU or with other threads; they are judged by their own bounds.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ampcheck.checks import findings
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.files import only_writer, write_atomically
from ampcheck.core.json_files import read_json
from ampcheck.core.run import Coverage, Run
from ampcheck.core.settings import resolve_limits
from ampcheck.core.updating import is_updating, note_written
from ampcheck.facts.memory import roundoff
from ampcheck.facts.norms import finite_parts, real_parts
from ampcheck.parity.calls import Side
from ampcheck.parity.execution import Execution, execute, str_of
from ampcheck.parity.judgement import failures_of
from ampcheck.parity.trail import FLOAT64_ALIKE, FLOAT64_NOISE, Trail, row_weights
from ampcheck.records.parity import GoldenComparison
from ampcheck.records.results import UNKNOWABLE, ResultError
from ampcheck.shadow.compare import Result
from ampcheck.shadow.result import Reference

SCHEMA = 1
"""Version of the files. 1: the first."""

_WHOLE = 64
"""Elements up to which all of them are kept."""

_GROUPS = 64
"""Groups of elements of a larger result, at most."""

_MANY = 64
"""Elements from which the error of a result is no chance of a few roundings."""

_WORSE = 4.0
"""Multiple of the recorded error that no other order of the same sums has: standard deviations, of so many elements."""

_SUMS = 4.0
"""Standard deviations that a sum of noises of random signs may reach."""

_LAST_DIGITS = 2.0**-20
"""The relative distance of arguments that another CPU makes, by other instructions: 16 roundings of float32."""

_NOISE_FACTOR = 8 * _LAST_DIGITS / (FLOAT64_NOISE * roundoff(torch.float32))
"""Multiple of its noise by which last digits of the arguments may change a result. The noise is `FLOAT64_NOISE` of
what one rounding of float32 does to it; 8 is for elements far smaller than the largest of their argument."""

_PATIENCE = 60.0
"""Seconds for which a writer waits for another."""

_LINE = 8
"""Numbers in a line of a file."""

_DIGITS = 13
"""Decimal digits that are written: float64 has 15.9, and the noise of other algorithms is above the last."""


@dataclass(frozen=True, slots=True)
class Golden:
    """One result as a file keeps it: in float64, what is not finite as zero.

    values: all elements, or of each group a weighted sum and the norm. noise: of each of them, what float64 itself may
    be off. nonfinite: elements that are inf, -inf and NaN. places: a checksum of where they are. digits: decimal digits
    that rounding leaves of the result, None of integers. error: of the recorded run, relative to the exact result, or
    what moved data, half a rounding or sums in float32 explain if that is more; None where it is chance, and in files
    that do not have it.
    """

    dtype: str
    shape: tuple[int, ...]
    values: tuple[float, ...]
    noise: tuple[float, ...]
    nonfinite: tuple[int, ...] = (0, 0, 0)
    places: int = 0
    digits: float | None = None
    error: float | None = None


def golden_of(result: Result) -> Golden:
    """Return what is kept of a result."""
    dtype, shape = str(result.value.dtype).removeprefix("torch."), tuple(result.value.shape)
    reference = result.reference
    if reference is None:
        values, noise = _summed(result.value.double()), torch.zeros(1)
        return Golden(dtype, shape, _numbers(values), _numbers(noise.expand(values.shape)))
    exact, moved = finite_parts(reference.exact), finite_parts(reference.moved)
    values, away, size = _summed(exact), _summed(moved - exact, sizes=True), _summed(exact, sizes=True)
    infinite = real_parts(reference.exact)
    masks = infinite == torch.inf, infinite == -torch.inf, infinite.isnan()
    nonfinite = tuple(int(found.sum()) for found in masks)
    places = zlib.crc32(torch.stack(masks).numpy().tobytes()) if any(nonfinite) else 0
    norms = [float(torch.linalg.vector_norm(t)) for t in (moved - exact, exact)]
    share = max(norms[0] / (norms[1] or 1.0), reference.unit)
    digits = round(max(0.0, -math.log10(share)), 1)
    return Golden(
        dtype,
        shape,
        _numbers(values),
        _numbers(FLOAT64_NOISE * away + FLOAT64_ALIKE * size),
        nonfinite,
        places,
        digits,
    )


def _summed(values: torch.Tensor, *, sizes: bool = False) -> torch.Tensor:
    """All elements, or a weighted sum and the norm of each group. sizes: the magnitudes of these, of values of random
    signs."""
    flat = values.reshape(-1).double()
    if flat.numel() <= _WHOLE:
        return flat.abs() if sizes else flat
    width = -(-flat.numel() // _GROUPS)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % width)).view(-1, width)
    norms = torch.linalg.vector_norm(rows, dim=1)
    weighted = _SUMS * norms if sizes else rows @ row_weights(width)
    return torch.stack([weighted, norms], 1).reshape(-1)


def _numbers(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(f"{number:.{_DIGITS}g}") for number in values.reshape(-1).tolist())


def differs(old: Golden, new: Golden, noise: float = 1.0) -> str:
    """Return how the exact values of a result differ from the recorded ones; "" where they do not. noise: a factor of
    it."""
    if old.shape != new.shape:
        return f"it is of shape {list(new.shape)}, and was {list(old.shape)}"
    if old.dtype != new.dtype:
        return f"it is {new.dtype}, and was {old.dtype}"
    if old.nonfinite != new.nonfinite:
        return f"inf, -inf and NaN are {new.nonfinite} elements in float64, and were {old.nonfinite}"
    if old.places != new.places:
        return "inf, -inf and NaN are other elements in float64"
    before, after = (torch.tensor(golden.values, dtype=torch.float64) for golden in (old, new))
    noises = (torch.tensor(golden.noise, dtype=torch.float64) for golden in (old, new))
    allowed = noise * torch.maximum(*noises) + 10.0**-_DIGITS * before.abs()
    off = (after - before).abs()
    apart = off > 2 * allowed
    if not bool(apart.any()):
        return ""
    worst = float((off / before.abs().clamp_min(1e-300))[apart].max())
    what = "elements" if len(old.values) == math.prod(new.shape) else "sums of groups"
    return f"{int(apart.sum()):,} of {len(apart):,} {what} differ in float64, by up to {worst:.2g} of their size"


def _to_plain(golden: Golden) -> dict[str, Any]:
    """As JSON has it: rows of numbers as text, which a review shows as one line each."""
    return {
        **asdict(golden),
        "shape": " ".join(map(str, golden.shape)),
        "values": [" ".join(f"{number:.{_DIGITS}g}" for number in row) for row in _lines(golden.values)],
        "noise": [" ".join(f"{number:.2g}" for number in row) for row in _lines(golden.noise)],
    }


def _lines(numbers: tuple[float, ...]) -> list[tuple[float, ...]]:
    return [numbers[start : start + _LINE] for start in range(0, len(numbers), _LINE)]


def _from_plain(fields: Mapping[str, Any]) -> Golden:
    values, noise = (tuple(float(n) for line in fields[name] for n in line.split()) for name in ("values", "noise"))
    if len(values) != len(noise):
        raise ValueError(f"{len(values)} values and {len(noise)} noises")
    shape = tuple(map(int, fields["shape"].split()))
    return Golden(
        fields["dtype"],
        shape,
        values,
        noise,
        tuple(fields["nonfinite"]),
        fields.get("places", 0),
        fields["digits"],
        None if (error := fields.get("error")) is None else _error_of(error),
    )


def _error_of(value: object) -> float:
    if not isinstance(value, float) or not 0.0 < value < math.inf:
        raise ValueError(f"an error of {value!r:.40}")
    return value


class GoldenFile:
    """The goldens of one test file, by name: `goldens/test_model.json` beside `test_model.py`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = self._load()

    def _load(self) -> dict[str, Any]:
        if not self.path.is_file():
            return {}
        try:
            data: dict[str, Any] = read_json(self.path)
            require_schema(data, str(self.path), "file of goldens", SCHEMA)
        except UsageError:
            raise
        except (OSError, ValueError) as error:
            advice = "restore it, or delete it and write it with --ampcheck-update"
            raise UsageError(f"{self.path} cannot be read: {error}; {advice}") from error
        return data

    def read(self, name: str) -> tuple[dict[str, Golden], dict[str, Golden]] | None:
        """The results and the arguments by their names; None for a golden that is not in the file."""
        entry = self._data.get("goldens", {}).get(name)
        if entry is None:
            return None
        try:
            results, arguments = (
                {key: _from_plain(fields) for key, fields in entry[group].items()} for group in ("results", "arguments")
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                f"golden {name!r} of {self.path} is damaged ({error!r}): write it with --ampcheck-update"
            ) from error
        return results, arguments

    def write(self, name: str, results: Mapping[str, Golden], arguments: Mapping[str, Golden]) -> None:
        """Replace one golden, and keep the others, also those that other processes write."""
        where = environment()
        groups = {"results": results, "arguments": arguments}
        entry = {"environment": {key: where[key] for key in ("torch", "python", "device", "platform", "threads")}}
        plain = {group: {key: _to_plain(golden) for key, golden in each.items()} for group, each in groups.items()}
        os.makedirs(self.path.parent, exist_ok=True)
        with only_writer(self.path, _PATIENCE):
            goldens = {**self._load().get("goldens", {}), name: {**entry, **plain}}
            self._data = {"schema": SCHEMA, "goldens": dict(sorted(goldens.items()))}
            write_atomically(self.path, json.dumps(self._data, indent=1, allow_nan=False) + "\n")
        note_written(self.path, name)

    def made_in(self, name: str) -> str:
        """Where a golden was recorded, in words."""
        where = self._data.get("goldens", {}).get(name, {}).get("environment", {})
        return f"torch {where.get('torch', '?')}, {where.get('platform', '?')}"


def judge_golden(path: Path, name: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
    """The run of `function(*args, **kwargs)` beside its golden, which is written where files are updated."""
    runs = run_for_golden(name, function, args, kwargs)
    compared = compare_golden(GoldenFile(path), name, runs, update=is_updating())
    coverage = Coverage({"results": compared.results})
    return Run(environment(), tuple(findings(compared, resolve_limits(None))), coverage, title=f"golden {name}")


def run_for_golden(
    name: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Execution, Execution]:
    """A run as it is, and one in which exact takes the decisions, whose exact values are those of no release or CPU."""
    side = Side(name, function, args, kwargs)
    run = execute(side)
    return run, execute(side, independent=True, trail=Trail() if run.opaque else None)


def compare_golden(file: GoldenFile, name: str, runs: tuple[Execution, Execution], *, update: bool) -> GoldenComparison:
    """Compare a run with its golden; write it where `update` and the run is honest."""
    run, independent = runs
    results = {str_of(key): golden_of(result) for key, result in independent.results.items()}
    errors = {str_of(e.key): e for e in run.errors if e.known and run.results[e.key].value.numel() >= _MANY}
    results |= {key: replace(results[key], error=_recorded_error(e)) for key, e in errors.items() if key in results}
    results |= {
        f"number {path}".rstrip(): _of_number(v) for path, v in independent.plain.items() if isinstance(v, (int, float))
    }
    if not results:
        raise UsageError(f"golden {name!r} needs tensors; found {run.plain!r:.80}")
    made = GoldenComparison(name, f"{file.path.parent.name}/{file.path.name}", results=len(results))
    if failures := failures_of(run, resolve_limits(None)):
        return replace(made, failures=tuple(failures))
    arguments = {f"argument {path}": golden_of(Result(t, _as_data(t))) for path, t in run.arguments.items()}
    if update:
        file.write(name, results, arguments)
        return replace(made, written=True)
    stored = file.read(name)
    if stored is None:
        return made
    recorded, given = stored
    other = {key: how for key in given if key in arguments and (how := differs(given[key], arguments[key]))}
    shaken = {key: how for key, how in other.items() if _are_last_digits(given[key], arguments[key])}
    changed = {key: how for key, how in other.items() if key not in shaken}
    changed |= dict.fromkeys(given.keys() ^ arguments.keys(), "it is given on one side alone")
    common = recorded.keys() & results.keys()
    differing = {key: how for key in recorded if key in common and (how := differs(recorded[key], results[key]))}
    return replace(
        made,
        made_in=file.made_in(name),
        gone=tuple(sorted(recorded.keys() - common)),
        new=tuple(sorted(results.keys() - common)),
        differing=differing,
        undetermined=tuple(k for k in differing if _is_undetermined(recorded[k]) and _is_undetermined(results[k])),
        digits=min((golden.digits for golden in results.values() if golden.digits is not None), default=None),
        opaque=tuple(run.opaque),
        behind_opaque=tuple(str_of(key) for key in independent.results if independent.is_behind_opaque(key)),
        changed=changed,
        shaken=shaken,
        worse={
            key: (error.whole, before)
            for key, error in errors.items()
            if key in common and (before := recorded[key].error) is not None and error.whole > _WORSE * before
        },
        beyond_shaking=tuple(key for key in differing if differs(recorded[key], results[key], _NOISE_FACTOR)),
    )


def _recorded_error(error: ResultError) -> float:
    """The relative error that a file keeps of a result."""
    return float(f"{max(error.whole, error.seen.spread, error.unit / 2, _LAST_DIGITS):.2g}")


def _are_last_digits(old: Golden, new: Golden) -> bool:
    """Return whether two arguments differ by less than the last digits of float32 alone."""
    if (old.dtype, old.shape, old.nonfinite) != (new.dtype, new.shape, new.nonfinite):
        return False
    before, after = (torch.tensor(golden.values, dtype=torch.float64) for golden in (old, new))
    return float((after - before).abs().max()) <= _LAST_DIGITS * float(before.abs().max())


def _is_undetermined(golden: Golden) -> bool:
    return golden.digits is not None and golden.digits < -math.log10(UNKNOWABLE)


def _of_number(value: float) -> Golden:
    """Return what is kept of a number: a float, an int or a bool."""
    exact = torch.tensor(value, dtype=torch.float64)
    return golden_of(Result(exact, Reference(exact, exact.float(), 2.0**-53)))


def _as_data(tensor: torch.Tensor) -> Reference | None:
    """The numbers of an argument, which have no error."""
    if not tensor.is_floating_point():
        return None
    return Reference(tensor.double(), tensor.double(), roundoff(tensor.dtype))
