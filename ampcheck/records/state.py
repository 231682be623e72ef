"""The dtypes of the tensors that live across steps, and those that a policy allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from ampcheck.core.arguments import show
from ampcheck.core.errors import UsageError
from ampcheck.core.patterns import matches
from ampcheck.core.run import Where

ROLES = ("parameter", "gradient", "state", "buffer", "copy", "loss")


class Role(str, Enum):
    """The purpose of a tensor that lives across steps."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    BUFFER = "buffer"
    COPY = "copy"
    SCALER = "scaler"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


def _parse_names(value: object, name: str) -> tuple[str, ...]:
    import torch  # where a policy is declared, torch is there

    values = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    names = tuple([str(dtype).removeprefix("torch.") for dtype in values])
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
        """Return whether an exception allows this dtype for a tensor of this name."""
        return any(dtype in dtypes for pattern, dtypes in self.exceptions.items() if matches(pattern, name))

    def __str__(self) -> str:
        return f"the policy '{self.name}'"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor that lives across steps.

    shape: of the whole tensor. elements, bytes: what this process stores, of a DTensor the local shard.
    trained: whether it requires a gradient. changed: whether a step changed it; None where that was not measured.
    master: of a 16-bit weight, the float32 tensor of an optimizer that rounds to it. twin: of a weight that collects
    gradients and that no step changes, one of its module in another dtype that held its values and that steps change.
    version: changes with every write: PyTorch's own count (blind to writes through `.data`), then the sum of the bits.
    """

    role: Role
    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int
    device: str
    floating: bool
    trained: bool = False
    changed: bool | None = None
    master: str = ""
    version: tuple[int, ...] = ()
    twin: str = ""

    @property
    def low(self) -> bool:
        """True if it contains floating-point numbers of 16 bits or fewer."""
        return self.floating and self.dtype not in ("float32", "float64")


@dataclass(frozen=True, slots=True)
class VanishedState:
    """A state that becomes zero where float64 gives another value, with updates that are too large there.

    name: of the state; dtype: its own. elements: of the state; zero: how many of them became zero and should not be,
    together with an update more than twice as large as in float64. excess: the norm by which these updates are too
    large, relative to the norm of all exact updates of the step; infinite where one is not finite. largest: the most
    that an update is too large, as a factor. step: in which this was measured. foreseen: whether the updates become so
    as the average goes on, and are not so in this step.
    """

    name: str
    dtype: str
    elements: int
    zero: int
    excess: float
    largest: float
    step: int
    foreseen: bool


def excess_of(vanished: Sequence[VanishedState]) -> float:
    """The norm by which the updates of all these states together are too large, relative to that of all updates."""
    return math.sqrt(sum(state.excess**2 for state in vanished))


@dataclass(frozen=True, slots=True)
class StateDtypeStats:
    """The tensors that live across steps. after_step: whether a step ran before, so that gradients and state exist.

    scaled: whether there is an enabled GradScaler, which, after a step, was used. vanished: state that became zero and
    is divided by, where the steps were compared with float64. twins: pairs of weights in one module that differ in
    dtype alone, by their names. losses: dtypes of the loss of each backward pass; computed: the 16-bit dtypes in which
    these losses or parts of them were computed, whatever they were cast to before backward; loss_at: a pass of such a
    loss. returned, exact: what the steps returned, and would have returned in float64; place: the op in which a value
    of the first step that returned no finite loss became infinite or NaN.
    """

    subject: str
    tensors: tuple[StateTensor, ...]
    after_step: bool
    scaled: bool = False
    policy: DtypePolicy | None = None
    vanished: tuple[VanishedState, ...] = ()
    twins: tuple[tuple[str, str], ...] = ()
    losses: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    loss_at: Where = field(default_factory=lambda: Where("backward"))
    returned: tuple[float, ...] = ()
    exact: Mapping[int, float] = field(default_factory=dict)
    place: Where | None = None
