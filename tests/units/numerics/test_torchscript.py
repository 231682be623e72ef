"""TorchScript modules are judged in every dtype as the Python modules that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcheck import assert_compiled
from ampcheck.audit import audit
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.torchtools.copying import prepare

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")
BAD = (Verdict.FAIL, Verdict.WARN)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).softmax(-1)


class Refuses(Network):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if y.dtype == torch.bfloat16:
            raise ValueError("it takes no bfloat16")
        return self.down(y)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, torch.randn(4, 8)),
    "scripted inside": lambda module: Around(torch.jit.script(module)),
}


def bad(model: nn.Module, compile: bool = False) -> list[Finding]:
    run = audit((model, (torch.randn(4, 8),)), compile=compile)
    return [f for f in run.findings if f.verdict in BAD]


@pytest.mark.parametrize("way", ["scripted", "traced", "scripted inside"])
def test_torchscript_passes_in_both_dtypes_as_its_python_twin(way: str) -> None:
    torch.manual_seed(0)
    assert bad(Network()) == []
    model = WAYS[way](Network())
    assert bad(model) == []
    assert bad(model) == [], "the user's own module is left as it was"


def test_what_scripted_code_raises_is_told_by_its_last_line() -> None:
    (found,) = bad(torch.jit.script(Refuses()))
    assert found.check == "low-precision-error"
    assert "it takes no bfloat16" in found.message


def test_torchscript_is_not_compiled_and_the_finding_says_so() -> None:
    run = audit((torch.jit.script(Network()), (torch.randn(4, 8),)), compile=True)
    assert not run.failed
    assert any("torch.compile takes no TorchScript" in f.message for f in run.findings if f.verdict is Verdict.SKIP)


def products(x: Tensor) -> Tensor:
    return torch.mm(x, x.t())


SCRIPTS: dict[str, Callable[[], Any]] = {
    "scripted": lambda: torch.jit.script(Network()),
    "traced": lambda: torch.jit.trace(Network(), torch.randn(4, 8)),
    "frozen": lambda: torch.jit.freeze(torch.jit.script(Network().eval())),
    "a scripted function": lambda: torch.jit.script(products),
    "a traced function": lambda: torch.jit.trace(products, torch.randn(4, 8)),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_torchscript_that_is_to_be_compiled_is_skipped_with_the_reason(kind: str) -> None:
    model, inputs = SCRIPTS[kind](), (torch.randn(4, 8),)
    runs = {
        "assert_compiled": assert_compiled(model, inputs),
        "calls": audit((model, [inputs])),
        "blocks": audit(([model], [inputs])),
    }
    for name, run in runs.items():
        assert {f.verdict for f in run.findings} == {Verdict.SKIP}, (name, run)
        assert any("torch.compile takes no TorchScript" in f.message for f in run.findings), (name, run)


@pytest.mark.parametrize("kind", ["frozen", "a scripted function", "a traced function"])
def test_torchscript_without_parameters_is_judged_in_eager_mode(kind: str) -> None:
    run = audit((SCRIPTS[kind](), (torch.randn(4, 8),)), dtype="float16")
    assert not [f for f in run.findings if f.verdict in (*BAD, Verdict.INCOMPLETE)], run
    assert run.coverage.seen["16-bit ops"]


def _twice(inner: nn.Module) -> nn.Module:
    script = torch.jit.script(inner)
    return nn.ModuleDict({"a": script, "b": script})


def _inside_and_outside(inner: nn.Module) -> nn.Module:
    script = torch.jit.script(nn.Sequential(inner, nn.ReLU()))
    return nn.ModuleDict({"a": script._modules["0"], "b": script})


def _weight_of_a_module(inner: nn.Linear) -> nn.Module:
    outside = nn.Linear(4, 4)
    outside.weight = inner.weight
    return nn.ModuleDict({"a": outside, "b": torch.jit.script(inner), "c": nn.ReLU()})


def _two_scripts_of_one_weight(inner: nn.Linear) -> nn.Module:
    other = nn.Linear(4, 4)
    other.weight = inner.weight
    return nn.ModuleDict({"a": torch.jit.script(inner), "b": torch.jit.script(nn.Sequential(other))})


def _in_a_list(inner: nn.Module) -> nn.Module:
    model = nn.ModuleDict({"a": torch.jit.script(inner)})
    model.also = [model["a"]]
    return model


def _statistics(inner: nn.Module) -> nn.Module:
    norm, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other.running_mean = norm.running_mean
    return nn.ModuleDict({"a": norm, "b": torch.jit.script(other)})


@pytest.mark.parametrize(
    "build", [_twice, _inside_and_outside, _weight_of_a_module, _two_scripts_of_one_weight, _in_a_list, _statistics]
)
def test_what_is_shared_with_torchscript_stays_shared_in_a_copy(build: Callable[[nn.Linear], nn.Module]) -> None:
    def structure(model: nn.Module) -> list[list[bool]]:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        modules = [module for _, module in model.named_modules(remove_duplicate=False)]
        modules += getattr(model, "also", [])
        return [[one is other for other in modules] for one in modules] + [
            [one.data_ptr() == other.data_ptr() for _, other in named] for _, one in named
        ]

    model = build(nn.Linear(4, 4))
    (copied,) = prepare(Subject((model, (torch.randn(2, 4),)))).blocks
    assert structure(copied) == structure(model)
    assert [n for n, _ in copied.named_parameters()] == [n for n, _ in model.named_parameters()]
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not own & {t.data_ptr() for t in (*copied.parameters(), *copied.buffers())}


def test_torchscript_shared_by_two_blocks_stays_shared() -> None:
    script = torch.jit.script(nn.Linear(4, 4))
    first, second = prepare(Subject(([nn.Sequential(script), script], [(torch.randn(2, 4),)]))).blocks
    assert first[0] is second
