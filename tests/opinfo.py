"""PyTorch's own database of operators and their samples."""

from __future__ import annotations

from typing import Any

import torch


def op_db() -> list[Any]:
    """The operators. PyTorch's test utilities forbid the process to set flags of its backends; here they may be set."""
    forbid = torch.backends.disable_global_flags
    torch.backends.disable_global_flags = lambda: None
    try:
        from torch.testing._internal.common_methods_invocations import op_db as operators
    finally:
        torch.backends.disable_global_flags = forbid
    return list(operators)
