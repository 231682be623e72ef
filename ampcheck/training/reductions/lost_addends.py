"""What is lost of addends before they are added: in float16, by a cast or a division that makes small values zero."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

_SHRINKING = frozenset({"aten::_to_copy", "aten::copy_", "aten::div", "aten::div_", "aten::mul", "aten::mul_"})


class VanishedWatch:
    """How many nonzero values became zero on the way to a tensor of float16, by what names its values.

    Counted are casts from a wider format, and products and quotients with a number.
    """

    def __init__(self) -> None:
        self._gone: dict[Any, tuple[int, int]] = {}

    def before(self, name: str, args: Any, sample: Callable[[Any], torch.Tensor | None]) -> torch.Tensor | None:
        """The values that an op is about to make smaller; None for another op."""
        if name.partition(".")[0] not in _SHRINKING or not args:
            return None
        source = args[1] if name.startswith("aten::copy_") else args[0]
        if "div" in name or "mul" in name:
            other = args[1] if len(args) > 1 else None
            if not isinstance(other, (int, float)) and getattr(other, "numel", lambda: 2)() != 1:
                return None
        return sample(source)

    def after(self, was: torch.Tensor, key: Any, key_before: Any, now: torch.Tensor | None) -> None:
        """Note what became of them. key: of the result; key_before: of what it was made from."""
        if key is None or now is None or key[3] is not torch.float16 or now.shape != was.shape:
            return
        gone, nonzero = int(((was != 0) & (now == 0)).sum()), int((was != 0).sum())
        earlier = self._gone.get(key_before)
        if earlier is not None:
            gone, nonzero = gone + earlier[0], max(nonzero + earlier[0], earlier[1])
        self._gone[key] = gone, nonzero

    def of(self, key: object) -> tuple[int, int]:
        """How many values of a tensor became zero, and how many there were that were not."""
        return self._gone.get(key, (0, 0))

    def forget(self, storages: Collection[int]) -> None:
        """Drop what storages held that are gone."""
        self._gone = {key: one for key, one in self._gone.items() if key[0] not in storages}
