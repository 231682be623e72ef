"""An op without a backward is no failure of a model that runs forward; what compiled code computes wrongly still is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ampcheck import Run, Verdict, audit


@torch.library.custom_op("ampcheck_tests::swiglu", mutates_args=())
def swiglu(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return (torch.nn.functional.silu(a.float()) * b.float()).to(x.dtype)


@torch.library.custom_op("ampcheck_tests::rms", mutates_args=())
def rms(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:])


@swiglu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@rms.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)  # of another dtype than the kernel gives


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    return swiglu(x)  # a custom op itself cannot be copied


def _rms(x: torch.Tensor) -> torch.Tensor:
    return rms(x)


class Layer(torch.nn.Module):
    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor], *, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.op = torch.nn.Linear(16, 32, dtype=torch.bfloat16), op
        self.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(self.up(x)).float() + 1


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
CALLS = pytest.mark.parametrize("calls", [(X,), [(X,), (X + 1,)]], ids=["one call", "several calls"])


def _failed(run: Run) -> set[str]:
    return {finding.check for finding in run.findings if finding.verdict is Verdict.FAIL}


@CALLS
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trainable"])
def test_a_model_with_an_op_without_a_backward_passes_where_compiled_code_gives_what_eager_mode_gives(
    calls: object, frozen: bool
) -> None:
    assert not _failed(audit((Layer(_swiglu, frozen=frozen), calls)))


def test_a_function_with_an_op_without_a_backward_passes_too() -> None:
    assert not _failed(audit((lambda x: _swiglu(x).float() * 2, [(X,), (X + 1,)])))


@CALLS
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trainable"])
def test_what_compiled_code_computes_wrongly_without_gradients_still_fails(calls: object, frozen: bool) -> None:
    run = audit((Layer(_rms, frozen=frozen), calls))
    refused = [f for f in run.findings if "expected dtype torch.bfloat16 but got torch.float32" in f.message]  # by 2.14
    assert refused or _failed(run) & {"compiled-error", "precision-loss", "overflow"}


def test_every_call_is_judged_although_the_backward_of_the_first_raises() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        return _swiglu(x).half() * 300

    run = audit((half, [(X,), (X * 100,)]), compile=False)
    assert "overflow" in _failed(run)
