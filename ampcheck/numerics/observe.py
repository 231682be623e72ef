"""Follow every op of a block of the user's code, forward, backward and update, with a shadow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ampcheck.core.environment import environment
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Run
from ampcheck.numerics.checks import OBSERVABLE, check_numerics
from ampcheck.numerics.measure import largest_of, positive, source_lines, unruled
from ampcheck.numerics.stats import NumericsStats
from ampcheck.shadow import Fault, Shadow

_END = "a value in use at the end of the block"


class OpObservation:
    """A context that follows ops. model: the module whose paths findings report; None for those of every module.

    Damage counts where it is left in a living tensor that no op has read, in a number that left the run, or in the
    weights, buffers and gradients of modules and optimizers that ran.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._shadow = Shadow(model)
        self._modules: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._open = ExitStack()

    def __enter__(self) -> OpObservation:
        def enter(module: torch.nn.Module, args: object) -> None:
            self._modules[module] = True

        def step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            self._modules[optimizer] = True

        self._open.callback(register_module_forward_pre_hook(enter).remove)
        self._open.callback(register_optimizer_step_pre_hook(step).remove)
        self._open.enter_context(self._shadow)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def stats(self, subject: str) -> NumericsStats:
        """What was seen so far."""
        shadow, judge = self._shadow, self._shadow.judge
        assert judge is not None
        state = dict(self._state())
        gradients = {name: t.grad for name, t in state.items() if t.grad is not None}
        shadow.reach(state, gradients)
        faults = tuple(self._ended(shadow.faults, [*state.values(), *gradients.values()]))
        dtypes = {dtype for _, dtype in judge.largest} | {fault.dtype for fault in faults}
        places = {fault.where for fault in faults} | set(judge.nonfinite)
        return NumericsStats(
            subject=subject,
            arm="",
            format=min(dtypes, key=lambda name: format_of(name).bits, default="float32"),
            device="",
            judged=False,
            keeps_nan=self._keeps_nan(),
            faults=faults,
            nonfinite=tuple(judge.nonfinite.items()),
            largest=largest_of(judge),
            sources=source_lines(places),
            ops=shadow.ops,
            low=judge.low,
            whole=judge.low,
            coverage=Coverage(
                positive({"ops": shadow.ops, "16-bit ops": judge.low, "tensors": judge.judged}), unruled(shadow)
            ),
        )

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights and buffers of the modules, and the weights of the optimizers that ran."""
        seen: set[int] = set()
        for item in list(self._modules):
            if isinstance(item, torch.optim.Optimizer):
                tensors = [(f"weight {i}", p) for i, p in enumerate(p for g in item.param_groups for p in g["params"])]
            else:
                named = [("weight", item.named_parameters()), ("buffer", item.named_buffers())]
                tensors = [(f"{kind} {name}", tensor) for kind, pairs in named for name, tensor in pairs]
            for name, tensor in tensors:
                if id(tensor) not in seen and isinstance(tensor, torch.Tensor):
                    seen.add(id(tensor))
                    yield name, tensor

    def _ended(self, faults: tuple[Fault, ...], state: list[torch.Tensor]) -> Iterator[Fault]:
        """The faults, with those that are left in living tensors that no op has read."""
        known = {id(c) for t in state if (c := self._shadow.store.known(t)) is not None}
        left: set[object] = set()
        for companions in self._shadow.store:
            if companions.faults and not companions.consumed and id(companions) not in known:
                left |= companions.faults
        for fault in faults:
            yield replace(fault, reaches={**fault.reaches, _END: 1.0}) if fault.key in left else fault

    def _keeps_nan(self) -> bool:
        """Whether a living result is NaN in exact that no op has read."""
        ends = (c for c in self._shadow.store if not c.consumed and c.written)
        return any(bool(c.exact.values.isnan().any()) for c in ends)


def observation_run(stats: NumericsStats, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """The findings about a watched block. checks: out of `OBSERVABLE`, all by default."""
    findings = check_numerics(stats, limits, checks or OBSERVABLE)
    return Run(environment("cpu"), tuple(findings), stats.coverage)
