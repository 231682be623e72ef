"""Record of the use of autocast, as a guard makes it. Dtypes are by name, such as `float16`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcheck.core.run import Where


@dataclass(frozen=True, slots=True)
class State:
    """Autocast on one device; `dtype` is None where it is off. emulated: the device whose policy is emulated on it."""

    device: str
    dtype: str | None
    emulated: str = ""

    def __str__(self) -> str:
        device = f"{self.device} ({self.emulated} emulated)" if self.emulated else self.device
        return f"{self.dtype} on {device}" if self.dtype is not None else f"off on {device}"


@dataclass(frozen=True, slots=True)
class Call:
    """An op that ran where autocast could not act, or not as it acts elsewhere.

    how: `bypass` (in-place or out=), `thread`, `function` (Python backward) or `mixed` (raised on mixed dtypes).
    plain_op: the overload whose rule says what autocast would have done. policy: whose rule. state: the autocast state
    for which the rule is looked up. dtypes: of the tensors that autocast may cast. dtype_argument: a dtype was passed
    to the op. now: the autocast state in which it ran. result: the dtype it wrote. casts: the code around it casts to a
    dtype that it names. raised: PyTorch's message; `caught` when the block continued. runs_in: for `mixed`, the dtype
    in which the same op runs when all inputs have it. rule: of `plain_op`, empty where autocast leaves it alone.
    expected: the dtype that autocast would have cast to, empty where it would have changed nothing.
    """

    how: str
    op: str
    plain_op: str
    policy: str
    state: State
    dtypes: tuple[str, ...]
    dtype_argument: bool
    where: Where
    now: State | None = None
    result: str | None = None
    casts: bool = False
    raised: str = ""
    caught: bool = False
    runs_in: str | None = None
    rule: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A backward pass or an optimizer step inside an autocast region.

    region: the number of the outermost region. differentiable: the gradient is part of a forward (create_graph).
    """

    what: str
    differentiable: bool
    state: State
    region: int
    where: Where


@dataclass(frozen=True, slots=True)
class StaleCast:
    """A cached cast used although its weight changed (at `changed_by`), or where autocast casts to `wanted`."""

    shape: tuple[int, ...]
    cast: str
    wanted: str | None
    changed_by: str
    where: Where


@dataclass(frozen=True, slots=True)
class CutCast:
    """A cached cast without history, made at `made_at` while gradients were off, and used while they were on in a
    forward from which a backward pass started. weight: its name, empty where no module has it."""

    weight: str
    shape: tuple[int, ...]
    cast: str
    made_at: str
    where: Where


@dataclass(frozen=True, slots=True)
class Recompute:
    """An op of a forward that backward computed again under another state, and the dtypes of its inputs in both."""

    op: str
    forward: State
    backward: State
    forward_dtypes: tuple[str, ...]
    backward_dtypes: tuple[str, ...]
    where: Where


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception that ended the block."""

    kind: str
    message: str
    where: Where


@dataclass(frozen=True, slots=True)
class GuardStats:
    """Everything that was recorded. The mappings from records count how often each was seen.

    settings: how many settings were compared; changed: those that differ, before and after. regions: how many
    outermost autocast regions were entered; idle: those of devices that this machine lacks, which do nothing, are not
    among them. recomputed: ops with a rule first. banned: the ops that autocast refuses with the message of `raised`,
    and the policies that ban them. banned_on_cuda: calls under the CPU's autocast of ops that CUDA's bans.
    """

    subject: str
    settings: int
    changed: Mapping[str, tuple[object, object]]
    counts: Mapping[str, int] = field(default_factory=dict)
    regions: int = 0
    idle: Mapping[Where, str] = field(default_factory=dict)
    unseen: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[Call, int] = field(default_factory=dict)
    crossings: Mapping[Crossing, int] = field(default_factory=dict)
    stale: Mapping[StaleCast, int] = field(default_factory=dict)
    cut: Mapping[CutCast, int] = field(default_factory=dict)
    recomputed: Mapping[Recompute, int] = field(default_factory=dict)
    banned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    banned_on_cuda: tuple[Where, ...] = ()
    raised: Raised | None = None
