"""The steps of optimizers: which gradients they meet, and with which values the next one begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from ampcheck.facts.memory import has_companions
from ampcheck.facts.values import CompanionStore
from ampcheck.shadow.norms import follow_noise
from ampcheck.torchtools.modes import aside
from ampcheck.torchtools.storage import local


class Steps:
    """Looks at gradients when a step uses them, and at weights when it ends.

    roots: the modules that ran. reach, renew: those of the `Shadow`. stepping: the optimizer whose step runs; due: the
    same while its gradients are new, from the beginning of the step or a backward pass of its closure on.
    """

    def __init__(
        self,
        store: CompanionStore,
        roots: Callable[[], Iterable[torch.nn.Module]],
        reach: Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None],
        renew: Callable[[torch.Tensor], None],
    ) -> None:
        self._store, self._roots, self._reach, self._renew = store, roots, reach, renew
        self.stepping: torch.optim.Optimizer | None = None
        self.due: torch.optim.Optimizer | None = None

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """A step begins; a closure may yet make its gradients."""
        self.stepping = self.due = optimizer

    def meet_gradients(self) -> None:
        """Record which faults are in the gradients that the step is about to use."""
        if self.due is not None:
            gradients = gradients_of(self._weights(self.due))
            self._reach({}, gradients)
            follow_noise(map(local, gradients.values()), self._store)
        self.due = None

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Let weights of 32 bits or more begin the next step with the values that they really have.

        Training amplifies roundings: after thousands of steps the weights of an exact run would be others, and no
        yardstick. What the update itself did to them is recorded here. Weights of 16 bits go on: their losses add up.
        So do states, which forget: where a gradient is nothing but rounding, as that of a bias before a BatchNorm, only
        their history says so.
        """
        self.stepping = self.due = None
        self._begin_anew(optimizer)
        with aside():
            self._store.rest()

    def evaluate(self) -> None:
        """Let a closure that the step calls again judge the weights that it tries, as each step does: by decisions on
        losses of nearly equal value a line search takes other weights in any run, and those are as good.
        """
        if self.stepping is not None:
            self._begin_anew(self.stepping)

    def _begin_anew(self, optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in self._weights(optimizer).items():
            tensor = local(parameter)
            known = self._store.known(tensor) if tensor.itemsize >= 4 and has_companions(tensor) else None
            if known is None or known.whole:
                continue
            if any(where.phase == "update" for _, where, _ in known.faults):
                self._reach({name: tensor}, {})
            if not known.faults or bool(tensor.isfinite().all()):
                self._renew(tensor)

    def _weights(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The parameters of an optimizer by their names in the modules that ran."""
        names = {id(p): name for root in self._roots() for name, p in root.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return {names.get(id(p), f"parameter {i}"): p for i, p in enumerate(parameters)}


def gradients_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of parameters that have one."""
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}
