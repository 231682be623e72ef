"""What forward does besides computing: state that it changes, transforms, functions of its own, compiled parts."""

from __future__ import annotations

import threading
from collections import UserDict
from typing import Any

import torch
from odd_rows import PASSES, Base, Report, add, fails, given, incomplete, module, refused, warns
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint


def _sets(change: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> Any:
        out = self.inner(x)
        change()
        return out

    return forward


def _under(context: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> Any:
        with context():
            return self.inner(x)

    return forward


def _in_a_thread(self: Any, x: torch.Tensor) -> Any:
    done: list[torch.Tensor] = []
    worker = threading.Thread(target=lambda: done.append(self.inner(x)))
    worker.start()
    worker.join()
    return done[0]


def _replaces_inner(self: Any, x: torch.Tensor) -> Any:
    self.inner = nn.Linear(4, 4)
    return self.inner(x)


def _grows(self: Any, x: torch.Tensor) -> Any:
    self.seen = [*getattr(self, "seen", []), x.detach()]
    return self.inner(x)


def _hooked(replace: Any) -> Any:
    odd = Base()
    odd.inner.register_forward_hook(lambda module, args, out: replace(out))
    return odd


def _checkpointed(reentrant: bool) -> Any:
    return module(lambda self, x: checkpoint(self.inner, x, use_reentrant=reentrant))


class _ReturnsNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None


class _TooMany(_ReturnsNone):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad, grad


class _WrongShape(_ReturnsNone):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad[:1, :1]


class _WrongDtype(_ReturnsNone):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.half()


class _Text(_ReturnsNone):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return "text"


def _left(phrase: str) -> Report:
    return fails("autocast-state", phrase=phrase)


def _meta_first(self: Any, x: torch.Tensor) -> Any:
    torch.set_default_device("meta")
    return self.inner(x) * torch.ones(4)


_UNTRAINED = incomplete("nonfinite-gradient", phrase="no gradients to judge")
_RAISING = incomplete("nonfinite-gradient", phrase="backward raises in float32 too")

FORWARDS = {
    "leaves grad mode off": (_sets(lambda: torch.set_grad_enabled(False)), _left("grad mode was True and is False")),
    "leaves the seed set": (_sets(lambda: torch.manual_seed(3)), PASSES),
    "leaves the default dtype at float64": (
        _sets(lambda: torch.set_default_dtype(torch.float64)), _left("default dtype was float32 and is float64")),
    "leaves the default device at meta": (
        _sets(lambda: torch.set_default_device("meta")), _left("default device was cpu and is meta")),
    "begins with the default device at meta": (_meta_first, refused("raises in float32 too, in forward at .*meta")),
    "enters autocast by hand": (
        _sets(lambda: torch.autocast("cpu", torch.bfloat16).__enter__()), _left("autocast")),
    "leaves deterministic mode on": (
        _sets(lambda: torch.use_deterministic_algorithms(True)), _left("deterministic algorithms")),
    "leaves autocast off": (_sets(lambda: torch.set_autocast_enabled("cpu", False)), _left("autocast on cpu")),
    "leaves another number of threads": (_sets(lambda: torch.set_num_threads(1)), PASSES),
    "runs without a gradient": (_under(torch.no_grad), _UNTRAINED),
    "runs in inference mode": (_under(torch.inference_mode), _UNTRAINED),
    "runs in a thread": (_in_a_thread, warns("coverage")),
    "replaces its own module": (_replaces_inner, _UNTRAINED),
    "keeps what it was given": (_grows, PASSES),
    "writes into its input": (lambda self, x: self.inner(x.mul_(2.0)), PASSES),
    "writes into its weight": (lambda self, x: _halved(self) or self.inner(x), PASSES),
    "deletes its module": (lambda self, x: _popped(self)(x), PASSES),
    "calls itself": (lambda self, x: x if x.shape[0] == 1 else self(self.inner(x)[1:]), PASSES),
    "calls backward": (lambda self, x: _inner_backward(self, x), PASSES),
    "returns double": (lambda self, x: self.inner(x).double(), PASSES),
    "moves to meta and back": (lambda self, x: torch.zeros_like(self.inner(x).to("meta"), device="cpu"), _UNTRAINED),
    "asks for a shape": (lambda self, x: self.inner(x)[: int(x.shape[0])], PASSES),
    "prints": (lambda self, x: print(end="") or self.inner(x), PASSES),
    "uses a 0-d weight": (lambda self, x: self.inner(x) * self.inner.weight[0, 0], PASSES),
    "backward of None": (lambda self, x: _ReturnsNone.apply(self.inner(x)), _UNTRAINED),
    "backward of too many": (lambda self, x: _TooMany.apply(self.inner(x)), _RAISING),
    "backward of another shape": (lambda self, x: _WrongShape.apply(self.inner(x)), _RAISING),
    "backward of another dtype": (lambda self, x: _WrongDtype.apply(self.inner(x)), PASSES),
    "backward of a text": (lambda self, x: _Text.apply(self.inner(x)), _RAISING),
    "vmap": (lambda self, x: vmap(self.inner)(x), PASSES),
    "vmap of vmap": (lambda self, x: vmap(vmap(self.inner))(x[None]), PASSES),
    "vmap with randomness": (lambda self, x: vmap(lambda v: self.inner(v) + torch.rand(()), randomness="different")(x),
                             PASSES),
    "jacrev": (lambda self, x: vmap(jacrev(lambda v: self.inner(v).tanh()))(x), PASSES),
    "jacfwd": (lambda self, x: vmap(jacfwd(lambda v: self.inner(v).tanh()))(x), PASSES),
    "hessian": (lambda self, x: vmap(hessian(lambda v: self.inner(v).tanh().sum()))(x), PASSES),
    "grad": (lambda self, x: grad(lambda v: self.inner(v).tanh().sum())(x), PASSES),
    "vjp": (lambda self, x: torch.func.vjp(self.inner, x)[1](x)[0], PASSES),
    "jvp": (lambda self, x: torch.func.jvp(self.inner, (x,), (x,))[1], PASSES),
    "linearize": (lambda self, x: torch.func.linearize(self.inner, x)[1](x), _UNTRAINED),
    "autograd.functional.jacobian": (
        lambda self, x: torch.autograd.functional.jacobian(self.inner, x, create_graph=True), PASSES),
    "functional_call": (lambda self, x: functional_call(self.inner, dict(self.inner.named_parameters()), (x,)), PASSES),
    "vmap that overflows": (lambda self, x: vmap(self.inner)(x + 50) * 3e4, fails("overflow")),
    "torch.cond": (lambda self, x: torch.cond(x.sum() > 0, self.inner, lambda v: self.inner(-v), (x,)), PASSES),
    "a float16 constant": (lambda self, x: self.inner(x) * torch.tensor(2.0, dtype=torch.float16), PASSES),
}  # fmt: skip


def _halved(self: Any) -> None:
    with torch.no_grad():
        self.inner.weight.mul_(0.5)


def _popped(self: Any) -> Any:
    return self._modules.pop("inner")


def _inner_backward(self: Any, x: torch.Tensor) -> Any:
    self.inner(x).float().sum().backward()
    return self.inner(x)


for title, (forward, report) in FORWARDS.items():
    add(f"forward: {title}", report, lambda f=forward: given(module(f)))


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        params, buffers = stack_module_state(list(self.members))
        return vmap(lambda p, b: functional_call(self.members[0], (p, b), (x,)))(params, buffers)


class Hidden(UserDict):
    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)


class Inside(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = Hidden(out=1)
        hidden.kept = super().forward(x)
        return hidden


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Inside(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x).kept


class Scripted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)


def _compiled() -> Any:
    return torch.compile(Base(), backend="eager")


MODELS = {
    "a submodule whose output cannot be read": (lambda: Unread(), PASSES),
    "an ensemble by vmap": (Ensemble, _UNTRAINED),
    "checkpoint, reentrant": (lambda: _checkpointed(True), _UNTRAINED),
    "checkpoint, not reentrant": (lambda: _checkpointed(False), PASSES),
    "a hook that returns None": (lambda: _hooked(lambda out: None), PASSES),
    "a hook that replaces the output": (lambda: _hooked(lambda out: out * 2), PASSES),
    "a hook that returns another dtype": (lambda: _hooked(lambda out: out.double()), PASSES),
    "a hook that returns a tuple": (lambda: _hooked(lambda out: (out,)), PASSES),
    "a hook that returns a text": (
        lambda: _hooked(lambda out: "text"),
        incomplete("precision-loss", "nonfinite-gradient"),
    ),
    "TorchScript, scripted": (lambda: torch.jit.script(nn.Linear(4, 4)), PASSES),
    "TorchScript, traced": (lambda: torch.jit.trace(nn.Linear(4, 4), torch.randn(3, 4)), PASSES),
    "fx GraphModule": (lambda: torch.fx.symbolic_trace(Base()), PASSES),
    "torch.compile with backend eager": (_compiled, PASSES),
    "an exported program": (lambda: torch.export.export(Base(), (torch.randn(3, 4),)).module(), PASSES),
    "a module in evaluation": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), PASSES),
    "dropout of everything": (lambda: nn.Dropout(1.0), warns("coverage")),
    "an empty Sequential": (lambda: nn.Sequential(), warns("coverage")),
    "50 layers": (lambda: nn.Sequential(*(nn.Tanh() for _ in range(50))), warns("coverage")),
    "a bound method": (lambda: Base().forward, PASSES),
    "a function": (lambda: torch.tanh, warns("coverage")),
    "a lambda": (lambda: lambda x: x.softmax(-1), warns("coverage")),
    "a builtin": (lambda: torch._C._nn.gelu, warns("coverage")),
}
for title, (make, report) in MODELS.items():
    add(f"model: {title}", report, lambda m=make: given(m()))
