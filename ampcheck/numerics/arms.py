"""Running a prepared subject once: equal seeds, forward, loss and backward, everything kept for judging."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.core.errors import as_result
from ampcheck.core.subject import Call
from ampcheck.numerics.equal_random import seeded
from ampcheck.numerics.losses import computed_in
from ampcheck.torchtools.copying import Prepared, forward_through, loss_of
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.pytree import is_plain, map_tensors, tensors
from ampcheck.torchtools.source import hookable

KEPT_BYTES = 2 << 30
"""How much of the modules' outputs one arm keeps; beyond it the rest is counted as unseen."""

UNCOMPARED = "outputs that are sparse, nested, float8 or on meta"
"""Floating outputs whose values are not compared, and of which the default loss makes nothing."""


@dataclass(slots=True)
class Outcome:
    """What one arm gave. Tensors are detached copies; complex ones stand as their real view.

    outputs: by path; modules: by (module path, call, path in its output); gradients: by parameter name, unscaled and in
    float64, whatever `gradient_dtypes` says that they were. totals: what the user's loss gave, one of each call.
    prevented: there are tensors to take gradients of, and the subject's own code keeps backward from them. drew:
    whether numpy's or Python's random numbers were used. left: the switches that forward, loss or backward left
    changed, with their values before and after; they are restored. without_grad: modules that ran while
    gradients were off.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[tuple[str, int, str], torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    losses: list[torch.dtype] = field(default_factory=list)
    totals: list[torch.Tensor] = field(default_factory=list)
    scale: float = 1.0
    error: BaseException | None = None
    phase: str = "forward"
    no_backward: str = ""
    prevented: bool = False
    dropped: int = 0
    unseen: Counter[str] = field(default_factory=Counter)
    drew: bool = False
    left: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    without_grad: set[str] = field(default_factory=set)


KINDS: tuple[tuple[str, Callable[[Outcome], Mapping[Any, torch.Tensor]]], ...] = (
    ("output", lambda outcome: outcome.outputs),
    ("module", lambda outcome: outcome.modules),
    ("gradient", lambda outcome: outcome.gradients),
)
"""What an arm gives: its kind, and the tensors by their keys."""


def name_of(key: object) -> str:
    """The name of a key of `KINDS`: `path[call 1]:path.in.output` of a module output."""
    if isinstance(key, tuple):
        module, call, path = key
        return str(module) + (f"[call {call}]" if call else "") + (f":{path}" if path else "")
    return str(key)


def run_arm(
    prepared: Prepared,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    around: Sequence[AbstractContextManager[Any]] = (),
    transform: Callable[[Any], Any] | None = None,
    scale: float = 1.0,
    keep_modules: bool = True,
    finite_loss: bool = False,
    reached: Callable[[torch.Tensor], None] = lambda tensor: None,
) -> Outcome:
    """Run forward, loss and backward once.

    dtype: what autocast casts to, in forward and loss, never in backward; None switches the caller's autocast off.
    around: entered in order for all of it (a trace). transform: applied to each block before it runs (a compiler).
    scale: of the loss, as a GradScaler scales it; gradients are divided by it again. finite_loss: leave out of the
    default loss what is not finite. reached: called with each output, and each buffer afterwards. An exception of the
    model is kept in `error`.
    """
    outcome = Outcome(scale=scale)
    leaves = _leaves(prepared)
    if not leaves:
        outcome.no_backward = "nothing requires a gradient"
    autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None)
    with seeded(device) as drew, warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # the user's own run shows them once; as errors they would pose as the model's
        if keep_modules and prepared.root is not None:
            stack.enter_context(_kept_outputs(prepared.root, outcome))
        for context in around:
            stack.enter_context(context)
        try:
            blocks = [block if transform is None else transform(block) for block in prepared.blocks]
            for number, call in enumerate(prepared.calls):
                outcome.phase = "forward"
                with torch.enable_grad(), autocast:
                    with preserved_state(outcome.left), _own_gradients(leaves, outcome):
                        result = forward_through(blocks, call)
                    prefix = f"{number}." if len(prepared.calls) > 1 else ""
                    for path, tensor in tensors(result):
                        reached(tensor)
                        if (values := _values(tensor)) is not None:
                            outcome.outputs[prefix + path] = values
                        elif (tensor.is_floating_point() or tensor.is_complex()) and not _is_plain(tensor):
                            outcome.unseen[UNCOMPARED] += 1
                    with preserved_state(outcome.left):
                        total = None if outcome.no_backward else total_loss(result, loss, finite_loss)
                    if total is not None:
                        reached(total)
                    if loss is not None and total is not None and (values := _values(total)) is not None:
                        outcome.totals.append(values)
                of_inputs = any(name.startswith("input.") for name in leaves)
                if loss is not None or not of_inputs or (prepared.root is not None and _is_scalar(result)):
                    outcome.losses += _scalar_losses(result, total if loss else None)
                if outcome.no_backward:
                    continue
                if total is None:
                    outcome.no_backward, outcome.prevented = _without_loss(result)
                    continue
                outcome.phase = "backward"
                # The scale goes in as the first gradient, where a GradScaler's multiplication puts it: no op of ours.
                first = torch.full_like(total, scale)
                with preserved_state(outcome.left):
                    torch.autograd.backward(total, first, inputs=list(leaves.values()))
        except BaseException as error:  # noqa: BLE001  # the user's model: its exception is a result
            outcome.error = as_result(error)
        outcome.drew = drew()
    if outcome.gradients and outcome.prevented:
        outcome.no_backward, outcome.prevented = "", False  # those of a backward that forward runs
    for buffer in prepared.root.buffers() if prepared.root is not None else ():
        reached(buffer)
    for name, leaf in leaves.items():
        if leaf.grad is not None and not outcome.no_backward:
            _keep_gradient(outcome, name, leaf.grad, scale)
        leaf.grad = None
    return outcome


@contextmanager
def _own_gradients(leaves: Mapping[str, torch.Tensor], outcome: Outcome) -> Iterator[None]:
    """Keep the gradients that a forward with a backward of its own leaves: no loss scale is in them."""
    before = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    yield
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            _keep_gradient(outcome, name, leaf.grad, 1.0)
        leaf.grad = before[name]


def _keep_gradient(outcome: Outcome, name: str, grad: torch.Tensor, scale: float) -> None:
    grad = grad.to_dense() if grad.layout is not torch.strided else grad
    outcome.gradient_dtypes[name] = grad.dtype
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    wide = real.detach().to(torch.float64) / scale
    outcome.gradients[name] = outcome.gradients[name] + wide if name in outcome.gradients else wide


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of the floating values, which no trace sees since it is ours; None for what has none."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return None
    if not _is_plain(tensor):
        return None
    with _disable_current_modes():
        copy = tensor.detach().clone()
        return torch.view_as_real(copy.resolve_conj()) if copy.is_complex() else copy


def _outside(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor behind the wrappers of `torch.func.grad` and its kin; None for one of vmap, which ends with it."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return None if torch._C._functorch.is_functorch_wrapped_tensor(tensor) else tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the values can be compared: float8 has no comparisons, and a meta tensor no values."""
    return is_plain(tensor) and tensor.dtype.itemsize > 1


def _leaves(prepared: Prepared) -> dict[str, torch.Tensor]:
    """What gradients are taken of: the parameters; where there are none, the floating inputs."""
    named = dict(prepared.root.named_parameters()) if prepared.root is not None else {}
    leaves: dict[str, torch.Tensor] = {name: p for name, p in named.items() if p.requires_grad}
    if leaves:
        return leaves
    found: dict[str, torch.Tensor] = {}

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        leaf = tensor.requires_grad_()
        found[f"input.{len(found)}"] = leaf
        return leaf.view_as(leaf)  # a leaf cannot be written in place

    prepared.calls = tuple(Call(map_tensors(watch, c.args), map_tensors(watch, dict(c.kwargs))) for c in prepared.calls)
    return found


def total_loss(result: object, loss: Callable[[Any], torch.Tensor] | None, finite: bool) -> torch.Tensor | None:
    """The loss: the user's, or the mean of squares of every floating output, whose ops are ours and not traced.

    An output that is listed several times counts once: to add its gradients in 16 bits would round.
    """
    if loss is not None:
        return loss_of(loss, result)
    total: torch.Tensor | None = None
    counted: set[Any] = set()
    with _disable_current_modes():
        for _, tensor in tensors(result):
            if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
                continue
            if tensor.requires_grad and _is_plain(tensor):
                if (key := _identity(tensor)) in counted:
                    continue
                counted.add(key)
                real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
                wide = real if real.dtype is torch.float64 else real.float()
                wide = torch.where(wide.isfinite(), wide, 0.0) if finite else wide
                part = wide.square().mean()
                total = part if total is None else total + part
    return total


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for a tensor and its views of the same elements, unless an `autograd.Function` made one of them."""
    base = tensor
    node: Any = tensor.grad_fn
    if tensor._base is not None:
        base = tensor._base
        while node is not None and node is not base.grad_fn:
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                base = tensor
                break
            node = node.next_functions[0][0] if node.next_functions else None
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return id(base), tensor.dtype, *place, tensor.is_conj(), tensor.is_neg()


def _without_loss(result: object) -> tuple[str, bool]:
    """Why no loss can be made of an output, and whether that is for want of what the subject could return."""
    found = [tensor for _, tensor in tensors(result)]
    floating = [tensor for tensor in found if tensor.is_floating_point() or tensor.is_complex()]
    if any(tensor.requires_grad and tensor.numel() for tensor in floating):
        return f"the default loss takes no {UNCOMPARED}: give the subject a loss", True
    return "no floating output has a gradient", not found or any(tensor.numel() for tensor in floating)


def _scalar_losses(result: object, given: torch.Tensor | None) -> list[torch.dtype]:
    """In which dtype what can only be a loss was computed: the user's own, or 0-d outputs that carry a gradient."""
    losses = [t for _, t in tensors(result) if t.dim() == 0 and t.is_floating_point() and t.requires_grad]
    if given is not None:
        losses = [given]
    return [next(iter(computed_in(loss)), loss.dtype) for loss in losses]


def _is_scalar(result: object) -> bool:
    """Whether all that a module gives is one 0-d tensor: a loss module has no parameters, and its inputs gradients."""
    return [tensor.dim() for _, tensor in tensors(result)] == [0]


@contextmanager
def _kept_outputs(root: torch.nn.Module, outcome: Outcome) -> Iterator[None]:
    calls: dict[str, int] = {}
    kept = 0

    def hook(name: str) -> Callable[..., None]:
        def keep(module: torch.nn.Module, args: object, output: object) -> None:
            nonlocal kept
            if not torch.is_grad_enabled():
                outcome.without_grad.add(name)
            call = calls.get(name, 0)
            calls[name] = call + 1
            try:
                found = list(tensors(output))
            except Exception:  # noqa: BLE001  # a mapping of the user's that only its own reader understands
                outcome.unseen["module outputs whose items cannot be read"] += 1
                return
            for path, tensor in found:
                if (tensor := _outside(tensor)) is None:
                    outcome.unseen["module outputs inside torch.vmap"] += 1
                    continue
                size = tensor.numel() * tensor.element_size()
                if kept + size > KEPT_BYTES:
                    outcome.dropped += 1
                elif (values := _values(tensor)) is not None:
                    kept += size
                    outcome.modules[name, call, path] = values

        return keep

    with ExitStack() as hooks:
        for name, module in hookable(root):
            hooks.callback(module.register_forward_hook(hook(name)).remove)
        yield
