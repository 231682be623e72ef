"""Scripts that were written for a GPU run on a CPU as they stand: healthy ones are silent, mistakes are found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ampcheck import Finding, Verdict
from ampcheck.core.settings import Target
from ampcheck.target import audit_target

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, which is used then")
SCRIPTS = Path(__file__).parent / "cuda_scripts"
CLIPS = "clip_grad_norm_"
RIGHT_LOSS = "nn.functional.cross_entropy(self.net(x), y)"
WRONG_LOSS = "nn.functional.binary_cross_entropy(self.net(x).sigmoid(), nn.functional.one_hot(y, 4).half())"
PROTOCOL, BANNED = "scaler-protocol", "policy-banned"

HEALTHY = [
    ("classify", "cuda"),
    ("nano_gpt", "cuda:a100"),
    ("nano_gpt", "cuda:t4"),
    ("lightning_fit", "cuda"),
    ("accelerated", "cuda"),
    ("gan", "cuda"),
]

MISTAKES = [
    # script, device, the right line and the wrong one, the check, a part of the line where it is found
    ("classify", "cuda", "scaler.unscale_(optimizer)", "pass", PROTOCOL, CLIPS),
    ("nano_gpt", "cuda:t4", "scaler.unscale_(optimizer)", "pass", PROTOCOL, CLIPS),
    ("accelerated", "cuda", "accelerator.clip_grad_norm_(", "nn.utils.clip_grad_norm_(", PROTOCOL, CLIPS),
    ("gan", "cuda", "sd.step(od)", "od.step()", PROTOCOL, "od.step()"),
    ("lightning_fit", "cuda", RIGHT_LOSS, WRONG_LOSS, BANNED, "binary_cross_entropy"),
]


@pytest.fixture(autouse=True)
def _as_alone(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """Modules that scripts import stay imported; scripts themselves do not."""
    monkeypatch.setattr("sys.path", list(sys.path))
    yield
    for name in [
        name for name, module in sys.modules.items() if "cuda_scripts" in str(getattr(module, "__file__", ""))
    ]:
        del sys.modules[name]
    if "accelerate" in sys.modules:  # which remembers the device for the whole process
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def findings(path: Path, device: str, function: str = "main") -> list[Finding]:
    run = audit_target(Target(f"{path}:{function}", device=device, compile=False, steps=4))
    assert run is not None
    return list(run.findings)


def failures(path: Path, device: str) -> list[Finding]:
    return [finding for finding in findings(path, device) if finding.verdict is Verdict.FAIL]


@pytest.mark.parametrize(("script", "device"), HEALTHY)
def test_a_healthy_script_is_silent(script: str, device: str) -> None:
    assert failures(SCRIPTS / f"{script}.py", device) == []


@pytest.mark.parametrize(("script", "device", "right", "wrong", "check", "line"), MISTAKES)
def test_a_mistake_is_found_at_its_line(
    script: str, device: str, right: str, wrong: str, check: str, line: str, tmp_path: Path
) -> None:
    text = (SCRIPTS / f"{script}.py").read_text(encoding="utf-8")
    assert text.count(right) == 1
    path = tmp_path / f"{script}_with_a_mistake.py"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    found = {finding.check: finding for finding in failures(path, device)}
    assert check in found
    assert line in path.read_text(encoding="utf-8").splitlines()[(found[check].where.line or 0) - 1]


@pytest.mark.parametrize("function", ["package", "kernel", "extension", "op", "later"])
def test_what_cannot_be_imitated_is_one_incomplete_finding_at_its_line(function: str) -> None:
    if function == "kernel":
        pytest.importorskip("triton")
    path = SCRIPTS / "cuda_alone.py"
    ends = [f for f in findings(path, "cuda", function) if f.verdict not in (Verdict.PASS, Verdict.SKIP)]
    (finding,) = [f for f in ends if f.check == "coverage" and f.verdict is Verdict.INCOMPLETE and "CUDA" in f.message]
    assert [f for f in ends if f.verdict is Verdict.FAIL] == []
    line = path.read_text(encoding="utf-8").splitlines()[(finding.where.line or 0) - 1]
    assert line.endswith("# it fails here")


def test_a_module_that_imports_what_needs_cuda_is_incomplete_too(tmp_path: Path) -> None:
    path = tmp_path / "imports_flash_attn.py"
    path.write_text("import flash_attn\n\ndef main():\n    pass\n", encoding="utf-8")
    (finding,) = findings(path, "cuda")
    assert (finding.verdict, finding.where.line) == (Verdict.INCOMPLETE, 1)
