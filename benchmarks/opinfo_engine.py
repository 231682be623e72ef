"""The engine under test, as `opinfo_shadows` sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ampcheck.shadow import Shadow
from ampcheck.shadow.call import op_schema
from ampcheck.shadow.rules import RULES


class Opened:
    """A shadow with what a row needs to know about it."""

    def __init__(self) -> None:
        seen = self.seen = set[str]()

        class Noting(Shadow):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if hasattr(func, "_schema"):
                    seen.add(op_schema(func).name)
                return super().__torch_dispatch__(func, types, args, kwargs)

        self.context = Noting(judge=False)

    def exact(self, tensor: Tensor) -> Tensor:
        return self.context.exact(tensor.detach())

    def unruled(self) -> list[str]:
        return list(self.context.unruled)

    def ruled(self) -> bool:
        return any(name in RULES for name in self.seen)
