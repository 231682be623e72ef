"""Run a prepared subject: equal seeds, then forward, loss, backward and update of each call; every result goes to a
receiver."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import has_torch_function

from ampcheck.autocast.state import short
from ampcheck.core.errors import as_result
from ampcheck.core.subject import Call
from ampcheck.facts.memory import parts_of
from ampcheck.numerics.losses import computed_in
from ampcheck.records.numerics import UNCOMPARED, UNREAD
from ampcheck.records.results import Key
from ampcheck.torchtools.copying import Prepared, forward_through, loss_of, modules_of
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.private import is_transformed_tensor, run_backward, without_modes
from ampcheck.torchtools.pytree import is_plain, map_tensors, results, tensors
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.source import Hook, hookable

NO_GRADIENT = "the loss has no gradient"
Receive: TypeAlias = "Callable[[Key, torch.Tensor], None]"
"""Called with each result once it is there: its kind (`output`, `loss` or `gradient`), name and call, the tensor."""

Blocks: TypeAlias = Sequence[Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How every run of a subject goes.

    autocast: what autocast casts to, in forward and loss, never in backward; None switches the caller's autocast off.
    loss: the user's. scale: of the loss, as a GradScaler scales it; gradients are received with it. finite_loss: leave
    out of the default loss what is not finite. no_backward: why nothing is differentiated. inputs: those whose gradient
    is taken as well, by name; None: all of them, where no parameter requires a gradient. steps: how often all calls are
    made. optimizer: makes one from the parameters, which are updated after each call; rate: of the plain gradient
    descent that replaces it, 0 for no update. grad: the grad mode, on which the code depends that is compiled.
    """

    device: str = "cpu"
    autocast: torch.dtype | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    scale: float = 1.0
    finite_loss: bool = False
    no_backward: str = ""
    inputs: frozenset[str] | None = None
    steps: int = 1
    optimizer: Callable[[list[torch.nn.Parameter]], Any] | None = None
    rate: float = 0.0
    grad: bool = True


@dataclass(slots=True)
class Outcome:
    """What happened in one run.

    modules: dtypes of the floating results of each module. losses: dtypes in which losses were computed. shapes: dtype
    and shape of everything that a call gave, by its path. error, phase, step: an exception of the subject, and where.
    no_backward: why there are no gradients; prevented: there are tensors to take gradients of, and the subject's own
    code keeps backward from them. left: the switches that forward, loss or backward left changed, with their values
    before and after; they are restored. without_grad: modules that ran while gradients were off. gradients: names of
    those that were received.
    """

    modules: dict[str, dict[str, None]] = field(default_factory=dict)
    losses: list[torch.dtype] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    error: BaseException | None = None
    phase: str = "forward"
    step: int = 0
    no_backward: str = ""
    prevented: bool = False
    unseen: Counter[str] = field(default_factory=Counter)
    left: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    without_grad: set[str] = field(default_factory=set)
    gradients: set[str] = field(default_factory=set)


def run_subject(
    prepared: Prepared,
    plan: RunPlan,
    receive: Receive = lambda key, tensor: None,
    *,
    around: Sequence[AbstractContextManager[Any]] = (),
    transform: Callable[[Prepared], Blocks] | None = None,
    masked: Collection[Key] = (),
    module_output: Callable[[str, torch.Tensor], None] | None = None,
) -> Outcome:
    """Run all steps of a plan on a prepared copy, which they change. An exception of the subject is kept.

    around: entered in order for all of it. transform: gives the blocks as they are to run (compiled). masked: outputs
    whose non-finite elements the default loss leaves out; it may grow while results are received. module_output: called
    with floating results of modules.
    """
    leaves = _leaves(prepared, plan)
    outcome = Outcome(no_backward=plan.no_backward or ("" if leaves else "nothing requires a gradient"))
    with seeded(plan.device), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # the user's own run shows them once; as errors they would pose as the model's
        if module_output is not None and prepared.root is not None:
            stack.enter_context(_module_outputs(prepared.root, outcome, module_output))
        for context in around:
            stack.enter_context(context)
        try:
            optimizer = _optimizer(plan, prepared)
            blocks = prepared.blocks if transform is None else transform(prepared)
            for outcome.step, call in enumerate(prepared.calls * plan.steps):
                run_call(plan, outcome, blocks, call, leaves, receive, masked)
                if optimizer is not None:
                    outcome.phase = "update"
                    _step(optimizer, leaves.values(), plan.scale)
                _clear(leaves.values())
        except BaseException as error:  # noqa: BLE001  # the user's model: its exception is a result
            outcome.error = as_result(error)
    if outcome.gradients:
        outcome.no_backward, outcome.prevented = "", False  # of another call, or of a backward that forward runs
    _clear(leaves.values())
    return outcome


def _step(optimizer: torch.optim.Optimizer, leaves: Iterable[torch.Tensor], scale: float) -> None:
    """Step by gradients, without the loss scale."""
    for leaf in leaves:
        if leaf.grad is not None and scale != 1.0:
            leaf.grad.div_(scale)
    optimizer.step()


def _clear(leaves: Iterable[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def run_call(
    plan: RunPlan,
    outcome: Outcome,
    blocks: Blocks,
    call: Call,
    leaves: Mapping[str, torch.Tensor],
    receive: Receive = lambda key, tensor: None,
    masked: Collection[Key] = (),
    preserve: Callable[[dict[str, tuple[Any, Any]]], AbstractContextManager[None]] = preserved_state,
) -> None:
    """Run forward, loss and backward of one call. preserve: restores global state around each of them."""
    outcome.phase, step = "forward", outcome.step
    with (
        torch.set_grad_enabled(plan.grad),
        torch.autocast(torch.device(plan.device).type, plan.autocast, enabled=plan.autocast is not None),
    ):
        with preserve(outcome.left), _own_gradients(leaves, outcome, receive):
            result = forward_through(blocks, call)
        outcome.shapes[f"step {step}"] = type(result).__name__
        keys: list[Key] = []
        for path, tensor in _outputs(result, outcome.unseen):
            keys.append(("output", path, step))
            outcome.shapes[f"step {step}, {path or 'output'}"] = f"{short(tensor.dtype)} {_shape(tensor)}"
            receive(keys[-1], tensor)
        finite = plan.finite_loss or any(key in masked for key in keys)
        with preserve(outcome.left):
            total = None if outcome.no_backward else total_loss(result, plan.loss, finite)
    if total is not None and plan.loss is not None:
        receive(("loss", "", step), total)
    of_inputs = any(name.startswith("input ") for name in leaves)
    if plan.loss is not None or not of_inputs or (_is_scalar(result) and modules_of(tuple(blocks))):
        outcome.losses += _scalar_losses(result, total if plan.loss else None)
    if outcome.no_backward:
        return
    if total is None:
        outcome.no_backward, outcome.prevented = _without_loss(result)
    elif not total.requires_grad:
        outcome.no_backward, outcome.prevented = NO_GRADIENT, True
    if total is None or outcome.no_backward:
        return
    outcome.phase = "backward"
    # The scale goes in as the first gradient, where a GradScaler's multiplication puts it: no op of ours.
    try:
        first = torch.full_like(total, plan.scale)
    except RuntimeError:  # PyTorch 2.6 writes no number beyond the format
        first = torch.full_like(total, plan.scale, dtype=torch.float32).to(total.dtype)
    with preserve(outcome.left):
        _backward(total, first, leaves.values())
    _receive_gradients(leaves, outcome, receive, "")


def _outputs(result: object, unseen: Counter[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory in what a call returned, by their paths. unseen: counts what is not looked into."""
    for path, leaf in results(result):
        if isinstance(leaf, torch.Tensor):
            yield from parts_of(leaf, path)
        elif not isinstance(leaf, (set, frozenset)) or any(isinstance(item, torch.Tensor) for item in leaf):
            unseen[f"{UNREAD} {type(leaf).__name__}"] += 1


def _backward(loss: torch.Tensor, gradient: torch.Tensor, inputs: Iterable[torch.Tensor]) -> None:
    """Call `torch.autograd.backward(loss, gradient, inputs=inputs)`, without its import of SymPy, which takes 0.5 s.

    gradient: shape and dtype of the loss; PyTorch imports SymPy to compare them.
    """
    leaves = tuple(inputs)
    if has_torch_function((loss, *leaves)):  # a subclass of tensors may have a backward pass of its own
        torch.autograd.backward(loss, gradient, inputs=leaves)
        return
    run_backward((loss,), (gradient,), False, False, leaves, allow_unreachable=True, accumulate_grad=True)


def comparable(tensor: torch.Tensor) -> bool:
    """Whether the values can be compared: float8 has no comparisons, and a meta tensor no values."""
    return is_floating(tensor) and tensor.numel() > 0 and is_plain(tensor) and tensor.dtype.itemsize > 1


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


def _receive_gradients(leaves: Mapping[str, torch.Tensor], outcome: Outcome, receive: Receive, suffix: str) -> None:
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            gradient = leaf.grad if leaf.grad.layout is torch.strided else leaf.grad.to_dense()
            receive(("gradient", name + suffix, outcome.step), gradient)
            outcome.gradients.add(name + suffix)


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


def input_names(call: Call, number: int) -> dict[str, torch.Tensor]:
    """The floating inputs of a call by a name that is the same in every copy of it."""
    named = tensors({"args": call.args, "kwargs": dict(call.kwargs)})
    return {f"{number}.{path}": tensor for path, tensor in named if tensor.is_floating_point()}


def _leaves(prepared: Prepared, plan: RunPlan) -> dict[str, torch.Tensor]:
    """What gradients are taken of: parameters, and views of inputs, since a leaf cannot be written in place."""
    named = dict(prepared.root.named_parameters()) if prepared.root is not None else {}
    leaves: dict[str, torch.Tensor] = {name: p for name, p in named.items() if p.requires_grad and not plan.no_backward}
    if plan.no_backward or (plan.inputs is None and leaves):
        return leaves
    calls = []
    for number, call in enumerate(prepared.calls):
        of_call = {name: t for name, t in input_names(call, number).items() if t.layout is torch.strided}
        names = {id(t): f"input {name}" for name, t in of_call.items() if plan.inputs is None or name in plan.inputs}

        def follow(tensor: torch.Tensor, names: Mapping[int, str] = names) -> torch.Tensor:
            if id(tensor) not in names:
                return tensor
            leaf = leaves.setdefault(names[id(tensor)], tensor.requires_grad_())
            return leaf.view_as(leaf)

        calls.append(Call(map_tensors(follow, call.args), map_tensors(follow, dict(call.kwargs))))
    prepared.calls = tuple(calls)
    return leaves


def _optimizer(plan: RunPlan, prepared: Prepared) -> Any:
    named = list(prepared.root.parameters()) if prepared.root is not None else []
    parameters = [p for p in named if p.requires_grad and p.layout is torch.strided and not is_lazy(p)]
    if not parameters or plan.no_backward:
        return None
    if plan.optimizer is not None:
        return plan.optimizer(parameters)
    return torch.optim.SGD(parameters, lr=plan.rate) if plan.rate else None


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
    floating = [tensor for tensor in results if is_floating(tensor)]
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
    def record(name: str, module: torch.nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():
            outcome.without_grad.add(name)
        try:
            results = [tensor for _, tensor in tensors(output)]
        except Exception:  # noqa: BLE001  # a mapping of the user's that only its own reader understands
            outcome.unseen["module outputs whose items cannot be read"] += 1
            return
        for tensor in filter(is_floating, results):
            outcome.modules.setdefault(name, {})[short(tensor.dtype)] = None
            if comparable(tensor) and not is_transformed_tensor(tensor):
                with without_modes():
                    receive(name, tensor.detach())

    with ExitStack() as hooks:
        for name, module in hookable(root):
            hooks.callback(module.register_forward_hook(Hook(partial(record, name))).remove)
        yield


def is_floating(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def _shape(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(list(tensor.shape))
