"""Code that asks for CUDA on a machine without it is judged under CUDA's policy, whether or not `--device` says so."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.codecache

from ampcheck import Subject, audit
from ampcheck.core.run import Run, Verdict
from ampcheck.core.settings import Target
from ampcheck.report.sections import headline
from ampcheck.target import audit_target

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="code gets the CUDA that it asks for")

LOOP = """
import torch
import torch._inductor.codecache
from torch import nn
{before}

def main():
    torch.manual_seed(0)
    model = nn.Linear(16, 4){placed}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = {scaler}
    for _ in range(4):
        x = torch.randn(8, 16){placed}
        with {region}:
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
ASKS = {
    "placement": {"placed": ".cuda()"},
    "scaler": {"scaler": "torch.amp.GradScaler()"},
    "region": {"region": "torch.autocast('cuda', torch.float16)", "scaler": "torch.amp.GradScaler('cpu')"},
    "set_device": {"before": "torch.cuda.set_device(0)", "scaler": "torch.amp.GradScaler('cpu')"},
    "decorator": {
        "before": "half = torch.autocast('cuda', torch.float16)\nforward = half(nn.Linear.forward)",
        "scaler": "torch.amp.GradScaler('cpu')",
    },
}
ASKS_NOT = {
    "cpu": {},
    "disabled": {"scaler": "torch.amp.GradScaler('cuda', enabled=False)"},
    "branches": {"before": "device = 'cuda' if torch.cuda.is_available() else 'cpu'", "placed": ".to(device)"},
    "disabled region": {"before": "off = torch.autocast('cuda', enabled=False)"},
}


def judged(tmp_path: Path, parts: dict[str, str]) -> Run:
    defaults = {
        "before": "",
        "placed": "",
        "scaler": "torch.amp.GradScaler('cpu')",
        "region": "torch.autocast('cpu', torch.float16)",
    }
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(**{**defaults, **parts}), encoding="utf-8")
    run = audit_target(Target(f"{path}:main", compile=False, steps=3))
    assert run is not None
    return run


def cases(parts: dict[str, dict[str, str]]) -> list[Any]:
    """The first two always, the others where slow ones run."""
    names = list(parts)
    return [pytest.param(parts[n], id=n, marks=[pytest.mark.slow] * (names.index(n) > 1)) for n in names]


@pytest.mark.parametrize("parts", cases(ASKS))
def test_a_script_that_asks_for_cuda_is_judged_by_its_policy(parts: dict[str, str], tmp_path: Path) -> None:
    run = judged(tmp_path, parts)
    assert headline(run).endswith("CUDA's policy, emulated on this CPU")
    failed = {finding.check: finding for finding in run.of(Verdict.FAIL)}
    line = (tmp_path / "train.py").read_text(encoding="utf-8").splitlines()[failed["scaler-protocol"].where.line - 1]
    assert "clip_grad_norm_" in line


@pytest.mark.parametrize("parts", cases(ASKS_NOT))
def test_a_script_that_does_not_ask_runs_on_the_cpu(parts: dict[str, str], tmp_path: Path) -> None:
    assert "policy, emulated" not in headline(judged(tmp_path, parts))


def test_a_module_that_asks_while_it_is_imported_is_imported_again(tmp_path: Path) -> None:
    (tmp_path / "sibling_that_counts.py").write_text("count = 0\n", encoding="utf-8")
    path = tmp_path / "asks.py"
    text = "import sys\nsys.path.insert(0, {!r})\nimport sibling_that_counts as s\ns.count += 1\nseen = s.count\n"
    text += "import torch\nweight = torch.ones(2, device='cuda')\ndef main():\n    assert seen == 1\n    "
    text += "torch.optim.SGD([weight.requires_grad_()], lr=0.1).step(lambda: weight.sum().backward())\n"
    path.write_text(text.format(str(tmp_path)), encoding="utf-8")
    before = list(sys.path)
    try:
        run = audit_target(Target(f"{path}:main", compile=False))
    finally:
        sys.path[:] = before
        sys.modules.pop("sibling_that_counts", None)
    assert run is not None
    assert not run.of(Verdict.FAIL)


class Halves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return self.linear(x).float()


def test_audit_asks_too_and_a_device_that_was_named_is_kept() -> None:
    subject = Halves(), (torch.randn(2, 8),)
    asked = audit(subject, compile=False, dtype="float16")
    assert asked.environment["autocast policy"] == "cuda, emulated"
    assert "autocast policy" not in audit(subject, compile=False, dtype="float16", device="cpu").environment


class Banned(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy(x.sigmoid(), y)


def test_an_audit_on_the_cpu_says_what_cuda_judges_otherwise() -> None:
    run = audit((Banned(), (torch.randn(8, requires_grad=True), torch.rand(8))), compile=False, device="cpu")
    (finding,) = [finding for finding in run.findings if finding.check == "policy-gap"]
    assert finding.verdict is Verdict.SKIP
    assert finding.message.startswith("CUDA judges otherwise: its autocast bans aten::binary_cross_entropy")
    assert "--device cuda" in finding.message


def test_nothing_is_said_of_cuda_where_it_judges_the_same() -> None:
    run = audit((torch.nn.Linear(4, 4), (torch.randn(2, 4),)), compile=False, device="cpu")
    assert "policy-gap" not in {finding.check for finding in run.findings}


class Classifies(torch.nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(super().forward(x), y)


def test_an_audit_that_judges_by_cudas_policy_does_not_advise_to_do_so() -> None:
    model = Classifies(8, 4), (torch.randn(2, 8), torch.tensor([0, 3]))
    run = audit(model, compile=False, device="cuda", dtype="float16")
    (finding,) = [finding for finding in run.findings if finding.check == "policy-gap"]
    assert finding.verdict is Verdict.PASS
    assert finding.message.startswith("judged under cuda's policy; of 4 ops aten::log_softmax.int computed in float16")


class DisabledIsland(torch.nn.Module):
    """As rotary embeddings and norms have it: float32 by a region that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16, False), torch.autocast("cuda", enabled=False):
            return self.linear(x)


def test_a_region_that_is_off_does_not_ask() -> None:
    run = audit((DisabledIsland(), (torch.randn(2, 8),)), compile=False)
    assert "autocast policy" not in run.environment


def _stream() -> None:
    torch.cuda.Stream()
    Halves()(torch.randn(2, 8))


def _device() -> None:
    with torch.cuda.device(0):
        Halves()(torch.randn(2, 8))


def _caught() -> None:
    x = torch.randn(2, 8)
    try:
        x = x.cuda()
    except:  # noqa: E722  # as scripts have it
        print("no GPU")
    torch.nn.Linear(8, 8)(x.cpu())


def _in_a_thread() -> None:
    thread = threading.Thread(target=lambda: Halves()(torch.randn(2, 8)))
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("ask", [_stream, _device, _caught, _in_a_thread])
def test_every_way_of_asking_is_heard(ask: Callable[[], None]) -> None:
    assert audit(ask, compile=False).environment["autocast policy"] == "cuda, emulated"


def test_the_device_of_a_tensor_on_the_cpu_does_not_ask() -> None:
    def look() -> None:
        with torch.cuda.device_of(torch.ones(2)):
            torch.ones(2).half().sum().item()

    assert "autocast policy" not in audit(look, compile=False).environment


def test_modules_of_python_are_not_imported_again() -> None:
    def ask() -> None:
        importlib.import_module("mailbox")
        Halves()(torch.randn(2, 8))

    sys.modules.pop("mailbox", None)
    audit(ask, compile=False)
    kept = sys.modules["mailbox"]
    assert importlib.import_module("mailbox") is kept


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_the_objects_of_a_loop_stay_where_they_were_made() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")  # off: there is no CUDA

    def step(i: int) -> float:
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    loop = {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}
    for subject in (loop, Subject(loop)):
        run = audit(subject, compile=False, steps=3, checks=["scaler-protocol", "loss-scale"])
        assert "autocast policy" not in run.environment
        assert not run.of(Verdict.FAIL)


def test_a_program_sets_the_precision_of_its_process_for_itself() -> None:
    def main() -> None:
        torch.set_float32_matmul_precision("high")
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

    assert not [
        finding
        for finding in audit(main, compile=False, steps=8).findings
        if finding.check == "autocast-state" and finding.verdict is Verdict.FAIL
    ]


def test_a_compiler_that_looks_for_devices_does_not_ask() -> None:
    torch._inductor.codecache.CacheBase.get_system.cache_clear()
    run = audit((torch.nn.Linear(4, 4), (torch.randn(2, 4),)), dtype="bfloat16")
    assert "autocast policy" not in run.environment
