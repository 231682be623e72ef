"""Hunt for defects in 16 bits in the public callables of packages, and keep what a person has confirmed.

    python benchmarks/hunt.py PACKAGE... [--only PATTERN] [--json PATH]   # candidates, ranked
    python benchmarks/hunt.py --record FOLDER...                # write finding.json of reports/found/FOLDER
    python benchmarks/hunt.py --table                           # write README.md of the reports, and known.json
    python benchmarks/hunt.py --check [FOLDER...]               # run the repros: broken or mended in this release?
    python benchmarks/hunt.py --packages                        # what the repros need from PyPI
    python benchmarks/hunt.py --known [FOLDER...] [--release PACKAGE==VERSION...]   # run the repros, write known.json

Each callable runs in a process of its own, with arguments from its names and defaults (`_callables.py`), on the values
that users have, in these ways: under autocast of the CPU and of CUDA (emulated) on results of a matrix product, with
bfloat16 weights, in pure half. What a candidate is worth is for a person to find out.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import _found
import _known
import numpy as np
import torch
from _callables import PROFILES, builder, callables, first_that_runs, floating
from torch import Tensor

from ampcheck import audit, emulate
from ampcheck.core.run import Verdict

FAR = 0.1
"""Relative error of a result from which on a candidate is one, norm over norm."""

SECONDS = 60
"""Of one callable in all ways."""

WAYS = {
    "autocast float16": (torch.float16, True, "cpu"),
    "autocast float16, cuda": (torch.float16, True, "cuda"),
    "autocast bfloat16": (torch.bfloat16, True, "cpu"),
    "autocast bfloat16, cuda": (torch.bfloat16, True, "cuda"),
    "bfloat16 weights": (torch.bfloat16, False, "cpu"),
    "half": (torch.float16, False, "cpu"),
}
"""Each way by rank: format, whether under autocast, device of the policy."""

CHECKS = ("overflow", "silent-zero", "precision-loss", "flush", "integer-cast", "nonfinite-gradient")
UNSUPPORTED = (
    "not implemented for",
    "same dtype",
    "expected scalar type",
    "must match",
    "dtype mismatch",
    "to have the",
)
"""In the messages of ops that a machine or a dtype lacks: they say nothing of the callable's numbers."""


class Call:
    """One callable with the values of one profile."""

    def __init__(self, value: Any, values: tuple[Any, ...], profile: str) -> None:
        build = builder(value)
        assert build is not None
        self.build = build
        self.values = tuple(PROFILES[profile](v) if _is_float(v) else v for v in values)

    def run(self, dtype: torch.dtype | None, autocast: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Results and the gradients of the inputs. dtype: None for float32."""
        random.seed(0)
        np.random.seed(0)
        call, module = self.build()
        if module is not None and dtype is not None and not autocast:
            module.to(dtype)
        given = tuple(v.to(dtype) if _is_float(v) and dtype else v for v in self.values)
        given = tuple(v.clone().requires_grad_(v.is_floating_point()) if isinstance(v, Tensor) else v for v in given)
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype) if autocast and dtype else nullcontext():
            out = floating(call(*given))
        total = sum(t.float().mean() for t in out if t.requires_grad)
        if isinstance(total, Tensor):
            total.backward()  # type: ignore[no-untyped-call]
        return [t.detach() for t in out], [v.grad for v in given if isinstance(v, Tensor) and v.grad is not None]


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _apart(low: list[Tensor], wide: list[Tensor]) -> str:
    """How 16 bits differ from float32, where it is more than their roundings."""
    for ours, theirs in zip(low, wide, strict=False):
        if ours.shape != theirs.shape or not theirs.isfinite().all():
            continue
        if not ours.isfinite().all():
            return "nonfinite"
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-7)
        if error > FAR:
            return f"error {error:.2g}"
    return ""


def once(call: Call, way: str) -> dict[str, Any] | None:
    """How one call in one way differs from float32, and what ampcheck says of it; None where it does not."""
    low, autocast, device = WAYS[way]
    try:
        wide, again = call.run(None, False), call.run(None, False)
        if not all(t.isfinite().all() for part in wide for t in part) or not all(map(torch.equal, wide[0], again[0])):
            return None  # not finite in float32 either, or another result at each call
    except Exception:  # noqa: BLE001  # these values are none that the callable takes
        return None
    try:
        with emulate("cuda") if device == "cuda" else nullcontext():
            narrow = call.run(low, autocast)
    except Exception as error:  # noqa: BLE001  # of the callable
        text = f"{type(error).__name__}: {error}"
        return None if any(words in text for words in UNSUPPORTED) else {"what": "raises", "says": [text[:300]]}
    what = _apart(narrow[0], wide[0])
    if not what and (grads := _apart(narrow[1], wide[1])):
        what = f"gradient: {grads}"
    if not what:
        return None
    report = audit(lambda: call.run(low, autocast), checks=CHECKS, device=device)
    failed = [f for f in report.of(Verdict.FAIL) if f.check in CHECKS]
    return {"what": what, "says": [f"{f.check}: {f.message[:300]} ({f.where})" for f in failed]}


def every_way(name: str, value: Any, send: Any) -> None:
    """All ways and profiles of one callable; what is found is sent when it is known, as the process may be ended."""
    signal.alarm(SECONDS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    values = first_that_runs(value)
    send.send({"ran": values is not None})
    for way in WAYS if values is not None else ():
        for profile in PROFILES:
            found = once(Call(value, values or (), profile), way)
            if found is not None:
                send.send({"name": name, "way": way, "profile": profile, **found})


def hunted(package: str, pattern: str) -> Iterator[dict[str, Any]]:
    """The candidates of a package, in the order of its callables; each callable in a forked process."""
    context = multiprocessing.get_context("fork")
    ran = skipped = 0
    for name, value in callables(package):
        if not fnmatch.fnmatch(name, pattern) or builder(value) is None:
            continue
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=every_way, args=(name, value, send), daemon=True)
        process.start()
        send.close()
        try:
            while True:
                message = receive.recv()
                if "ran" in message:
                    ran, skipped = ran + message["ran"], skipped + (not message["ran"])
                else:
                    yield message
        except EOFError:
            process.join()
    print(f"{package}: {ran} callables ran, {skipped} take other arguments", file=sys.stderr, flush=True)


def ranked(candidates: list[dict[str, Any]]) -> Iterator[str]:
    """The candidates of a callable in one way as one entry, the ways by rank."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in sorted(candidates, key=lambda candidate: list(WAYS).index(candidate["way"])):
        grouped.setdefault((one["name"], one["way"]), []).append(one)
    for (name, way), group in grouped.items():
        yield f"{way:<24}{name}: " + "; ".join(f"{one['profile']} {one['what']}" for one in group)
        yield from (f"    {text}" for text in group[0]["says"][:2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="packages; with --record and --check, folders")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of the callables' names, such as '*Loss'")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the candidates here, one a line")
    parser.add_argument("--release", nargs="+", default=[], help="with --known: measure these, not what is installed")
    action = parser.add_mutually_exclusive_group()
    for name in ("record", "table", "check", "packages", "known"):
        action.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    if options.table:
        (_found.FOUND / "README.md").write_text("\n".join(_found.table()) + "\n", encoding="utf-8")
        _known.save(_known.refreshed())
    elif options.packages:
        print("\n".join(_found.distributions()))
    elif options.check:
        return int(_found.check_all(options.names) > 0)
    elif options.known:
        return int(_known.write(options.names, options.release) > 0)
    elif options.record:
        for folder in _found.folders(options.names):
            print(f"{folder.name}: {_found.write_record(folder)}", flush=True)
    else:
        for package in options.names:
            candidates = []
            for candidate in hunted(package, options.only):
                candidates.append(candidate)
                if options.json:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(candidate) + "\n")
            print("\n".join(ranked(candidates)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
