"""Which dtypes the tensors that live across steps may have: a declared policy, or a preset by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import torch

from ampcheck.core.errors import UsageError
from ampcheck.core.patterns import matches

_FULL = ("float32", "float64")
_BRAIN = ("bfloat16", *_FULL)


ROLES = ("parameter", "gradient", "state", "buffer", "copy", "loss")


def _names(given: Any, place: str) -> tuple[str, ...]:
    several = given if isinstance(given, (list, tuple, set, frozenset)) else (given,)
    names = tuple(str(one).removeprefix("torch.") for one in several)
    for name in names:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise UsageError(f"a policy allows the dtype {name!r} for {place}; PyTorch has none of that name")
    return names


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """Allowed dtypes by role, as names (`float32`); an empty tuple allows everything.

    parameter: what the optimizers step. gradient: of those. state: of the optimizers; a state of one element may also
    be float32 or float64, whatever is declared (a step counter). buffer: of trained modules. copy: other weights that
    the steps change (an EMA); one that no step changes (a frozen teacher, the base under adapters) may be of any dtype.
    loss: what backward starts from. Integers and booleans are always allowed.
    exceptions: `{glob pattern of names: dtypes}`; the first pattern that matches decides alone. Names are those of the
    table: `norm.weight`, `norm.weight.grad`, `norm.weight.exp_avg`.
    masters: whether a 16-bit weight that is trained needs a copy in float32 that an optimizer steps or keeps.

    Raises `UsageError` for a dtype that PyTorch does not have.
    """

    parameter: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    buffer: tuple[str, ...] = ()
    copy: tuple[str, ...] = ()
    loss: tuple[str, ...] = ()
    exceptions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    masters: bool = False
    name: str = "declared"

    def __post_init__(self) -> None:
        for role in ROLES:
            object.__setattr__(self, role, _names(getattr(self, role), role))
        if not isinstance(self.exceptions, Mapping):
            raise UsageError(
                f"exceptions of a policy must be a mapping of patterns to dtypes; found {self.exceptions!r:.60}"
            )
        given = {str(pattern): _names(value, str(pattern)) for pattern, value in self.exceptions.items()}
        object.__setattr__(self, "exceptions", MappingProxyType(given))

    def allowed(self, role: str, name: str) -> tuple[str, ...]:
        """The dtypes that a tensor of this name and role (`parameter`, `state`, ...) may have; empty for any."""
        for pattern, dtypes in self.exceptions.items():
            if matches(pattern, name):
                return dtypes
        dtypes = getattr(self, role)
        return tuple(dtypes)

    def excepts(self, name: str, dtype: str) -> bool:
        """Whether an exception allows this dtype for a tensor of this name."""
        return any(dtype in dtypes for pattern, dtypes in self.exceptions.items() if matches(pattern, name))


PRESETS: Mapping[str, ResidencyPolicy] = MappingProxyType(
    {
        "amp": ResidencyPolicy(_FULL, _FULL, _FULL, _FULL, _FULL, _FULL, name="amp"),
        "pure-bf16": ResidencyPolicy(_BRAIN, _BRAIN, _BRAIN, _BRAIN, _BRAIN, _BRAIN, name="pure-bf16"),
        # The output dtype of a sharded module is its MixedPrecisionPolicy's to choose, and with it that of the loss.
        "fsdp2": ResidencyPolicy(_FULL, _FULL, _FULL, (), _FULL, name="fsdp2"),
        "master-weights-fp32": ResidencyPolicy(state=_FULL, masters=True, name="master-weights-fp32"),
    }
)
"""Policies by name.

`amp`: everything in float32, autocast does the rest. `pure-bf16`: everything may be bfloat16, nothing float16. `fsdp2`:
sharded parameters, gradients and optimizer state in float32, low precision for communication and activations.
`master-weights-fp32`: weights of 16 bits, each with a float32 copy that the optimizer steps or keeps. float64 is
allowed wherever float32 is.
"""


def policy_of(given: Any, subject: str = "subject") -> ResidencyPolicy | None:
    """The policy that a training subject declares under `policy`; None where it declares none.

    Accepted are the name of a preset, a `ResidencyPolicy`, and a mapping: `{"parameter": "float32", "state":
    ["bfloat16", torch.float32], "exceptions": {"**.norm.*": "float32"}}`, which `"preset": NAME` may start from.
    Raises `UsageError` for anything else.
    """
    if given is None or isinstance(given, ResidencyPolicy):
        return given
    if isinstance(given, str):
        return _preset(given, subject)
    if not isinstance(given, Mapping):
        raise UsageError(
            f"policy of {subject} must be one of {', '.join(PRESETS)}, or a mapping of roles to dtypes; "
            f"found {type(given).__name__}"
        )
    known = {one.name for one in fields(ResidencyPolicy)} - {"name"}
    values = {("state" if key == "optimizer state" else str(key)): value for key, value in given.items()}
    base = _preset(values.pop("preset"), subject) if "preset" in values else ResidencyPolicy()
    if unknown := sorted(set(values) - known):
        raise UsageError(
            f"policy of {subject} names {unknown[0]!r}; there are preset, {', '.join(ROLES)}, exceptions and masters"
        )
    return replace(base, **values, name=f"{base.name}, changed" if base.name in PRESETS else "declared")


def _preset(name: Any, subject: str) -> ResidencyPolicy:
    if not isinstance(name, str) or name not in PRESETS:
        raise UsageError(f"policy of {subject} is {name!r:.60}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
