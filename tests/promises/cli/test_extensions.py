"""What an installed package adds: the worked example of docs/examples/plugin, and packages that are broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "plugin"

MODEL = """
import torch
from torch import nn
import acme_kernels


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), SCALE))

    def forward(self, x):
        return acme_kernels.scale_rows(self.linear(x), self.scale)


torch.manual_seed(0)
subject = (Scaled(), (torch.ones(2, 4),))
"""

LOOP = """
import torch
from torch import nn
from collections.abc import Iterator

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(number):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


subject = {"model": model, "optimizer": optimizer, "step": step}
"""

PAGE = '"""Requires: R.\n\nMeasured: M.\n\nCauses: C.\n\nFix: F.\n"""\n'

COUNTS = f"""{PAGE}
from ampcheck.core.check import Check
from ampcheck.core.subject import Kind

CHECK = Check("acme-counts", "acme", __doc__, subjects=(Kind.TRAINING,), needs=("ProtocolStats",))


def check(stats, limits):
    yield CHECK.passed(stats.subject, f"{{stats.steps}} steps", len(stats.events))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "plugin")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-t",
        str(folder),
        str(source),
    ]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)
    return folder


def written(folder: Path, group: str, name: str, text: str) -> Path:
    """A folder with a package of one module, as if installed."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    metadata = folder / f"{name}-2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}\n", encoding="utf-8")
    return folder


def ampcheck(installed: Path | None, *arguments: str, folder: Path | None = None) -> tuple[int, str]:
    path = os.pathsep.join(map(str, [ROOT, *([installed] if installed else [])]))
    command = [sys.executable, "-m", "ampcheck", *arguments]
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def audited(installed: Path, folder: Path, text: str, *options: str) -> dict[str, Any]:
    """The run of an audit of a file that has a subject."""
    (folder / "model.py").write_text(text, encoding="utf-8")
    arguments = ("audit", "model.py:subject", "--no-compile", "--json", "run.json", *options)
    code, output = ampcheck(installed, *arguments, folder=folder)
    assert code in (0, 1), output
    run: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return run


def audit(installed: Path, folder: Path, text: str, *options: str) -> list[dict[str, str]]:
    """Its findings."""
    findings: list[dict[str, str]] = audited(installed, folder, text, *options)["findings"]
    return findings


def of(findings: list[dict[str, str]], check: str) -> list[dict[str, str]]:
    return [finding for finding in findings if finding["check"] == check]


def test_an_audit_judges_by_the_check_of_an_installed_package(installed: Path, tmp_path: Path) -> None:
    (finding,) = of(
        audit(installed, tmp_path, MODEL.replace("SCALE", "6000.0"), "--dtype", "float16"), "acme-float8-range"
    )
    assert finding["verdict"] == "warn"
    assert "activations must fit into float8_e4m3fn; a float16 result reaches" in finding["message"]
    (finding,) = of(
        audit(installed, tmp_path, MODEL.replace("SCALE", "1.0"), "--dtype", "float16"), "acme-float8-range"
    )
    assert finding["verdict"] == "pass"


def test_the_rule_of_an_installed_package_follows_its_op_in_float64(installed: Path, tmp_path: Path) -> None:
    """The kernel takes no float64: without the rule it is followed from its results on."""
    plain = MODEL.replace("SCALE", "1.0")
    assert "acme::scale_rows" not in str(audited(installed, tmp_path, plain, "--select", "overflow")["coverage"])
    without = tmp_path / "without"
    shutil.copytree(installed / "acme_kernels", without / "acme_kernels")
    assert "acme::scale_rows" in str(audited(without, tmp_path, plain, "--select", "overflow")["coverage"])


def test_a_check_of_another_package_can_be_selected_alone(installed: Path, tmp_path: Path) -> None:
    findings = audit(installed, tmp_path, MODEL.replace("SCALE", "1.0"), "--select", "acme-*")
    assert {finding["check"] for finding in findings} == {"acme-float8-range", "coverage"}
    assert all(finding["verdict"] == "pass" for finding in findings)


def test_a_check_of_loops_gets_their_records(tmp_path: Path) -> None:
    folder = written(tmp_path, "ampcheck.checks", "acme_counts", COUNTS)
    (finding,) = of(audit(folder, tmp_path, LOOP, "--steps", "3", "--select", "acme-counts"), "acme-counts")
    assert (finding["verdict"], finding["message"]) == ("pass", "3 steps")


def test_explain_and_doctor_name_what_packages_add(installed: Path) -> None:
    code, listing = ampcheck(installed, "explain")
    assert code == 0
    (line,) = (line for line in listing.splitlines() if line.startswith("acme-float8-range"))
    assert line.endswith("(added by acme-kernels 1.0)")
    _, page = ampcheck(installed, "explain", "acme-float8-range")
    assert "the largest number of float8_e4m3fn" in page
    assert page.rstrip().endswith("(added by acme-kernels 1.0)")


def test_doctor_lists_both_entry_points(installed: Path) -> None:
    _, report = ampcheck(installed, "doctor", "--quick")
    assert "yes  entry point 'acme-float8-range' of ampcheck.checks (acme-kernels 1.0): loaded" in report
    assert "yes  entry point 'acme' of ampcheck.ops (acme-kernels 1.0): loaded" in report


BROKEN = {
    "raises when it is imported": ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    "has no function": (COUNTS.partition("def check")[0], "has no attribute 'check'"),
    "needs no record": (COUNTS.replace('"ProtocolStats",', ""), "acme-counts must name the records that it needs"),
    "needs a record that there is not": (
        COUNTS.replace('"ProtocolStats",', '"ProtocolStat",'),
        "acme-counts needs ProtocolStat, which is no record of ampcheck: did you mean ProtocolStats?",
    ),
    "takes a name of ours": (COUNTS.replace("acme-counts", "overflow"), "overflow is one of ampcheck's own checks"),
    "has no page": (COUNTS.replace("Fix:", "Cure:"), "the docstring needs paragraphs that begin with Fix:"),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_is_reported_and_left_out(text: str, reason: str, tmp_path: Path) -> None:
    folder = written(tmp_path, "ampcheck.checks", "acme_counts", text)
    code, listing = ampcheck(folder, "explain")
    assert code == 0
    assert "entry point 'acme_counts' of ampcheck.checks (acme_counts 2.0) is left out" in listing
    assert reason in listing
    assert "\noverflow " in listing


def test_an_audit_warns_of_a_broken_package_and_of_a_check_that_raises(tmp_path: Path) -> None:
    raising = COUNTS.replace("yield CHECK", "1 / 0; yield CHECK")
    folder = written(
        written(tmp_path, "ampcheck.checks", "acme_counts", raising), "ampcheck.checks", "gone", "import no"
    )
    findings = audit(folder, tmp_path, LOOP, "--steps", "2")
    (finding,) = of(findings, "acme-counts")
    assert finding["verdict"] == "incomplete"
    assert "its function in acme_counts 2.0 raised ZeroDivisionError" in finding["message"]
    warned = [finding["message"] for finding in of(findings, "coverage") if finding["verdict"] == "warn"]
    assert [message for message in warned if "entry point 'gone'" in message and "No module named 'no'" in message]
    assert of(findings, "stagnation")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("TRAITS = 'acme::x | quick'", "TRAITS names 'quick', which is no trait"),
        ("TRAITS = 'add | pointwise'", "'add' must be an op of your own"),
        ("RULES = {'acme::x': 3}", "the rule of acme::x must be a function"),
        ("", "it must have TRAITS, RULES or both"),
    ],
)
def test_traits_that_cannot_be_used_are_named(text: str, reason: str, tmp_path: Path) -> None:
    folder = written(tmp_path, "ampcheck.ops", "acme_ops", text)
    program = "from ampcheck.ops.added import added_ops, added_traits; print(added_ops()[0].error, added_traits())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert reason in done.stdout
    assert done.stdout.endswith(" {}\n")
