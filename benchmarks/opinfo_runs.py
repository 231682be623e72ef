"""One call of an operator: copies in other formats, what it draws and decides, its bits, its distance from float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ampcheck.shadow.independent import ObservedShadow
from ampcheck.shadow.rules.registry import RULES
from ampcheck.stream.ops import OpEvent

CASTS = {"half", "bfloat16", "float", "chalf", "cfloat"}  # a plain float64 run of these would round; casts are lifted
# Floating results that are decisions: an integer, a step or a neighbour in the format.
DECISIONS = {
    *("round ceil floor trunc frac fix sign sgn heaviside floor_divide div fmod remainder nextafter frexp".split()),
    *("histc histogram histogramdd quantile nanquantile nn.functional.hardshrink".split()),
}
WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def recast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype with the same strides, offset, overlaps and conjugate bit, as a leaf."""
    leaf = tensor.detach()
    if leaf.layout != torch.strided or leaf.is_nested:
        return leaf.to(dtype, copy=True)
    if leaf.is_conj():
        return recast(leaf.conj(), dtype).conj()
    if leaf.is_neg():
        return torch._neg_view(recast(torch._neg_view(leaf), dtype))
    storage = leaf.untyped_storage()
    whole = torch.empty(0, dtype=leaf.dtype).set_(storage, 0, (storage.nbytes() // leaf.element_size(),), (1,))
    return whole.to(dtype, copy=True).as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())


def converted(values: Any, of: Callable[[torch.dtype], torch.dtype], gradients: bool) -> Any:
    """Fresh copies of all tensors, floating ones in another dtype; one tensor that stands twice stays one."""
    memo: dict[int, Tensor] = {}

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return of(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in memo:
            memo[id(leaf)] = recast(leaf, of(leaf.dtype)).requires_grad_(gradients and leaf.requires_grad)
        return memo[id(leaf)]

    return tree_map(convert, values)


def lowering(low: torch.dtype) -> Callable[[torch.dtype], torch.dtype]:
    complex_low = torch.complex32 if low is torch.float16 else torch.complex64
    float_low = torch.float32 if low.is_complex else low
    return lambda dtype: {torch.float64: float_low, torch.complex128: complex_low}.get(dtype, dtype)


def widening(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else WIDE.get(dtype, dtype)


def weight(output: Tensor, seed: int) -> Tensor:
    """The incoming gradient of an output: multiples of a half, which every format holds."""
    generator = torch.Generator().manual_seed(seed)
    halves = torch.randint(1, 4, output.shape, generator=generator) * 0.5
    signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
    return (halves * signs).to(output.dtype)


def decided(result: Any) -> list[Tensor]:
    """The integers and booleans among what an operator gives."""
    return [t.clone() for t in tree_leaves(result) if isinstance(t, Tensor) and not is_float(t) and not t.is_nested]


def enters(func: Any) -> bool:
    """Whether a result is data: drawn, made of Python numbers in the format of the run, or a rounded quotient."""
    drawn = torch.Tag.nondeterministic_seeded in func.tags or func is torch.ops.aten.lift_fresh.default
    return drawn or (func._overloadname in ("Tensor_mode", "Scalar_mode") and "_" not in func._opname)


class Recorder(TorchDispatchMode):
    """The operators that a call and its backward reach, in order, and what the random ones drew."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []
        self.draws: list[tuple[Any, list[Any]]] = []
        self.decisions: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        result = func(*args, **(kwargs or {}))
        if enters(func):
            kept = [args[1] if "rrelu" in str(func) else None, *tree_leaves(result)]
            self.draws.append((func, [t.clone() if isinstance(t, Tensor) else t for t in kept]))
        self.decisions += decided(result)
        return result

    def drew(self) -> bool:
        return any(torch.Tag.nondeterministic_seeded in op.tags for op in self.ops)

    def tail(self) -> str:
        return " ".join(str(op).removeprefix("aten.") for op in self.ops[-6:])


class Replay(TorchDispatchMode):
    """Gives the random operators of a float64 run what those of the recorded run drew."""

    def __init__(self, draws: list[tuple[Any, list[Any]]]) -> None:
        super().__init__()
        self.draws = list(draws)
        self.decisions: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(func, args, kwargs)
        self.decisions += decided(result)
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not enters(func) or not self.draws or "scaled_dot_product" in name:
            return func(*args, **(kwargs or {}))
        drawn, (noise, *values) = self.draws.pop(0)
        if drawn is not func:
            raise AssertionError(f"the float64 run draws {func} where the real run draws {drawn}")
        if name == "native_dropout":
            return args[0] * values[1] * (1 / (1 - args[1]) if args[2] and args[1] < 1 else 1), values[1]
        if name.startswith("rrelu_with_noise"):
            training = args[4] if len(args) > 4 else (kwargs or {}).get("training", False)
            product = args[0] * noise.to(args[0].dtype) if training else func(*args, **(kwargs or {}))
            args[1].copy_(noise)
            return args[0].copy_(product) if name.endswith("_") else product
        if "out" in (kwargs or {}):
            return kwargs["out"].copy_(values[0])
        if name.endswith("_"):
            return args[0].copy_(values[0])
        wide = [v.to(widening(v.dtype)) if isinstance(v, Tensor) else v for v in values]
        return wide[0] if len(wide) == 1 else tuple(wide)


def lifted_cast(name: str) -> Callable[..., Any] | None:
    """What takes the place of a cast in the float64 run."""
    if name in ("chalf", "cfloat"):
        return lambda x, **_: x.to(torch.complex128)
    return (lambda x, **_: (x.real if x.is_complex() else x).double() * 1) if name in CASTS else None


class Run:
    """One call and its backward: what came out, what its inputs became, and the random state afterwards."""

    def __init__(self, call: Callable[..., Any], process: Callable[..., Any], values: Any, backward: bool) -> None:
        args, kwargs = values
        torch.manual_seed(5)
        self.gradients: list[Tensor | None] = []
        result = call(*args, **kwargs)
        self.outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.sources = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        leaves = list({id(leaf): leaf for leaf in self.sources if leaf.requires_grad and leaf.is_leaf}.values())
        processed = process(result) if backward else ()
        roots = [leaf for leaf in tree_leaves(processed) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if backward and roots and leaves:
            with _disable_current_modes():
                weights = [weight(root, position) for position, root in enumerate(roots)]
            self.gradients = list(torch.autograd.grad(roots, leaves, weights, allow_unused=True))
        self.state = torch.get_rng_state()

    def tensors(self) -> list[tuple[str, Tensor]]:
        named = [(f"output {i}", t) for i, t in enumerate(self.outputs)]
        named += [(f"gradient {i}", t) for i, t in enumerate(self.gradients) if t is not None]
        return named + [(f"input {i} afterwards", t) for i, t in enumerate(self.sources)]


def bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def difference_of_bits(plain: Run, real: Run) -> str:
    """What the shadow changed, or nothing."""
    if not torch.equal(plain.state, real.state):
        return "random state"
    if [g is None for g in plain.gradients] != [g is None for g in real.gradients]:
        return "which gradients there are"
    pairs = list(zip(plain.tensors(), real.tensors(), strict=False))
    if len(pairs) != len(real.tensors()):
        return "number of results"
    for (name, before), (_, after) in pairs:
        if before.layout != torch.strided or before.is_nested:
            continue
        if (before.dtype, before.shape, before.stride()) != (after.dtype, after.shape, after.stride()):
            return f"{name}: {before.dtype} {before.stride()} became {after.dtype} {after.stride()}"
        if before.numel() and not torch.equal(bits(before), bits(after)):
            return f"{name}: other bits"
    return ""


def error(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Relative distance, the larger of that of the norms and that of the elements; infinite where only one is finite.

    An absolute distance below `floor` is none: a gradient that is zero by mathematics has no digits."""
    value, reference = (t.detach().resolve_conj().resolve_neg() for t in (value, reference))
    if value.shape != reference.shape:
        return float("inf")
    if value.numel() == 0:
        return 0.0
    if value.is_complex() != reference.is_complex():
        return float("inf")
    if value.is_complex():
        value, reference = torch.view_as_real(value), torch.view_as_real(reference)
    value, reference = value.double(), reference.double()
    known = reference.isfinite()
    if not torch.equal(value[~known].nan_to_num(7.0), reference[~known].nan_to_num(7.0)):
        return float("inf")
    value, reference = value[known], reference[known]
    if value.numel() == 0 or torch.equal(value, reference):
        return 0.0
    if not value.isfinite().all():
        return float("inf")
    size = reference.norm().item() / reference.numel() ** 0.5
    apart = (value - reference).abs()
    if apart.max() <= floor:
        return 0.0
    relative = (apart.norm() / max(reference.norm().item(), 1e-300)).item()
    return max(relative, (apart / (reference.abs() + 1e-2 * size + 1e-300)).max().item())


def plain_floats(tensors: list[Tensor]) -> list[Tensor]:
    return [t for t in tensors if is_float(t) and t.layout == torch.strided and not t.is_nested and t.numel()]


def own_error(real: Run, reference: Run) -> float:
    """How far the real results are from float64: what the shadow must not share."""
    wide = dict(reference.tensors())
    pairs = [(t, wide[name]) for name, t in real.tensors() if is_float(t) and name in wide and not t.is_sparse]
    distances = [error(t, w) for t, w in pairs if t.layout == torch.strided and not t.is_nested]
    return max((d for d in distances if d != float("inf")), default=0.0)


def judge(
    op: Any, real: Run, drew: bool, inside: bool, exact: Callable[[Tensor], Tensor], reference: Run
) -> tuple[str, float, str]:
    """How the companions of a run compare with the float64 run: status, worst error, where."""
    references = dict(reference.tensors())
    flipped = inside or any(
        not is_float(tensor) and name in references and not torch.equal(tensor, references[name])
        for name, tensor in real.tensors()
    )
    floor = 1e-15 * max((t.detach().abs().max().item() for t in plain_floats(reference.sources)), default=0.0)
    worst, message, status = 0.0, "", "derived"
    for name, tensor in real.tensors():
        if not is_float(tensor) or tensor.layout != torch.strided or tensor.is_nested:
            continue
        if name not in references:
            return "mismatch", float("inf"), f"{name} does not exist in float64"
        companion = exact(tensor)
        distance = error(companion, references[name], floor)
        if distance > 1e-12:
            follows = error(companion, tensor) == 0.0
            if flipped or (op.name in DECISIONS and follows):
                status, message = "decision", f"{name}: {distance:.1e}"
                continue
            return "mismatch", distance, f"{name}{' is the real value' if follows else ''}"
        worst = max(worst, distance)
    if flipped or status == "decision":
        return "decision", worst, message
    return "random" if drew else status, worst, ""


class Opened:
    """A shadow with what a row needs to know about it."""

    def __init__(self, *, independent: bool = False) -> None:
        seen = self.seen = set[str]()

        class Noting(ObservedShadow):
            def see(self, event: OpEvent) -> Any:
                if not event.higher:
                    seen.add(event.name)
                return super().see(event)

        self.context = Noting(independent=independent, judge=False)

    def exact(self, tensor: Tensor) -> Tensor:
        return self.context.exact(tensor.detach())

    def unruled(self) -> list[str]:
        return list(self.context.unruled)

    def escapes(self) -> list[str]:
        return [f"numbers left at {place}" for place in self.context.escapes]

    def ruled(self) -> bool:
        return any(name in RULES for name in self.seen)
