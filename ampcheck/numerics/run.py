"""Run a prepared subject once: equal seeds, forward, loss and backward; every result goes to a receiver."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.core.errors import as_result
from ampcheck.core.subject import Call
from ampcheck.numerics.losses import computed_in
from ampcheck.torchtools.copying import Prepared, forward_through, loss_of
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.pytree import is_plain, map_tensors, tensors
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.source import hookable

UNCOMPARED = "outputs that are sparse, nested, float8 or on meta"
"""Floating outputs whose values are not compared, and of which the default loss makes nothing."""

Receive: TypeAlias = "Callable[[str, str, torch.Tensor], None]"
"""Called with each result once it is there: its kind (`output`, `loss` or `gradient`), its name, the tensor."""


@dataclass(slots=True)
class Outcome:
    """What happened in one run.

    modules: dtypes of the floating results of each module. losses: dtypes in which losses were computed. scale: of the
    loss; gradients contain it. error, phase: an exception of the subject, and where. no_backward: why there are no
    gradients; prevented: there are tensors to take gradients of, and the subject's own code keeps backward from them.
    left: the switches that forward, loss or backward left changed, with their values before and after; they are
    restored. without_grad: modules that ran while gradients were off. gradients: names of those that were received.
    """

    scale: float = 1.0
    modules: dict[str, dict[str, None]] = field(default_factory=dict)
    losses: list[torch.dtype] = field(default_factory=list)
    error: BaseException | None = None
    phase: str = "forward"
    no_backward: str = ""
    prevented: bool = False
    unseen: Counter[str] = field(default_factory=Counter)
    left: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    without_grad: set[str] = field(default_factory=set)
    gradients: list[str] = field(default_factory=list)


def run_subject(
    prepared: Prepared,
    receive: Receive = lambda kind, name, tensor: None,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    around: Sequence[AbstractContextManager[Any]] = (),
    transform: Callable[[Any], Any] | None = None,
    scale: float = 1.0,
    masked: Collection[str] = (),
    module_output: Callable[[str, torch.Tensor], None] | None = None,
) -> Outcome:
    """Run forward, loss and backward once.

    dtype: what autocast casts to, in forward and loss, never in backward; None switches the caller's autocast off.
    around: entered in order for all of it. transform: applied to each block before it runs (a compiler). scale: of the
    loss, as a GradScaler scales it; gradients keep it. masked: outputs whose non-finite elements the default loss
    leaves out; it may grow while results are received. module_output: called with floating results of modules.
    """
    outcome = Outcome(scale)
    leaves = _leaves(prepared)
    if not leaves:
        outcome.no_backward = "nothing requires a gradient"
    autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None)
    with seeded(device), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # the user's own run shows them once; as errors they would pose as the model's
        if module_output is not None and prepared.root is not None:
            stack.enter_context(_module_outputs(prepared.root, outcome, module_output))
        for context in around:
            stack.enter_context(context)
        try:
            blocks = [block if transform is None else transform(block) for block in prepared.blocks]
            for number, call in enumerate(prepared.calls):
                outcome.phase = "forward"
                with torch.enable_grad(), autocast:
                    with preserved_state(outcome.left), _own_gradients(leaves, outcome, receive):
                        result = forward_through(blocks, call)
                    prefix = f"{number}." if len(prepared.calls) > 1 else ""
                    outputs = [(prefix + path, tensor) for path, tensor in tensors(result)]
                    _receive_outputs(outputs, outcome, receive)
                    finite = any(name in masked for name, _ in outputs)
                    with preserved_state(outcome.left):
                        total = None if outcome.no_backward else total_loss(result, loss, finite)
                if total is not None and loss is not None and comparable(total):
                    receive("loss", prefix.rstrip("."), total)
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
        if outcome.gradients and outcome.prevented:
            outcome.no_backward, outcome.prevented = "", False  # those of a backward that forward runs
        if not outcome.no_backward:
            _receive_gradients(leaves, outcome, receive, "")
    for leaf in leaves.values():
        leaf.grad = None
    return outcome


def comparable(tensor: torch.Tensor) -> bool:
    """Whether the values can be compared: float8 has no comparisons, and a meta tensor no values."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    return floating and tensor.numel() > 0 and is_plain(tensor) and tensor.dtype.itemsize > 1


def total_loss(result: object, loss: Callable[[Any], torch.Tensor] | None, finite: bool) -> torch.Tensor | None:
    """The loss: the user's, or the mean of squares of every floating output.

    An output that is listed several times counts once: to add its gradients in 16 bits would round. finite: leave out
    of the default loss what is not finite.
    """
    if loss is not None:
        return loss_of(loss, result)
    total: torch.Tensor | None = None
    counted: set[Any] = set()
    for _, tensor in tensors(result):
        if not comparable(tensor) or not tensor.requires_grad or (key := _identity(tensor)) in counted:
            continue
        counted.add(key)
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        wide = real if real.dtype is torch.float64 else real.float()
        wide = torch.where(wide.isfinite(), wide, 0.0) if finite else wide
        part = wide.square().mean()
        total = part if total is None else total + part
    return total


def _receive_outputs(outputs: list[tuple[str, torch.Tensor]], outcome: Outcome, receive: Receive) -> None:
    for name, tensor in outputs:
        if comparable(tensor):
            receive("output", name, tensor)
        elif (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            outcome.unseen[UNCOMPARED] += 1


def _receive_gradients(leaves: Mapping[str, torch.Tensor], outcome: Outcome, receive: Receive, suffix: str) -> None:
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            gradient = leaf.grad if leaf.grad.layout is torch.strided else leaf.grad.to_dense()
            receive("gradient", name + suffix, gradient)
            outcome.gradients.append(name + suffix)


@contextmanager
def _own_gradients(leaves: Mapping[str, torch.Tensor], outcome: Outcome, receive: Receive) -> Iterator[None]:
    """Receive the gradients that a forward with a backward of its own leaves: no loss scale is in them."""
    before = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    yield
    _receive_gradients(leaves, outcome, receive, " of forward's own backward")
    for name, leaf in leaves.items():
        leaf.grad = before[name]


def _leaves(prepared: Prepared) -> dict[str, torch.Tensor]:
    """What gradients are taken of: the parameters; where there are none, the floating inputs."""
    named = dict(prepared.root.named_parameters()) if prepared.root is not None else {}
    parameters: dict[str, torch.Tensor] = {name: p for name, p in named.items() if p.requires_grad}
    if parameters:
        return parameters
    inputs: dict[str, torch.Tensor] = {}

    def follow(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        leaf = tensor.requires_grad_()
        inputs[f"input.{len(inputs)}"] = leaf
        return leaf.view_as(leaf)  # a leaf cannot be written in place

    prepared.calls = tuple(
        Call(map_tensors(follow, c.args), map_tensors(follow, dict(c.kwargs))) for c in prepared.calls
    )
    return inputs


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
    results = [tensor for _, tensor in tensors(result)]
    floating = [tensor for tensor in results if tensor.is_floating_point() or tensor.is_complex()]
    if any(tensor.requires_grad and tensor.numel() for tensor in floating):
        return f"the default loss takes no {UNCOMPARED}: give the subject a loss", True
    return "no floating output has a gradient", not results or any(tensor.numel() for tensor in floating)


def _scalar_losses(result: object, total: torch.Tensor | None) -> list[torch.dtype]:
    """In which dtype what can only be a loss was computed: the user's own, or 0-d outputs that carry a gradient."""
    losses = [t for _, t in tensors(result) if t.dim() == 0 and t.is_floating_point() and t.requires_grad]
    if total is not None:
        losses = [total]
    return [next(iter(computed_in(loss)), loss.dtype) for loss in losses]


def _is_scalar(result: object) -> bool:
    """Whether all that a module gives is one 0-d tensor: a loss module has no parameters, and its inputs gradients."""
    return [tensor.dim() for _, tensor in tensors(result)] == [0]


@contextmanager
def _module_outputs(
    root: torch.nn.Module, outcome: Outcome, receive: Callable[[str, torch.Tensor], None]
) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def record(module: torch.nn.Module, args: object, output: object) -> None:
            if not torch.is_grad_enabled():
                outcome.without_grad.add(name)
            try:
                results = [tensor for _, tensor in tensors(output)]
            except Exception:  # noqa: BLE001  # a mapping of the user's that only its own reader understands
                outcome.unseen["module outputs whose items cannot be read"] += 1
                return
            for tensor in filter(_is_floating, results):
                outcome.modules.setdefault(name, {})[str(tensor.dtype).removeprefix("torch.")] = None
                if comparable(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                    with _disable_current_modes():
                        receive(name, tensor.detach())

        return record

    with ExitStack() as hooks:
        for name, module in hookable(root):
            hooks.callback(module.register_forward_hook(hook(name)).remove)
        yield


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
