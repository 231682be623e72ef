"""Records of the tensors that live across steps, by hand."""

from __future__ import annotations

from typing import Any

from ampcheck.records.state import DtypePolicy, Role, StateDtypeStats, StateTensor


def tensor(role: Role, dtype: str = "float32", name: str = "weight", **facts: Any) -> StateTensor:
    """A tensor of four elements, trained if it is a parameter."""
    plain = StateTensor(role, name, dtype, (4,), 4, 16, "cpu", True, trained=role is Role.PARAMETER)
    return StateTensor(**{**{field: getattr(plain, field) for field in StateTensor.__slots__}, **facts})


def state(*tensors: StateTensor, policy: DtypePolicy | None = None, **facts: Any) -> StateDtypeStats:
    """They, after a step."""
    return StateDtypeStats("loop", tensors, True, policy=policy, **facts)
