"""The engine under test, as `opinfo_shadows` sees it."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, os.environ.get("SHADOW_PROTOTYPE", "../shared/prototypes/shadow"))

import shadow as engine

OWN_RULES = engine.GATHERED | {"native_dropout", "_grouped_mm", "_amp_foreach_non_finite_check_and_unscale_"}


class Opened:
    """A shadow with what a row needs to know about it."""

    def __init__(self, low: torch.dtype) -> None:
        seen = self.seen = []

        class Noting(engine.Shadow):
            def kind(self, func: Any) -> Any:
                seen.append(str(func).removeprefix("aten."))
                return super().kind(func)

        self.context = Noting(low, samples=0, judge=False)

    def exact(self, tensor: Tensor) -> Tensor:
        return self.context.exact(tensor.detach())

    def unruled(self) -> list[str]:
        return list(self.context.unseen)

    def ruled(self) -> bool:
        return any(name.split(".")[0] in OWN_RULES for name in self.seen)


def open_shadow(low: torch.dtype) -> Opened:
    return Opened(low)
