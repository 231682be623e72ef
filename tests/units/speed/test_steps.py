"""One step of a subject in a mode and precision: what runs, under what, and that the user's model stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Subject
from ampcheck.speed import steps
from ampcheck.speed.steps import PRECISIONS, StepConfig, learns, repeated, step_of
from ampcheck.torchtools.copying import prepare

LOW = {name: dtype for name, dtype in PRECISIONS.items() if dtype is not None}
SEEN: list[Any] = []
"""What the models below note while they run; a step runs a copy of them."""


@pytest.fixture(autouse=True)
def seen() -> list[Any]:
    SEEN.clear()
    return SEEN


class Noting(nn.Module):
    """Notes the dtype of its product and whether gradients are on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        SEEN.append((found.dtype, torch.is_grad_enabled()))
        return found


class Stack(nn.Module):
    """Three blocks of a class, and a list of two smaller ones of another."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        self.blocks = nn.Sequential(*(Noting() for _ in range(3)), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks(self.small[1](self.small[0](x)))
        return found


def subject(model: nn.Module | None = None, **more: Any) -> Subject:
    return Subject((model or Noting(), (torch.ones(2, 4),)), **more)


def assert_seen(*expected: Any) -> None:
    assert list(expected) == SEEN


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch.compile is given; it compiles nothing."""
    given: list[dict[str, Any]] = []

    def compile(part: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        given.append(options)
        return part

    monkeypatch.setattr(torch, "compile", compile)
    return given


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("mode", ["eager", "default"])
def test_autocast_casts_to_the_precision_asked_for_in_each_mode(
    mode: str, precision: str, compilations: list[Any]
) -> None:
    step_of(subject(), StepConfig(mode, precision))()

    assert_seen((LOW[precision], True))


def test_float32_runs_the_model_as_it_is() -> None:
    step_of(subject(), StepConfig())()

    assert_seen((torch.float32, True))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_mode_and_the_treatment_of_shapes_are_what_torch_compile_is_given(mode: str, compilations: list[Any]) -> None:
    step_of(subject(), StepConfig(mode, dynamic=True))()

    assert compilations == [{"mode": mode, "dynamic": True}]


def test_each_block_of_a_regional_subject_is_compiled(compilations: list[Any]) -> None:
    step_of(Subject(([Noting(), Noting()], [torch.ones(2, 4)])), StepConfig("default"))()

    assert len(compilations) == 2
    assert len(SEEN) == 2


def test_regional_compilation_compiles_the_largest_family_of_blocks_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compiled.append(module))
    model = Stack()
    step_of(subject(model), StepConfig("default", regional=True))()

    assert [type(module) for module in compiled] == [Noting] * 3
    assert not {id(module) for module in compiled} & {id(module) for module in model.modules()}
    assert [type(module) for module in repeated(model)] == [Noting] * 3
    assert repeated(Noting()) == []


def test_a_model_in_training_goes_backward_and_one_in_evaluation_does_not() -> None:
    model = Noting()
    assert learns(prepare(subject(model)))
    step_of(subject(model.eval()))()
    assert not learns(prepare(subject(model)))
    step_of(subject(model), backward=True)()
    step_of(subject(model.requires_grad_(False)))()

    assert [grad for _, grad in SEEN] == [False, True, False]


def test_the_users_model_is_left_as_it_is_by_steps_that_update_a_copy() -> None:
    model = Noting()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copies: list[nn.Parameter] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        copies.extend(parameters)
        return torch.optim.SGD(parameters, lr=0.5)

    step = step_of(subject(model), StepConfig(), optimizer=optimizer)
    step()
    step()

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in (*model.parameters(), *copies))
    assert not torch.equal(copies[0], before["linear.weight"])


@pytest.mark.parametrize("scaler", [False, True])
def test_a_scaler_scales_the_loss_and_takes_the_scale_out_of_the_update(scaler: bool) -> None:
    model, given = Noting(), list[nn.Parameter]()
    losses: list[Tensor] = []

    def loss(output: Tensor) -> Tensor:
        total = output.square().mean()
        total.register_hook(losses.append)
        return total

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        given.extend(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    step_of(subject(model, loss=loss), StepConfig(), optimizer=optimizer, scaler=scaler)()
    plain = model(torch.ones(2, 4)).square().mean()
    plain.backward()

    assert [float(grad) for grad in losses] == [65536.0 if scaler else 1.0]
    assert model.linear.weight.grad is not None
    assert torch.allclose(given[0], model.linear.weight - 0.1 * model.linear.weight.grad)


def test_a_training_loop_is_stepped_with_its_numbers_and_a_callable_is_called() -> None:
    step = step_of(Subject({"step": SEEN.append}))
    step()
    step()
    step_of(Subject(lambda: SEEN.append("called")))()

    assert_seen(0, 1, "called")


def test_a_subject_as_it_is_keeps_the_settings_that_the_user_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = steps.tf32
    monkeypatch.setattr(steps, "tf32", lambda precision, kind: asked.append(precision) or real(precision, kind))

    step_of(subject())()
    assert asked == []
    step_of(subject(), StepConfig())()
    assert asked == ["float32"]


def test_tf32_is_on_inside_and_as_it_was_before_behind_it() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    with steps.tf32("tf32", "cuda")():
        assert matmul.allow_tf32
    with steps.tf32("float32", "cuda")():
        assert not matmul.allow_tf32
    with steps.tf32("bfloat16", "cuda")():
        assert matmul.allow_tf32 is before

    assert matmul.allow_tf32 is before


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        pytest.param(lambda: StepConfig("fast"), "found 'fast'", id="mode"),
        pytest.param(lambda: StepConfig(precision="float8"), "found 'float8'", id="precision"),
        pytest.param(lambda: step_of(subject(), StepConfig(precision="tf32")), "tensor cores", id="tf32"),
        pytest.param(lambda: step_of(subject(), StepConfig(), scaler=True), "for an optimizer", id="scaler"),
        pytest.param(
            lambda: step_of(subject(), optimizer=torch.optim.SGD, backward=False), "no gradients", id="optimizer"
        ),
        pytest.param(
            lambda: step_of(subject(nn.ReLU()), backward=True), "nothing in subject requires a gradient", id="frozen"
        ),
        pytest.param(
            lambda: step_of(subject(), StepConfig("default", regional=True)), "two or more blocks", id="regions"
        ),
        pytest.param(
            lambda: step_of(Subject({"step": SEEN.append}), StepConfig("default")), "runs by itself", id="loop"
        ),
        pytest.param(
            lambda: step_of(Subject({"step": SEEN.append}), optimizer=torch.optim.SGD), "its own optimizer", id="own"
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ask()


def test_a_backward_pass_from_nothing_is_refused_and_not_left_out() -> None:
    class Detached(Noting):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    step = step_of(subject(Detached()))
    with pytest.raises(UsageError, match="no output of subject has a gradient"):
        step()


def test_a_configuration_as_text() -> None:
    assert str(StepConfig()) == "eager, float32"
    text = str(StepConfig("default", "bfloat16", regional=True, dynamic=False))
    assert text == "default, bfloat16, regional, dynamic=False"
