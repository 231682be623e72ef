"""Confirm defects in `reports/found/` over seeds and autocast lists, and record what ampcheck says of each.

    python benchmarks/found_confirm.py FOLDER...     # folders of reports/found; writes finding.json in each

For repros that define `inputs(seed)`, `f(*inputs)`, `PACKAGE`, `DTYPE` and `AUTOCAST`. Each runs for five seeds under
the autocast list of the CPU and that of CUDA (emulated), or in its own dtype, and is compared with float64 on the same
inputs; beside it stand what rounding the inputs to DTYPE changes in float64, and what float32 gives.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampcheck import audit, emulate

FOUND = Path(__file__).resolve().parent.parent / "reports" / "found"
SEEDS = range(5)


class Call(nn.Module):
    """The function of a repro as a module, so that its forward and backward are audited."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def error(got: Tensor, exact: Tensor) -> float | str:
    """Norm of the difference over the norm of `exact`, or `nonfinite`."""
    if not torch.isfinite(exact).all():
        return "float64 is not finite"
    if not torch.isfinite(got).all():
        return "nonfinite"
    return float((got.double() - exact).norm() / exact.norm())


def to(args: Sequence[Tensor], *dtypes: torch.dtype) -> list[Tensor]:
    """The floating inputs, cast to each of `dtypes` in turn."""
    for dtype in dtypes:
        args = [arg.to(dtype) if arg.is_floating_point() else arg for arg in args]
    return list(args)


def entered(device: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Autocast of `device` to `dtype`, emulated for CUDA; nothing for `none`."""
    if device == "none":
        return nullcontext()
    return torch.autocast("cpu", dtype=dtype) if device == "cpu" else emulate(device, dtype)


def over_seeds(repro: dict[str, Any], device: str) -> dict[str, list[float | str]]:
    """Errors of each seed: of the run, of rounding the inputs alone, and of float32."""
    function, dtype = repro["f"], repro["DTYPE"]
    rows: dict[str, list[float | str]] = {"error": [], "rounding_of_inputs_alone": [], "float32": []}
    for seed in SEEDS:
        try:
            with entered(device, dtype):
                args = repro["inputs"](seed)
                got = function(*args)
        except RuntimeError as raised:  # an op that the CPU lacks in 16 bits
            rows["error"].append(f"{raised}"[:100])
            continue
        exact = function(*to(args, torch.float64))
        rows["error"].append(error(got.detach(), exact.detach()))
        rounded = function(*to(args, dtype, torch.float64))
        rows["rounding_of_inputs_alone"].append(error(rounded.detach(), exact.detach()))
        rows["float32"].append(error(function(*to(args, torch.float32)).detach(), exact.detach()))
    return rows


def findings(repro: dict[str, Any], device: str, name: str) -> list[dict[str, Any]]:
    """What ampcheck reports as failed, warned or undecided."""
    dtype, autocast = repro["DTYPE"], repro["AUTOCAST"]
    try:
        with entered(device if autocast else "none", dtype):
            args = tuple(arg.detach() for arg in repro["inputs"](0))
        run = audit(
            (Call(repro["f"]), args),
            autocast=True if autocast else None,
            dtype=dtype if autocast else None,
            device="cpu" if device == "none" else device,
            compile=False,
            name=name,
        )
    except RuntimeError as raised:
        return [{"check": "", "verdict": "raised", "message": f"{raised}"[:300]}]
    kept = [found for found in run.to_json()["findings"] if found["verdict"] not in ("pass", "skip")]
    return [{key: value for key, value in found.items() if value not in ("", [], {}, None)} for found in kept]


def executed(script: Path) -> tuple[int, str]:
    """Exit code and output of a repro, run in this process."""
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0), printed.getvalue()
    return 0, printed.getvalue()


def confirm(folder: Path) -> dict[str, Any]:
    """Run, judge, and write `finding.json`."""
    repro = runpy.run_path(str(folder / "repro.py"), run_name="repro")
    devices = ("cpu", "cuda") if repro["AUTOCAST"] else ("none",)
    code, printed = executed(folder / "repro.py")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    outcome = {
        "command": f"python benchmarks/found_confirm.py {folder.name}",
        "ampcheck": commit.stdout.strip(),
        "torch": torch.__version__,
        "package": f"{repro['PACKAGE']} {version(repro['PACKAGE'])}",
        "repro_exit": code,
        "repro_prints": printed.strip().splitlines(),
        "seeds": {device: over_seeds(repro, device) for device in devices},
        "findings": {device: findings(repro, device, folder.name) for device in devices},
    }
    text = json.dumps(outcome, indent=1)
    text = re.sub(r"/[^\s\"']*?site-packages/", "", text).replace(f"{FOUND.parent.parent}/", "")
    (folder / "finding.json").write_text(text + "\n", encoding="utf-8")
    return outcome


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        outcome = confirm(FOUND / Path(name).name)
        print(Path(name).name, "exit", outcome["repro_exit"], *outcome["repro_prints"][-1:], flush=True)
        for device, rows in outcome["seeds"].items():
            shown = [each if isinstance(each, str) else f"{each:.2g}" for each in rows["error"]]
            found = [f"{each['check']} {each['verdict']}" for each in outcome["findings"][device]]
            print(f"  {device}: errors {', '.join(shown)}; ampcheck: {', '.join(found) or 'nothing'}", flush=True)


if __name__ == "__main__":
    main()
