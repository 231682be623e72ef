"""Every operator of OpInfo under the shadow, against a plain float64 run of the same call on the same values.

    python benchmarks/opinfo_shadows.py --json out.json [--only NAME ...] [--dtype bfloat16 ...] [--form function ...]

The table has a row per operator, with the worst of its forms by format; `STATUS` lists what it may say, worst first.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from opinfo_runs import (
    Opened,
    Recorder,
    Replay,
    Run,
    converted,
    difference_of_bits,
    error,
    is_float,
    judge,
    lifted_cast,
    lowering,
    own_error,
    widening,
)
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

STATUS = [
    "crash",  # the interpreter died
    "disturbed",  # outputs, gradients, inputs or random state differ from the run without the shadow
    "shadow error",  # the call raises only under the shadow
    "mismatch",  # exact differs from float64, and nothing was counted
    "timeout",
    "no rule (counted)",  # restarted from the real result, by name
    "left the run (counted)",  # for NumPy, and came back as data
    "unverified",  # torch cannot run the call in float64, so nothing proves the rule
    "decision",  # differs from float64 only as far as it follows the real run
    "random",
    "rule",
    "derived",
    "error of torch itself",  # no kernel in this format, or the sample fails without the shadow
    "not applicable",
]
UNSET = set("empty empty_like new_empty new_empty_strided empty_strided empty_permuted resize_ resize_as_".split())
"""Operators whose results are memory that nobody wrote."""

VARYING = {"linalg.lstsq"}
"""Operators that give other bits from call to call by themselves: LAPACK's gelsy does in about a tenth of them."""


class TooSlowError(Exception):
    """A sample took longer than its time."""


def entries(names: list[str]) -> list[Any]:
    """The OpInfo entries to run; an empty list of names means all."""
    freeze = torch.backends.disable_global_flags
    torch.backends.disable_global_flags = lambda: None  # PyTorch's test tools refuse flags to the whole process
    try:
        from torch.testing._internal import common_methods_invocations as db
        from torch.testing._internal.autograd_function_db import autograd_function_db
        from torch.testing._internal.custom_op_db import custom_op_db
    finally:
        torch.backends.disable_global_flags = freeze

    foreach = [
        *db.foreach_unary_op_db,
        *db.foreach_binary_op_db,
        *db.foreach_pointwise_op_db,
        *db.foreach_reduce_op_db,
        *db.foreach_other_op_db,
    ]
    every = [*db.op_db, *foreach, *custom_op_db, *autograd_function_db]
    return [op for op in every if not names or op.name in names]


def samples(op: Any, dtype: torch.dtype, gradients: bool, limit: int) -> Iterator[Any]:
    """A handful of small samples in a wide format, spread over what OpInfo generates."""
    torch.manual_seed(0)
    kept: list[Any] = []
    empty: list[Any] = []
    for sample in op.sample_inputs("cpu", dtype, requires_grad=gradients):
        leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
        sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
        if sum(sizes) <= 50_000:
            (kept if all(sizes) else empty).append(sample)
        if len(kept) >= 60:
            break
    kept = kept or empty
    stride = max(1, -(-len(kept) // limit))
    yield from kept[::stride]


def call_of(op: Any, form: str, values: Any) -> Callable[..., Any] | None:
    """The function to call for a form of the operator; None where it has none."""
    if form == "function":
        return op.op
    if form == "inplace":
        return op.inplace_variant
    if not getattr(op, "supports_out", False):
        return None
    shapes = op.op(*values[0], **values[1])
    single = isinstance(shapes, Tensor)
    if not all(isinstance(s, Tensor) for s in ([shapes] if single else shapes)):
        return None

    def into(*args: Any, **kwargs: Any) -> Any:
        wide = torch.get_default_dtype() is torch.float64  # the reference run
        out = tree_map(lambda t: torch.zeros_like(t, dtype=widening(t.dtype) if wide else t.dtype), shapes)
        return op.op(*args, **kwargs, out=out)

    return into


def one_sample(op: Any, sample: Any, low: torch.dtype, form: str, notes: dict[str, Any]) -> tuple[str, float, str]:
    """Status, worst error and message of one sample."""
    values = ((sample.input, *sample.args), dict(sample.kwargs))
    backward = form == "function" and any(is_float(t) and t.requires_grad for t in tree_leaves(values))
    narrow = converted(values, lowering(low), backward)
    with torch.no_grad():
        wide = converted(narrow, widening, False)
    leaves, spec = tree_flatten(wide)
    origins = tree_leaves(narrow)
    for leaf, origin in zip(leaves, origins, strict=True):
        if isinstance(leaf, Tensor) and origin.requires_grad:
            leaf.requires_grad_()
    wide = tree_unflatten(leaves, spec)
    if op.name == "nn.functional.rms_norm" and wide[1].get("eps") is None:
        wide[1]["eps"] = torch.finfo(torch.float32).eps  # the default is a constant of the format
    process = sample.output_process_fn_grad

    def fresh() -> Any:
        return converted(narrow, lambda dtype: dtype, backward)

    try:
        call = call_of(op, form, fresh())
        if call is None:
            return "not applicable", 0.0, ""
        try:
            plain = Run(call, process, fresh(), backward)
        except RuntimeError:
            if not backward:
                raise
            backward = False
            plain = Run(call, process, fresh(), backward)
    except TooSlowError:
        raise
    except Exception as failure:  # noqa: BLE001 - whatever torch says about its own sample
        return "error of torch itself", 0.0, f"{type(failure).__name__}: {str(failure)[:150]}"
    recorder, inputs = Recorder(), fresh()
    try:
        with recorder:
            recorded = Run(call, process, inputs, backward)
    except TooSlowError:
        raise
    except Exception as failure:  # noqa: BLE001 - not even an empty mode may stand around it
        return "error of torch itself", 0.0, f"under any mode: {type(failure).__name__}: {str(failure)[:150]}"
    if plain.outputs and not any(t.layout != torch.strided or t.numel() for t in plain.outputs):
        return "not applicable", 0.0, "empty"
    shadow = Opened()
    inputs = fresh()
    try:
        with shadow.context:
            real = Run(call, process, inputs, backward)
    except TooSlowError:
        raise
    except Exception as failure:  # noqa: BLE001 - the harness reports it as a row
        return "shadow error", float("inf"), f"{type(failure).__name__}: {str(failure)[:200]}"
    if op.name not in UNSET | VARYING:
        changed = difference_of_bits(plain, real)
        if changed and not difference_of_bits(plain, Run(call, process, fresh(), backward)):
            if difference_of_bits(recorded, real):
                return "disturbed", float("inf"), changed
            notes["any mode"] = changed
    unruled = shadow.unruled()
    counted = "; ".join(f"{name}" for name in unruled)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        replay = Replay(recorder.draws)
        with replay:
            reference = Run(lifted_cast(op.name) or call, process, wide, backward)
    except TooSlowError:
        raise
    except Exception as failure:  # noqa: BLE001 - float64 has no kernel for it
        status = "no rule (counted)" if unruled else "unverified"
        return status, float("inf"), counted or f"float64: {type(failure).__name__}: {str(failure)[:120]}"
    finally:
        torch.set_default_dtype(default)
    if op.name in UNSET:
        return "derived", 0.0, "values are not set"
    pairs = list(zip(recorder.decisions, replay.decisions, strict=False))
    flipped = any(a.shape == b.shape and a.layout == b.layout and not torch.equal(a, b) for a, b in pairs)
    try:
        status, worst, message = judge(op, real, recorder.drew(), flipped, shadow.exact, reference)
        notes["real error"] = max(notes["real error"], own_error(real, reference))
    except TooSlowError:
        raise
    except Exception as failure:  # noqa: BLE001 - the engine cannot give a companion
        return "shadow error", float("inf"), f"exact: {type(failure).__name__}: {str(failure)[:150]}"
    if unruled:
        return "no rule (counted)", worst, counted
    if status == "mismatch" and shadow.escapes():
        return "left the run (counted)", worst, "; ".join(shadow.escapes())
    if status == "mismatch" and _agrees_alone(call, process, fresh, backward, reference):
        status = "decision"  # of a pixel, or a side of a kink, that shows in no integer
    if status == "mismatch":
        message += f" [{recorder.tail()}]"
    return ("rule" if status == "derived" and shadow.ruled() else status), worst, message


def _agrees_alone(call: Any, process: Any, fresh: Callable[[], Any], backward: bool, reference: Run) -> bool:
    """Whether exact is what float64 gives where it follows no decision of the run."""
    alone = Opened(independent=True)
    try:
        with alone.context:
            real = Run(call, process, fresh(), backward)
    except TooSlowError:
        raise
    except Exception:  # noqa: BLE001 - the mismatch is reported
        return False
    wide = dict(reference.tensors())
    floats = [(t, wide.get(name)) for name, t in real.tensors() if is_float(t) and t.layout == torch.strided]
    return all(w is not None and error(alone.exact(t), w) <= 1e-12 for t, w in floats if not t.is_nested)


def row(op: Any, low: torch.dtype, form: str, limit: int, seconds: int) -> dict[str, Any]:
    """The worst of an operator's samples."""
    start, seen, worst = time.time(), Counter[str](), ("not applicable", 0.0, "")
    notes: dict[str, Any] = {"real error": 0.0}
    state: dict[str, Any] = {
        "op": op.name,
        "variant": op.variant_test_name,
        "dtype": str(low)[6:],
        "form": form,
    }

    def note(outcome: tuple[str, float, str]) -> None:
        nonlocal worst
        seen[outcome[0]] += 1
        rank = STATUS.index(outcome[0]) - STATUS.index(worst[0])
        if rank < 0 or (rank == 0 and outcome[1] > worst[1]):
            worst = outcome

    iterator = None
    while True:
        signal.alarm(seconds)
        try:
            if iterator is None:
                gradients = op.supports_autograd and form == "function"
                iterator = list(samples(op, widening(low), gradients, limit))
            if not iterator:
                break
            note(one_sample(op, iterator.pop(0), low, form, notes))
        except TooSlowError:
            note(("timeout", float("inf"), f"{seconds} s"))
            if iterator is None:
                break
        except Exception as failure:  # noqa: BLE001 - one failure must not stop the rest
            note(("error of torch itself", 0.0, f"sample: {type(failure).__name__}: {str(failure)[:150]}"))
            if iterator is None:
                break
        finally:
            signal.alarm(0)
    status, distance, message = worst
    return {
        **state,
        "status": status,
        "error": None if distance == float("inf") else distance,
        "message": message,
        "samples": dict(seen),
        "notes": notes,
        "seconds": round(time.time() - start, 2),
    }


def work(arguments: argparse.Namespace) -> None:
    """A child process: the entries from `first` to `last`, one line of JSON per row."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def late(*_: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, late)
    with Path(arguments.json).open("a") as log:
        for position, op in list(enumerate(entries(arguments.only)))[arguments.first : arguments.last]:
            log.write(json.dumps({"begins": position, "op": op.name, "variant": op.variant_test_name}) + "\n")
            log.flush()
            for dtype in arguments.dtype:
                for form in arguments.form:
                    result = row(op, getattr(torch, dtype), form, arguments.samples, arguments.seconds)
                    log.write(json.dumps(result) + "\n")
                    log.flush()


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per operator: by format the worst status of its forms, its worst error, and what is to say of it."""
    cells: dict[str, dict[str, Any]] = {}
    for entry in sorted(rows, key=lambda entry: STATUS.index(entry["status"]), reverse=True):
        name = f"{entry['op']} {entry['variant']}".strip()
        cell = cells.setdefault(name, {"op": name})
        if entry["status"] != "not applicable":
            before = cell.get(entry["dtype"], "  ").split()
            worst = max(entry["error"] or 0.0, float(before[-1]) if before else 0.0)
            cell[entry["dtype"]] = f"{entry['status']} {worst:.0e}"
            if STATUS.index(entry["status"]) <= STATUS.index("unverified"):
                cell["note"] = entry["message"][:150]
    return [cells[name] for name in sorted(cells)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--form", nargs="*", default=["function", "inplace", "out"])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=15, help="per sample")
    parser.add_argument("--chunk", type=int, default=40)
    parser.add_argument("--first", type=int)
    parser.add_argument("--last", type=int)
    arguments = parser.parse_args()
    arguments.only = [name for name in arguments.only if name]
    if arguments.first is not None:
        work(arguments)
        return
    rows, position, total = [], 0, len(entries(arguments.only))
    while position < total:
        last = min(position + arguments.chunk, total)
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch) / "rows"
            options = [f"--{name}={getattr(arguments, name)}" for name in ("samples", "seconds")]
            for name in ("only", "dtype", "form"):
                options += [f"--{name}", *getattr(arguments, name)] if getattr(arguments, name) else []
            command = [sys.executable, __file__, f"--json={log}", f"--first={position}", f"--last={last}", *options]
            code = subprocess.run(command, check=False).returncode
            lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        begun = [line for line in lines if "begins" in line]
        rows += [line for line in lines if "status" in line]
        if code:
            where = begun[-1] if begun else {"begins": position, "op": "?", "variant": ""}
            dead = {"dtype": "?", "form": "?", "error": None, "message": f"exit {code}", "samples": {}, "seconds": 0}
            rows.append({"op": where["op"], "variant": where["variant"], "status": "crash", **dead})
            last = where["begins"] + 1
        position = last
        evidence = {
            "command": " ".join(["python", "benchmarks/opinfo_shadows.py", *sys.argv[1:]]),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "rows by status": dict(Counter(entry["status"] for entry in rows)),
        }
        lines = ",\n".join(json.dumps(line) for line in table(rows))
        text = json.dumps(evidence, indent=1)[:-2] + f',\n "operators": [\n{lines}\n]\n}}\n'
        Path(arguments.json).write_text(text)
        print(f"{position}/{total}", dict(Counter(entry["status"] for entry in rows)), flush=True)


if __name__ == "__main__":
    main()
