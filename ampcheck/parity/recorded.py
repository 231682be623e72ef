"""A recorded execution: a file with results, exact values and bounds, by which another process is compared.

What ran in a trainer can so be compared with what ran in an inference engine, in another release or on another machine.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.files import write_atomically
from ampcheck.core.json_files import tag_nonfinite, unread, untag_nonfinite
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Run, Scalar
from ampcheck.core.settings import resolve_limits
from ampcheck.facts.memory import dtype_name
from ampcheck.parity.calls import Side
from ampcheck.parity.execution import Execution, execute
from ampcheck.parity.judgement import failures_of
from ampcheck.records.results import Key
from ampcheck.shadow.compare import Result
from ampcheck.shadow.result import Reference

SCHEMA = 1
"""Version of the files. 1: the first."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """An execution as a file keeps it.

    run: with exact values that follow its decisions; own: where exact decides, of which both have the numbers.
    failures: what the checks find in the run. environment: where it ran. dtype: what autocast cast to, "" for none.
    """

    name: str
    run: Execution
    own: Execution
    failures: tuple[Finding, ...] = ()
    environment: Mapping[str, Scalar] = field(default_factory=dict)
    dtype: str = ""

    def without_gradients(self) -> Recorded:
        """The same, without gradients."""
        runs = [
            replace(run, results={key: r for key, r in run.results.items() if key[0] != "gradient"})
            for run in (self.run, self.own)
        ]
        return replace(self, run=runs[0], own=runs[1])

    def execution(self, *, own: bool = False) -> Execution:
        """One of the two, of a side with this name."""
        return replace(self.own if own else self.run, side=Side(self.name))


def record(side: Side, limits: Limits | None = None) -> Recorded:
    """Run a side, and keep what a comparison needs."""
    run, own = execute(side), execute(side, independent=True)
    failures = tuple(failures_of(run, resolve_limits(limits)))
    run.plain = own.plain
    dtype = "" if side.dtype is None else dtype_name(side.dtype)
    return Recorded(side.name, run, own, failures, environment(), dtype)


def save_record(recorded: Recorded, path: str | os.PathLike[str]) -> None:
    """Write a record as `.npz`, whole or not at all."""
    arrays: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for group, results in (("results", recorded.run.results), ("own", recorded.own.results)):
        for key, result in results.items():
            number = str(len(entries))
            entry = {"group": group, "key": key, "terms": result.terms, "roundings": result.roundings}
            entry["dtype"] = dtype_name(result.value.dtype)
            arrays[f"{number}.value"] = _bits(result.value)
            if result.reference is not None:
                entry["unit"] = result.reference.unit
                arrays[f"{number}.exact"] = result.reference.exact.numpy()
                arrays[f"{number}.moved"] = result.reference.moved.numpy()
            entries.append(entry)
    for place, (title, tensor) in enumerate(recorded.run.arguments.items()):
        arrays[f"argument {place}"] = _bits(tensor.cpu())
        arguments.append([title, dtype_name(tensor.dtype)])
    head = {
        "schema": SCHEMA,
        "name": recorded.name,
        "entries": entries,
        "run": Run(recorded.environment, recorded.failures).to_json(),
        "opaque": sorted(recorded.run.opaque),
        "plain": [
            [path, "complex", str(v)] if isinstance(v, complex) else [path, "", tag_nonfinite(v)]
            for path, v in recorded.run.plain.items()
        ],
        "dtype": recorded.dtype,
        "arguments": arguments,
        "names": sorted(recorded.run.names),
        "notes": recorded.run.notes,
    }
    content = io.BytesIO()
    numpy.savez_compressed(content, head=numpy.array(json.dumps(head)), **arrays)
    write_atomically(path, content.getvalue())


def load_record(path: str | os.PathLike[str], name: str) -> Recorded:
    """The record in a file. Raises `UsageError` where there is none, or it is damaged."""
    try:
        with numpy.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as arrays:
            head = json.loads(str(arrays["head"]))
            require_schema(head, os.fspath(path), "recorded execution", SCHEMA)
            groups: dict[str, dict[Key, Result]] = {"results": {}, "own": {}}
            for number, entry in enumerate(head["entries"]):
                kind, title, step = entry["key"]
                groups[entry["group"]][kind, title, step] = _result(entry, arrays, str(number))
            if not groups["results"] or groups["results"].keys() != groups["own"].keys():
                raise ValueError("no results, or not those of both runs")
            run = Run.from_json(head["run"])
            plain = {path: complex(v) if kind else untag_nonfinite(v) for path, kind, v in head["plain"]}
            execution = Execution(side=Side(name), results=groups["results"], plain=plain)
            execution.names, execution.notes = frozenset(head["names"]), list(head["notes"])
            execution.opaque.update(head["opaque"])
            execution.arguments = {
                path: _tensor(arrays[f"argument {number}"], dtype)
                for number, (path, dtype) in enumerate(head.get("arguments", ()))
            }
            dtype = str(head.get("dtype", ""))
    except UsageError:
        raise
    except Exception as error:  # NumPy's and zip's own, and PyTorch's of values that do not fit
        damaged = f"it is no file of `ampcheck record`, or not all of it ({type(error).__name__})"
        reason = unread(error) if isinstance(error, OSError) else damaged
        raise UsageError(f"no recorded execution could be read from {os.fspath(path)}: {reason}") from error
    failures = tuple(replace(finding, subject=name) for finding in run.findings)
    return Recorded(name, execution, replace(execution, results=groups["own"]), failures, run.environment, dtype)


def _bits(tensor: torch.Tensor) -> Any:
    """The values as NumPy has them; formats that it lacks as integers of the same bits."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        return tensor.contiguous().view(torch.uint8).numpy()
    return tensor.contiguous().view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _tensor(array: Any, name: str) -> torch.Tensor:
    """Inverse of `_bits`. Raises `ValueError` for an array of another dtype."""
    tensor, dtype = torch.from_numpy(array), getattr(torch, name)
    if tensor.numpy().dtype != _bits(torch.empty(0, dtype=dtype)).dtype:
        raise ValueError(f"an array of {name} holds {tensor.dtype}")
    return tensor.view(dtype)


def _result(entry: Mapping[str, Any], arrays: Any, number: str) -> Result:
    value = _tensor(arrays[f"{number}.value"], entry["dtype"])
    reference = None
    if "unit" in entry:
        names = ("complex128", "complex64") if value.is_complex() else ("float64", "float32")
        exact, moved = (
            _tensor(arrays[f"{number}.{side}"], dtype) for side, dtype in zip(("exact", "moved"), names, strict=True)
        )
        if not exact.shape == moved.shape == value.shape:
            raise ValueError("a result and its exact values have other shapes")
        reference = Reference(exact, moved, float(entry["unit"]))
    return Result(value, reference, int(entry["terms"]), int(entry["roundings"]))
