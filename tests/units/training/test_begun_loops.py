"""An exception that ends a loop which had begun to train is a finding at its line; before that it is a usage error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ampcheck.audit import audit, judge_subject
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject

HERE = Path(__file__)


def parts(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)


def loss_of(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return nn.functional.mse_loss(model(torch.randn(4, 8)).float(), torch.zeros(4, 1))


def scale_forgotten() -> None:
    model, optimizer, scaler = parts()
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()  # not scaled
        scaler.step(optimizer)
        scaler.update()


def steps_before_backward() -> None:
    model, optimizer, scaler = parts()
    loss = scaler.scale(loss_of(model))
    scaler.step(optimizer)  # nothing was looked at
    loss.backward()


def unscales_twice() -> None:
    model, optimizer, scaler = parts()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)  # again
    scaler.step(optimizer)


def updates_twice() -> None:
    model, optimizer, scaler = parts()
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler.update()  # again


def gradients_in_half() -> None:
    model, optimizer, scaler = parts(torch.float16)
    scaler.scale(model(torch.randn(4, 8).half()).float().square().mean()).backward()
    scaler.step(optimizer)  # of float16


def dtypes_differ() -> None:
    model, optimizer, _ = parts()
    head = nn.Linear(1, 1)
    with torch.autocast("cpu", torch.float16):
        hidden = model(torch.randn(4, 8))
    head(hidden).sum().backward()  # Half and Float
    optimizer.step()


def devices_differ() -> None:
    model, optimizer, _ = parts()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(torch.randn(4, 8))
    loss = nn.functional.mse_loss(hidden.float(), torch.zeros(4, 1, device="meta"))  # another device
    loss.backward()
    optimizer.step()


def no_module() -> None:
    weight = torch.zeros(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.randn(4, 8) @ weight
    (out @ torch.randn(4, dtype=torch.float64)).backward()  # BFloat16 and Double
    optimizer.step()


def banned_on_cuda() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()), torch.rand(8, 16)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.binary_cross_entropy(model(x), x)  # banned
        loss.backward()
        optimizer.step()


def logits_loss() -> None:
    model, x = nn.Linear(16, 16), torch.rand(8, 16)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), x)
        with torch.autocast("cpu", enabled=False):
            probabilities = nn.functional.binary_cross_entropy(model(x).sigmoid(), x)
        (loss + probabilities).backward()
        optimizer.step()


def no_data() -> None:
    _, optimizer, _ = parts()
    data: dict[str, torch.Tensor] = {}
    data["train"].sum().backward()
    optimizer.step()


def no_file_after_a_float32_forward() -> None:
    model, _, _ = parts()
    model(torch.randn(4, 8))
    HERE.with_suffix(".nosuch").read_text(encoding="utf-8")


def failures(function: Callable[[], object]) -> list[Finding]:
    run = judge_subject(Subject(function, name="main", trains=True))
    return [finding for finding in run.of(Verdict.FAIL) if not finding.cause]


FOUND = {
    scale_forgotten: ("scaler-protocol", "# not scaled"),
    steps_before_backward: ("scaler-protocol", "# nothing was looked at"),
    unscales_twice: ("scaler-protocol", "# again"),
    updates_twice: ("scaler-protocol", "# again"),
    gradients_in_half: ("scaler-protocol", "# of float16"),
    dtypes_differ: ("coverage", "# Half and Float"),
    devices_differ: ("coverage", "# another device"),
    no_module: ("coverage", "# BFloat16 and Double"),
    banned_on_cuda: ("policy-banned", "# banned"),
}


@pytest.mark.parametrize("function", FOUND, ids=lambda function: function.__name__)
def test_an_exception_in_a_loop_that_has_begun_is_a_finding_at_its_line(function: Callable[[], object]) -> None:
    check, line = FOUND[function]
    (finding,) = failures(function)
    assert finding.check == check
    assert finding.where.line is not None
    assert HERE.read_text(encoding="utf-8").splitlines()[finding.where.line - 1].endswith(line)


def test_a_ban_of_an_emulated_device_names_the_line() -> None:
    run = judge_subject(Subject(banned_on_cuda, name="main", trains=True), device="cuda")
    (finding,) = run.of(Verdict.FAIL)
    assert finding.check == "policy-banned"
    assert HERE.read_text(encoding="utf-8").splitlines()[(finding.where.line or 0) - 1].endswith("# banned")


def test_a_loss_that_cuda_allows_is_silent() -> None:
    assert failures(logits_loss) == []


@pytest.mark.parametrize("function", [no_data, no_file_after_a_float32_forward], ids=lambda f: f.__name__)
def test_an_exception_before_any_training_is_a_usage_error(function: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=r"raised .* at .*test_begun_loops.py:\d+, before any step of an optimizer"):
        failures(function)


class Copied(torch.optim.Optimizer):
    """Writes a rounded weight, and another one over it."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 1e-5})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            wide = parameter.float() - 1e-6 * parameter.grad.float().sign()
            parameter.copy_(wide + torch.rand_like(wide) * wide * 2**-8)
            parameter.copy_(wide)  # overwrites


def test_stagnation_names_the_copy_that_overwrites() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 4).bfloat16()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.1, 0.3)
    optimizer, data = Copied(model.parameters()), torch.randn(8, 16).bfloat16()

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    run = audit({"model": model, "optimizer": optimizer, "step": step}, checks=("stagnation",), steps=4)
    (finding,) = run.of(Verdict.FAIL)
    assert HERE.read_text(encoding="utf-8").splitlines()[(finding.where.line or 0) - 1].endswith("# overwrites")
