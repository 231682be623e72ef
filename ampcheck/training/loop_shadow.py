"""A shadow whose tensors can go on with the values that they really have, and that sees numbers leave the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.core.run import Where
from ampcheck.shadow import Shadow
from ampcheck.shadow.companions import has_companions


class LoopShadow(Shadow):  # type: ignore[no-untyped-call]
    """A shadow that keeps the exact values of numbers that leave the run.

    numbers: the last ones, with their exact values. exactly: give the run the exact values, and let it compare
    by them. A scaler still skips the steps that overflow.
    """

    def __init__(self, *, judge: bool = True, exactly: bool = False) -> None:
        super().__init__(judge=judge)
        self.numbers: list[tuple[float, float]] = []
        self._exactly = exactly

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and has_companions(args[0]) and type(out) is float:
            exact = float(self.exact(args[0]))
            self.numbers.append((out, exact))
            return exact if self._exactly else out
        if self._exactly and out is not NotImplemented:
            with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
                self._compare_exactly(func, args, kwargs or {}, out)
        return out

    def _compare_exactly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Replace the comparisons of an op by those of its exact inputs."""
        compares = isinstance(out, torch.Tensor) and out.dtype is torch.bool and not out._is_view()
        if compares and any(has_companions(value) for value in args):
            exact = [self.store.exact(value) if has_companions(value) else value for value in args]
            out.copy_(func(*exact, **kwargs))

    def accept(self, tensor: torch.Tensor) -> None:
        """Let a tensor, which may be a part of its memory, go on with the values that it really has."""
        if has_companions(tensor) and self.store.known(tensor) is not None:
            with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
                self.store.lift(tensor.detach())


def first_nonfinite(shadow: Shadow, values: Iterable[torch.Tensor | None]) -> Where | None:
    """Where an infinity or a NaN in one of these tensors came from, also where its inputs had lost digits before."""
    for value in values:
        if value is not None and has_companions(value) and not bool(value.detach().isfinite().all()):
            steps = shadow.trail(value.detach())
            place = next((step.where for step in steps if step.error == torch.inf), None)
            if place is not None:
                return place
    return None
