"""Code that asks for CUDA on a machine without it is judged under CUDA's policy, whether or not `--device` says so."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.codecache

from ampcheck import Subject, assert_dtypes, audit, watch
from ampcheck.core.run import Finding, Run, Verdict, collect
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
    "scaler of the module": {"before": "scaler_of_old = torch.amp.GradScaler()", "scaler": "scaler_of_old"},
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
    return [pytest.param(part, id=name) for name, part in parts.items()]


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


class Catches(torch.nn.Module):
    """As scripts place a tensor where there may be no GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x.cuda().exp()
        except:  # noqa: E722
            return x.exp()


def test_a_model_that_catches_the_request_emits_the_last_run_alone() -> None:
    with collect() as runs:
        last = assert_dtypes(Catches(), (torch.ones(2),), {"": "float32"})
    assert runs == [last]


def test_standard_output_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert audit(_stream, compile=False).environment["autocast policy"] == "cuda, emulated"


@pytest.mark.parametrize("asks", [True, False])
def test_a_run_that_fails_is_emitted_once(asks: bool) -> None:
    model = Catches() if asks else torch.nn.Linear(2, 2)
    with collect() as runs, pytest.raises(AssertionError):
        assert_dtypes(model, (torch.ones(2),), {"": "float16"})
    assert len(runs) == 1


def test_what_both_judgements_print_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    def ask() -> None:
        print("a banner")
        print("loading", end=" ")
        print("on", "CUDA" if torch.cuda.is_available() else "the CPU")
        print("done", Halves()(torch.randn(2, 8)).shape[0])

    audit(ask, compile=False)
    assert capsys.readouterr().out == "a banner\nloading on the CPU\nloading on CUDA\ndone 2\n"


def test_an_audit_that_does_not_ask_prints_as_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    audit(lambda: print(torch.ones(2).half().sum().item()), compile=False)
    assert capsys.readouterr().out == "2.0\n"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a build without torch.distributed")
def test_a_process_group_is_made_once(tmp_path: Path) -> None:
    def ask() -> None:
        made = torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
        torch.distributed.all_reduce(torch.ones(2))
        Halves()(torch.randn(2, 8))
        assert made is None
        torch.distributed.destroy_process_group()

    run = audit(ask, compile=False)
    assert run.environment["autocast policy"] == "cuda, emulated"
    assert not run.of(Verdict.FAIL)
    assert not torch.distributed.is_initialized()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no CUDA, or that torch.cuda.amp is deprecated
    WANTS_AMP = False
    REGION = torch.autocast("cuda", enabled=WANTS_AMP)

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def half(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @torch.cuda.amp.autocast()
    def half_as_of_old(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @torch.autocast("cuda", enabled=False)
    def wide(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @torch.cuda.amp.autocast(False)
    def wide_as_of_old(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @torch.autocast("cuda", enabled=WANTS_AMP)
    def wide_by_a_variable(x: torch.Tensor) -> torch.Tensor:
        return x @ x


def in_a_region(x: torch.Tensor) -> torch.Tensor:
    with REGION:
        return x @ x


def region_findings(function: Callable[[torch.Tensor], torch.Tensor]) -> list[Finding]:
    weight = torch.randn(4, 4, requires_grad=True)
    run = audit(lambda: function(weight).sum().backward(), compile=False, checks=["autocast-scope"])
    assert "autocast policy" not in run.environment
    return [finding for finding in run.findings if finding.check == "autocast-scope"]


@pytest.mark.parametrize("function", [half, half_as_of_old])
def test_a_decorator_that_was_switched_off_before_is_incomplete(function: Callable[..., torch.Tensor]) -> None:
    (finding,) = region_findings(function)
    assert finding.verdict is Verdict.INCOMPLETE
    assert "torch.autocast('cuda') cast nothing, since this machine has no cuda" in finding.message
    assert "ampcheck.emulate('cuda')" in finding.hint


@pytest.mark.parametrize("function", [wide, wide_as_of_old, wide_by_a_variable, in_a_region])
def test_a_region_of_before_that_may_be_meant_to_be_off_is_none(function: Callable[..., torch.Tensor]) -> None:
    (finding,) = region_findings(function)
    assert finding.verdict is Verdict.PASS


def test_a_region_of_before_that_a_file_makes_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import torch\nregion = torch.autocast('cuda', torch.bfloat16)\nother = torch.autocast('cpu', enabled=False)"
    (tmp_path / "made_before.py").write_text(f"{text}\ndef run(x):\n    with region:\n        return x @ x\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        module = importlib.import_module("made_before")
    (finding,) = region_findings(module.run)
    assert finding.verdict is Verdict.INCOMPLETE


def test_a_watch_says_that_a_scaler_of_before_is_disabled() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = torch.amp.GradScaler("cuda")
    with collect() as runs, watch():
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    (run,) = runs
    (finding,) = run.of(Verdict.WARN)
    assert "scaler is disabled" in finding.message
