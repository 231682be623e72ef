"""The defects of public libraries in `reports/found/`: what ampcheck says of each repro, the table, what was mended.

A folder holds `repro.py` (exit code 1 while the library is broken, 0 once it is mended), `report.md` (a title, then
lines `package:`, `version:`, `way:`, `dtype:`, `severity:`, of which version and dtype may be part of others) and
`finding.json`, which `write_record` writes: what ampcheck says of the run of the repro as it stands. A repro may define
`inputs(seed)`, `f(*inputs)`, DTYPE and AUTOCAST; then ampcheck judges `f` and its gradients, and the record has the
errors against float64 for five seeds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampcheck import audit, emulate
from ampcheck.core.run import Verdict

FOUND = Path(__file__).resolve().parent.parent / "reports" / "found"
WAYS = ("autocast", "bfloat16", "half", "documented")
"""Ways by rank: autocast with default arguments, bfloat16 weights, pure half, and what the library documents."""
SECONDS = 240


def folders(names: list[str] | None = None) -> list[Path]:
    """The folders of all defects, or of those whose names start with one of `names`."""
    every = sorted(path.parent for path in FOUND.glob("*/repro.py"))
    return [path for path in every if not names or path.name.startswith(tuple(Path(name).name for name in names))]


def about(folder: Path) -> dict[str, str]:
    """What the head of `report.md` says: title, package with its version, way with its dtype, severity."""
    text = (
        (folder / "report.md").read_text(encoding="utf-8") if (folder / "report.md").is_file() else f"# {folder.name}"
    )
    keys = "package|version|way|dtype|severity|functions"
    head = re.findall(rf"^[-*| ]*({keys})[*| ]*:[*| ]*(.+?)[| ]*$", text, re.MULTILINE | re.IGNORECASE)
    known = {"package": folder.name.partition("-")[0], "way": "?", "severity": "?", "functions": ""}
    known |= {key.lower(): value for key, value in reversed(head)}
    for key, more in (("package", "version"), ("way", "dtype")):
        known[key] += f" {known[more]}" if known.get(more, "") not in known[key] else ""
    return {"title": text.lstrip("# ").partition("\n")[0].strip(), **known}


def rank(way: str) -> int:
    """The place of a way in WAYS; a description may say more, such as `autocast float16, defaults`."""
    return next((place for place, name in enumerate(WAYS) if re.search(name, way, re.IGNORECASE)), len(WAYS))


EMULATED = """
import runpy, sys
from ampcheck import emulate
with emulate(sys.argv[1]):
    runpy.run_path(sys.argv[2], run_name="__main__")
"""


def check(folder: Path, device: str = "cpu", place: Path | None = None) -> tuple[str, str]:
    """Run a repro on the installed release: `broken`, `mended`, `absent` or `error`, and its last line.

    device: whose policy of autocast, emulated where it is not the CPU. place: a folder with other releases.
    """
    script = str(folder / "repro.py")
    command = [sys.executable, "-W", "ignore", *([script] if device == "cpu" else ["-c", EMULATED, device, script])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if place:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(place), env.get("PYTHONPATH"))))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env, check=False)
    except subprocess.TimeoutExpired:
        return "error", f"no end after {SECONDS} s"
    last = (done.stderr if "Traceback" in done.stderr else done.stdout).strip().rpartition("\n")[2]
    if "Traceback" in done.stderr or done.returncode not in (0, 1):
        return ("absent" if last.startswith(("ModuleNotFoundError", "ImportError")) else "error"), last
    return ("broken" if done.returncode else "mended"), last


class Call(nn.Module):
    """The function of a repro as a module, so that its forward and backward are audited."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def record(folder: Path, device: str = "cpu") -> dict[str, Any]:
    """What ampcheck says of a repro, with autocast's policy of `device`, emulated where it is not the CPU."""
    script = folder / "repro.py"
    sys.argv = [str(script)]
    outcome: dict[str, Any] = {"device": device, "exit": None}  # None where it raises

    def repro() -> None:
        printed, outcome["exit"] = StringIO(), 0
        try:
            with redirect_stdout(printed):
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            outcome["exit"] = int(end.code or 0)
        outcome["printed"] = printed.getvalue().strip().splitlines()[-6:]

    if by_seed(folder):
        with emulate(device) if device != "cpu" else nullcontext():
            repro()
        given = runpy.run_path(str(script), run_name="repro")
        outcome["seeds"] = over_seeds(given, device)
        run = audit_function(given, device, folder.name)
    else:
        run = audit(repro, device=device, name=folder.name)
    said = (Verdict.FAIL.value, Verdict.WARN.value)
    outcome["findings"] = [f for f in run.to_json()["findings"] if f["verdict"] in said and not compares(f)]
    return outcome


def by_seed(folder: Path) -> bool:
    """Whether a repro defines `inputs(seed)`."""
    return "\ndef inputs(seed" in (folder / "repro.py").read_text(encoding="utf-8")


def entered(given: dict[str, Any], device: str) -> AbstractContextManager[Any]:
    """The autocast in which the function of a repro runs, if any."""
    if not given["AUTOCAST"]:
        return nullcontext()
    dtype = given["DTYPE"]
    return torch.autocast("cpu", dtype=dtype) if device == "cpu" else emulate(device, dtype)


def audit_function(given: dict[str, Any], device: str, name: str) -> Any:
    """The run of the audit of the function of a repro, forward and backward."""
    with entered(given, device):
        args = tuple(arg.detach() for arg in given["inputs"](0))
    settings: dict[str, Any] = {"autocast": True, "dtype": given["DTYPE"]} if given["AUTOCAST"] else {}
    return audit((Call(given["f"]), args), device=device, compile=False, name=name, **settings)


def over_seeds(given: dict[str, Any], device: str) -> dict[str, list[float | str]]:
    """Errors of each seed: of the run, of float64 on inputs that were rounded to the low dtype, and of float32."""
    function, dtype = given["f"], given["DTYPE"]
    rows: dict[str, list[float | str]] = {"error": [], "rounding_of_inputs_alone": [], "float32": []}
    for seed in range(5):
        try:
            with entered(given, device):
                args = given["inputs"](seed)
                result = function(*args)
        except RuntimeError as raised:  # an op that the CPU lacks in 16 bits
            rows["error"].append(f"{raised}"[:100])
            continue
        exact = function(*cast(args, torch.float64)).detach()
        rows["error"].append(relative_error(result, exact))
        rounded = function(*cast(args, dtype, torch.float64))
        rows["rounding_of_inputs_alone"].append(relative_error(rounded, exact))
        rows["float32"].append(relative_error(function(*cast(args, torch.float32)), exact))
    return rows


def relative_error(result: Tensor, exact: Tensor) -> float | str:
    """Norm of the difference over the norm of `exact`, or `nonfinite`."""
    if not exact.isfinite().all():
        return "float64 is not finite"
    if not result.isfinite().all():
        return "nonfinite"
    return float((result.detach().double() - exact).norm() / exact.norm())


def cast(args: Sequence[Tensor], *dtypes: torch.dtype) -> list[Tensor]:
    """The floating inputs, cast to each of `dtypes` in turn."""
    for dtype in dtypes:
        args = [arg.to(dtype) if arg.is_floating_point() else arg for arg in args]
    return list(args)


def packages_in(folder: Path) -> dict[str, str]:
    """The versions of the installed packages that a repro imports."""
    from importlib.metadata import packages_distributions

    text = (folder / "repro.py").read_text(encoding="utf-8")
    modules = sorted(set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)))
    known = packages_distributions()
    names = sorted({name for module in modules for name in known.get(module, ())[:1]})
    return {name: version(name) for name in names}


def compares(finding: dict[str, Any]) -> bool:
    """Whether a finding is of the repro's own comparison with float64, which takes the difference of equals."""
    return str(finding["where"]["file"]).endswith("repro.py") and "in float64:" in finding["message"]


def _recorded(folder: Path, device: str, send: Any) -> None:
    warnings.simplefilter("ignore")
    try:
        send.send(record(folder, device))
    except BaseException as error:  # noqa: BLE001  # a record says what ended it
        send.send({"device": device, "error": f"{type(error).__name__}: {error}"[:500]})


def write_record(folder: Path) -> str:
    """Write `finding.json` of a folder, under the CPU's policy of autocast and the emulated one of CUDA.

    Returns a line about it.
    """
    runs: list[dict[str, Any]] = []
    plain = by_seed(folder) and not runpy.run_path(str(folder / "repro.py"), run_name="repro")["AUTOCAST"]
    for device in ("cpu",) if plain else ("cpu", "cuda"):  # without autocast no policy matters
        receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_recorded, args=(folder, device, send))
        process.start()
        known = receive.poll(2 * SECONDS)
        runs.append(receive.recv() if known else {"device": device, "error": f"no end after {2 * SECONDS} s"})
        process.kill()
    data = {
        "command": f"python benchmarks/hunt.py --record {folder.name}",
        "packages": packages_in(folder),
        "runs": runs,
    }
    text = json.dumps(data, indent=1)
    for place in {str(Path(p)) for p in sys.path if p.endswith("site-packages")} | {str(FOUND.parent.parent)}:
        text = text.replace(f"{place}/", "")
    text = re.sub(r"/[\w./+-]*?/site-packages/", "", text)
    (folder / "finding.json").write_text(text + "\n", encoding="utf-8")
    said = []
    for run in runs:
        checks = sorted({f["check"] for f in run.get("findings", ())})
        said.append(
            f"{run['device']}: " + run.get("error", f"exit {run.get('exit')}, {', '.join(checks) or 'nothing'}")
        )
    return "; ".join(said)


def _checks(folder: Path) -> str:
    if not (folder / "finding.json").is_file():
        return ""
    data = json.loads((folder / "finding.json").read_text(encoding="utf-8"))
    findings = [finding for run in data["runs"] for finding in run.get("findings", ())]
    return ", ".join(sorted({finding["check"] for finding in findings if finding["verdict"] == "fail"}))


def table() -> Iterator[str]:
    """The lines of `reports/found/README.md`."""
    rows = [(rank(known["way"]), folder, known) for folder in folders() for known in [about(folder)]]
    counted = [row for row in rows if row[0] < WAYS.index("documented")]
    packages = {known["package"].split()[0] for _, _, known in counted}
    yield "# Defects found in public libraries"
    yield ""
    yield "`python benchmarks/hunt.py --table`"
    yield ""
    count = Counter(place for place, _, _ in counted)
    by_way = ", ".join(f"{count[place]} {WAYS[place]}" for place in sorted(count))
    yield f"{len(counted)} defects in {len(packages)} packages: {by_way}. `repro.py` of each folder exits 1 while its"
    yield "library is broken (`python benchmarks/hunt.py --check`), `report.md` says why and gives the cure, and"
    yield "`finding.json` is what ampcheck says of the run. `check:` of a report names the check that found it, or"
    yield "`missed`; `lists:` the devices whose autocast lists show it, that of CUDA emulated."
    yield ""
    yield "To run one: `pip install torch==2.13.0 PACKAGE`, then `python reports/found/FOLDER/repro.py`."
    for title, part in (("", counted), ("Documented limitations", [row for row in rows if row not in counted])):
        if part:
            yield from ("", *([f"## {title}", ""] if title else []))
            yield "| package | way | severity | what | ampcheck says |"
            yield "|---|---|---|---|---|"
        for _, folder, known in sorted(part, key=lambda row: (row[2]["package"].lower(), row[0], row[1].name)):
            title_cell = known["title"].replace("|", "\\|")
            cells = (
                known["package"],
                known["way"],
                known["severity"],
                f"[{title_cell}]({folder.name}/report.md)",
                _checks(folder),
            )
            yield "| " + " | ".join(cells) + " |"


def distributions() -> list[str]:
    """The names of the packages on PyPI that the repros need, without torch."""
    names = {about(folder)["package"].split()[0] for folder in folders()}
    return sorted(names - {"torch", "pytorch"})


def check_all(names: list[str]) -> int:
    """Run every repro, print its state, and return the number of those that could not tell."""
    states: Counter[str] = Counter()
    for folder in folders(names):
        state, last = check(folder)
        states[state] += 1
        package = about(folder)["package"].split()[0]
        try:
            release = version(package)
        except PackageNotFoundError:
            release = "?"
        print(f"{state:<8}{folder.name} ({package} {release}): {last[:160]}", flush=True)
    print(", ".join(f"{count} {state}" for state, count in states.most_common()) or "no repro")
    return states["error"]
