"""Run a prepared subject: equal seeds, then forward, loss, backward and update of each call; every result goes to a
receiver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import has_torch_function

from ampcheck.autocast.state import short
from ampcheck.core.environment import quiet
from ampcheck.core.errors import as_result
from ampcheck.core.subject import Call
from ampcheck.facts.memory import parts_of
from ampcheck.numerics.losses import (
    comparable,
    is_floating,
    is_scalar,
    scalar_losses,
    scaled,
    signs,
    total_loss,
    without_loss,
)
from ampcheck.numerics.record import Execution, keeping_changes, noting_streams
from ampcheck.records.numerics import UNREAD
from ampcheck.records.results import Key
from ampcheck.shadow import Shadow
from ampcheck.torchtools.copying import Prepared, forward_through, modules_of
from ampcheck.torchtools.global_state import preserved_state
from ampcheck.torchtools.private import is_transformed_tensor, run_backward, without_modes
from ampcheck.torchtools.pytree import is_plain, map_tensors, results, tensors
from ampcheck.torchtools.seeds import seeded
from ampcheck.torchtools.source import Hook, hookable

NO_GRADIENT = "the loss has no gradient"
OWN_BACKWARD = " of forward's own backward"
"""End of the names of gradients that a forward with a backward of its own leaves."""

Receive: TypeAlias = "Callable[[Key, torch.Tensor], None]"
"""Called with each result once it is there: its kind (`output`, `loss` or `gradient`), name and call, the tensor."""

Blocks: TypeAlias = Sequence[Callable[..., Any]]
Preserve: TypeAlias = "Callable[[dict[str, tuple[Any, Any]]], AbstractContextManager[None]]"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Settings of every run of a subject.

    autocast: what autocast casts to, in forward and loss, never in backward; None switches the caller's autocast off.
    loss: the user's. scale: of the loss, as a GradScaler scales it; gradients are received with it. finite_loss: leave
    out of the default loss what is not finite. no_backward: why nothing is differentiated. inputs: those whose gradient
    is taken as well, by name; None: all of them, where no parameter requires a gradient. steps: how often all calls are
    made. optimizer: makes one from the parameters, which are updated after each call; rate: of the plain gradient
    descent that replaces it, 0 for no update. grad: the grad mode, on which the code depends that is compiled. signs:
    differentiate, in place of a loss, the sum of all outputs with random signs, which no norm takes out, and which are
    whole numbers. seeds: begin with equal random streams; else they go on where they are.
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
    signs: bool = False
    seeds: bool = True


def run_subject(
    prepared: Prepared,
    plan: RunPlan,
    receive: Receive = lambda key, tensor: None,
    *,
    run: Execution | None = None,
    keep: bool = False,
    limited: bool = True,
    leaves: Mapping[str, torch.Tensor] | None = None,
    shadow: Shadow | None = None,
    around: Sequence[AbstractContextManager[Any]] = (),
    transform: Callable[[Prepared], Blocks] | None = None,
    masked: Collection[Key] = (),
    module_output: Callable[[str, torch.Tensor], None] | None = None,
    preserve: Preserve = preserved_state,
) -> Execution:
    """Run all steps of a plan on a prepared copy, which they change. An exception of the subject is kept.

    run: the record that is filled. keep: all results; limited: as far as `KEPT_BYTES` goes. leaves: what gradients are
    taken of, by name, in place of those of the plan; their present gradients are dropped. around: entered in order for
    all of it, before the shadow. transform: gives the blocks as they are to run (compiled). masked: outputs whose
    non-finite elements the default loss leaves out; it may grow while results are received. module_output: called with
    floating results of modules. preserve: restores global state around each forward, loss and backward.
    """
    run = run or Execution(shadow, limited)

    def received(key: Key, tensor: torch.Tensor) -> None:
        if keep:
            run.keep(key, tensor)
        receive(key, tensor)

    updates = bool(plan.rate) or plan.optimizer is not None
    changes = keeping_changes(run, prepared, updates=updates, moves=plan.autocast is None)
    with changes if keep else nullcontext():
        leaves = _leaves(prepared, plan) if leaves is None else leaves
        run.no_backward = plan.no_backward or ("" if leaves else "nothing requires a gradient")
        _clear(leaves.values())
        seeds = seeded(plan.device) if plan.seeds else nullcontext()
        with seeds, quiet(), ExitStack() as stack:  # as errors, warnings would be the model's
            if module_output is not None and prepared.root is not None:
                stack.enter_context(_module_outputs(prepared.root, run, module_output))
            for context in (noting_streams(run, plan.device), *around, shadow or nullcontext()):
                stack.enter_context(context)
            try:
                _Runner(plan, run, leaves, received, masked, preserve).run(prepared, transform)
            except BaseException as error:  # noqa: BLE001  # the user's model: its exception is a result
                run.error = as_result(error)
        if run.gradients:
            run.no_backward, run.prevented = "", False  # of another call, or of a backward that forward runs
        _clear(leaves.values())
    if shadow is not None:
        run.freedom, run.in_16_bits = shadow.freedom, shadow.in_16_bits
        run.shadow = None  # it holds the model
    return run


def _step(optimizer: torch.optim.Optimizer, leaves: Iterable[torch.Tensor], scale: float) -> None:
    """Step by gradients, without the loss scale."""
    for leaf in leaves:
        if leaf.grad is not None and scale != 1.0:
            leaf.grad.div_(scale)
    optimizer.step()


def _clear(leaves: Iterable[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs the calls of a subject. leaves: what gradients are taken of, by name. For the others see `run_subject`."""

    plan: RunPlan
    record: Execution
    leaves: Mapping[str, torch.Tensor]
    receive: Receive
    masked: Collection[Key]
    preserve: Preserve

    def run(self, prepared: Prepared, transform: Callable[[Prepared], Blocks] | None) -> None:
        """Run all calls, with an update after each where there is an optimizer."""
        run, optimizer = self.record, _optimizer(self.plan, prepared)
        blocks = prepared.blocks if transform is None else transform(prepared)
        parameters = list(prepared.root.parameters()) if prepared.root is not None else []
        trained = any(parameter.requires_grad for parameter in parameters)  # before a forward that freezes itself
        for run.step, call in enumerate(prepared.calls * self.plan.steps):
            self._run_call(blocks, call)
            if optimizer is not None:
                run.phase = "update"
                _step(optimizer, self.leaves.values(), self.plan.scale)
            _clear(self.leaves.values())
        if parameters and not trained:
            run.prevented = False  # it is for inference

    def _run_call(self, blocks: Blocks, call: Call) -> None:
        """Run forward, loss and backward of one call."""
        plan, run = self.plan, self.record
        run.phase = "forward"
        with (
            torch.set_grad_enabled(plan.grad),
            torch.autocast(torch.device(plan.device).type, plan.autocast, enabled=plan.autocast is not None),
        ):
            with self.preserve(run.left), self._own_gradients():
                result = forward_through(blocks, call)
            outputs = self._receive_outputs(result)
            finite = plan.finite_loss or any(key in self.masked for key in outputs)
            with self.preserve(run.left):
                total = None if run.no_backward or plan.signs else total_loss(result, plan.loss, finite)
        if plan.signs:
            roots = [t for t in outputs.values() if t.requires_grad and t.numel() and is_plain(t)]
            gradients = [signs(t) for t in roots]
        else:
            self._note_loss(blocks, result, total)
            roots = [] if total is None else [total]
            gradients = [scaled(t, plan.scale) for t in roots]
        if roots and not run.no_backward:
            run.phase = "backward"
            with self.preserve(run.left):
                _backward(roots, gradients, self.leaves.values())
            self._receive_gradients("")

    def _receive_outputs(self, result: object) -> dict[Key, torch.Tensor]:
        run, outputs = self.record, dict[Key, torch.Tensor]()
        run.shapes[f"step {run.step}"] = type(result).__name__
        run.plain |= _plain_values(result)
        for path, tensor in outputs_of(result, run.unseen):
            outputs["output", path, run.step] = tensor
            run.shapes[f"step {run.step}, {path or 'output'}"] = f"{short(tensor.dtype)} {_shape(tensor)}"
            self.receive(("output", path, run.step), tensor)
        return outputs

    def _note_loss(self, blocks: Blocks, result: object, total: torch.Tensor | None) -> None:
        """Note the loss of a result, its dtype, and why it has no gradient."""
        run, loss = self.record, self.plan.loss
        if total is not None:
            run.totals.append(total.detach())
            if loss is not None:
                self.receive(("loss", "", run.step), total)
        of_inputs = any(name.startswith("input ") for name in self.leaves)
        if loss is not None or not of_inputs or (is_scalar(result) and modules_of(tuple(blocks))):
            run.losses += scalar_losses(result, total if loss else None)
        if run.no_backward:
            return
        if total is None:
            run.no_backward, run.prevented = without_loss(result)
        elif not total.requires_grad:
            run.no_backward, run.prevented = NO_GRADIENT, True

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Receive the gradients that a forward with a backward of its own leaves: no loss scale is in them."""
        before = {name: leaf.grad for name, leaf in self.leaves.items()}
        _clear(self.leaves.values())
        yield
        self._receive_gradients(OWN_BACKWARD)
        for name, leaf in self.leaves.items():
            leaf.grad = before[name]

    def _receive_gradients(self, suffix: str) -> None:
        for name, leaf in self.leaves.items():
            if leaf.grad is not None:
                gradient = leaf.grad if leaf.grad.layout is torch.strided else leaf.grad.to_dense()
                self.receive(("gradient", name + suffix, self.record.step), gradient)
                self.record.gradients.add(name + suffix)


def _plain_values(returned: object, path: str = "", above: frozenset[int] = frozenset()) -> dict[str, object]:
    """The numbers, texts and None in what a call returned, in lists, tuples and mappings, by their paths."""
    items: Iterable[tuple[object, object]] = ()
    if id(returned) in above:  # it contains itself
        return {}
    if isinstance(returned, Mapping):
        items = returned.items()
    elif isinstance(returned, (list, tuple)):
        items = enumerate(returned)
    elif returned is None or isinstance(returned, (bool, int, float, complex, str)):
        return {path: returned}
    elif type(returned).__module__ == "numpy":
        return {path: repr(returned.tolist()) if hasattr(returned, "tolist") else repr(returned)}
    values: dict[str, object] = {}
    for key, value in items:
        values |= _plain_values(value, f"{path}.{key}" if path else str(key), above | {id(returned)})
    return values


def outputs_of(result: object, unseen: Counter[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory in what a call returned, by their paths. unseen: counts what is not looked into."""
    for path, leaf in results(result):
        if isinstance(leaf, torch.Tensor):
            yield from parts_of(leaf, path)
        elif not isinstance(leaf, (set, frozenset)) or any(isinstance(item, torch.Tensor) for item in leaf):
            unseen[f"{UNREAD} {type(leaf).__name__}"] += 1


def _backward(roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
    """Call `torch.autograd.backward(roots, gradients, inputs=inputs)`, without its import of SymPy, which takes 0.5 s.

    gradients: shapes and dtypes of the roots; PyTorch imports SymPy to compare them.
    """
    leaves = tuple(inputs)
    if has_torch_function((*roots, *leaves)):  # a subclass of tensors may have a backward pass of its own
        torch.autograd.backward(roots, gradients, inputs=leaves)
        return
    run_backward(tuple(roots), tuple(gradients), False, False, leaves, allow_unreachable=True, accumulate_grad=True)


def input_names(call: Call, number: int) -> dict[str, torch.Tensor]:
    """The floating inputs of a call by a name that is the same in every copy of it."""
    named = tensors({"args": call.args, "kwargs": dict(call.kwargs)})
    return {f"{number}.{path}": tensor for path, tensor in named if tensor.is_floating_point()}


def _leaves(prepared: Prepared, plan: RunPlan) -> dict[str, torch.Tensor]:
    """Return what gradients are taken of: parameters, and views of inputs, since a leaf cannot be written in place."""
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


@contextmanager
def _module_outputs(
    root: torch.nn.Module, run: Execution, receive: Callable[[str, torch.Tensor], None]
) -> Iterator[None]:
    def record(name: str, module: torch.nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():
            run.without_grad.add(name)
        try:
            results = [tensor for _, tensor in tensors(output)]
        except Exception:  # noqa: BLE001  # a mapping of the user's that only its own reader understands
            run.unseen["module outputs whose items cannot be read"] += 1
            return
        for tensor in filter(is_floating, results):
            run.modules.setdefault(name, {})[short(tensor.dtype)] = None
            if comparable(tensor) and not is_transformed_tensor(tensor):
                with without_modes():
                    receive(name, tensor.detach())

    with ExitStack() as hooks:
        for name, module in hookable(root):
            hooks.callback(module.register_forward_hook(Hook(partial(record, name))).remove)
        yield


def _shape(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(list(tensor.shape))
