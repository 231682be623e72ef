"""The dtypes that a policy allows for the tensors that live across steps: declared in the subject, or a preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from ampcheck.core.arguments import show
from ampcheck.core.errors import UsageError
from ampcheck.core.patterns import matches

_FULL = ("float32", "float64")
_BFLOAT16 = ("bfloat16", *_FULL)

ROLES = ("parameter", "gradient", "state", "buffer", "copy", "loss")


def _parse_names(value: object, name: str) -> tuple[str, ...]:
    values = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    names = tuple(str(dtype).removeprefix("torch.") for dtype in values)
    for dtype in names:
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise UsageError(f"a policy allows the dtype {dtype!r} for {name}; PyTorch has none of that name")
    return names


@dataclass(frozen=True, slots=True)
class DtypePolicy:
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
            object.__setattr__(self, role, _parse_names(getattr(self, role), role))
        if not isinstance(self.exceptions, Mapping):
            raise UsageError(
                f"exceptions of a policy must be a mapping of patterns to dtypes; found {show(self.exceptions)}"
            )
        parsed = {str(pattern): _parse_names(dtypes, str(pattern)) for pattern, dtypes in self.exceptions.items()}
        object.__setattr__(self, "exceptions", MappingProxyType(parsed))

    def allowed(self, role: str, name: str) -> tuple[str, ...]:
        """The dtypes that a tensor of this name and role (`parameter`, `state`, ...) may have; empty for any."""
        exception = next((dtypes for pattern, dtypes in self.exceptions.items() if matches(pattern, name)), None)
        return tuple(getattr(self, role)) if exception is None else exception

    def excepts(self, name: str, dtype: str) -> bool:
        """Whether an exception allows this dtype for a tensor of this name."""
        return any(dtype in dtypes for pattern, dtypes in self.exceptions.items() if matches(pattern, name))

    def __str__(self) -> str:
        return f"the policy '{self.name}'"


PRESETS: Mapping[str, DtypePolicy] = MappingProxyType(
    {
        "amp": DtypePolicy(_FULL, _FULL, _FULL, _FULL, _FULL, _FULL, name="amp"),
        "pure-bf16": DtypePolicy(_BFLOAT16, _BFLOAT16, _BFLOAT16, _BFLOAT16, _BFLOAT16, _BFLOAT16, name="pure-bf16"),
        # The output dtype of a sharded module is its MixedPrecisionPolicy's to choose, and with it that of the loss.
        "fsdp2": DtypePolicy(_FULL, _FULL, _FULL, (), _FULL, name="fsdp2"),
        "master-weights-fp32": DtypePolicy(state=_FULL, masters=True, name="master-weights-fp32"),
    }
)
"""Policies by name.

`amp`: everything in float32, autocast casts. `pure-bf16`: everything may be bfloat16, nothing float16. `fsdp2`:
sharded parameters, gradients and optimizer state in float32, low precision for communication and activations.
`master-weights-fp32`: weights of 16 bits, each with a float32 copy that the optimizer steps or keeps. float64 is
allowed wherever float32 is.
"""


def parse_policy(value: object, subject: str = "subject") -> DtypePolicy | None:
    """The policy that a training subject declares under `policy`; None where it declares none.

    Accepted are the name of a preset, a `DtypePolicy`, and a mapping: `{"parameter": "float32", "state":
    ["bfloat16", torch.float32], "exceptions": {"**.norm.*": "float32"}}`, which may start from `"preset": NAME`.
    Raises `UsageError` for anything else.
    """
    if value is None or isinstance(value, DtypePolicy):
        return value
    if isinstance(value, str):
        return _preset(value, subject)
    if not isinstance(value, Mapping):
        raise UsageError(
            f"policy of {subject} must be one of {', '.join(PRESETS)}, or a mapping of roles to dtypes; "
            f"found {show(value)}"
        )
    values = {("state" if key == "optimizer state" else str(key)): dtypes for key, dtypes in value.items()}
    base = _preset(values.pop("preset"), subject) if "preset" in values else DtypePolicy()
    if unknown := sorted(set(values) - {*ROLES, "exceptions", "masters"}):
        raise UsageError(
            f"policy of {subject} names {unknown[0]!r}; there are preset, {', '.join(ROLES)}, exceptions and masters"
        )
    return replace(base, **values, name=f"{base.name}, changed" if base.name in PRESETS else "declared")


def _preset(name: object, subject: str) -> DtypePolicy:
    if not isinstance(name, str) or name not in PRESETS:
        raise UsageError(f"policy of {subject} must be one of {', '.join(PRESETS)}; found {show(name)}")
    return PRESETS[name]
