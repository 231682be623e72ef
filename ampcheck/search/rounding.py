"""How much error rounding explains, element by element: the derivation of the bound that a property is held to.

Let y be an output, u the unit roundoff of the format, k the longest chain of roundings (each op rounds its result once;
one more for the inputs) and c_j = |dy/dx_j| |x|, taken in float64, |x| being the largest of those inputs in one tensor
that y hangs on, and c_w = |dy/dw| |w| of each weight.

- An algorithm is backward stable when its result is the exact one of data that moved by a few roundings (Higham,
  Accuracy and Stability of Numerical Algorithms, 1.5; normwise 7.2). k of them move y by at most k u sum(c); if they
  are independent, by more than LAMBDA sqrt(k) u sqrt(sum(c^2)) in one element of a billion (Higham and Mary, 2019). The
  smaller counts. Equal inputs round equally, so their c are added first.
- Where y jumps or bends (a threshold, an index) the derivative says nothing: the function is also evaluated at data
  that moved by k u, and may be as far off as that.
- The result itself is rounded: k u times the largest magnitude of the outputs that hang on the same inputs. That is
  the element itself for an elementwise function, a row for softmax, a sample for a network.
- Below the normal range a rounding is half of the smallest subnormal: k of these. A result that is itself subnormal is
  promised nothing: hardware and vectorised kernels flush it. What subnormal results inside lose, as long as two bits
  are left of them, may be magnified on the way out: measured with `ampcheck.search.jitter`, k times.
- What is subnormal in float32 may be taken for zero by a kernel that computes in it: the function is also evaluated at
  data without such numbers, and may be as far off as that.
- 16-bit kernels compute in float32 inside. What float32 gets wrong is not asked for, k times: measured with the model
  in float32, unless a value leaves float32's range on the way, and with `ampcheck.search.jitter` inside its ops.
- More than LOST of the value, which leaves less than two bits, is explained by no number of roundings, unless single
  ones explain it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.errors import as_result
from ampcheck.core.formats import format_of
from ampcheck.numerics.ops import OpWatch
from ampcheck.numerics.stats import LOST
from ampcheck.search.arms import Arms, Example
from ampcheck.search.jitter import Compounds, Jitter
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.trace import Trace

LAMBDA = math.sqrt(2 * math.log(2e9))
"""Standard deviations that a sum of bounded independent roundings exceeds once in 10^9 (Hoeffding)."""

DIRECTIONS = 6
"""Ways in which the data are moved: all up, all down, and four times at random."""

VOTES = 32
"""Ways in which they are moved where the function decides something, before a decision counts as wrong: beyond the
first `DIRECTIONS` by random parts of the distance."""

MANY = 256
"""The same before a value that hangs on decisions counts as wrong: what turns in three directions of a hundred is not
seen to turn in one search of two thousand."""

_SUSPECTS = 8
_NUDGE = 2.0**-10
_JITTERS, _SUBNORMAL_JITTERS = 4, 12  # of a few subnormal results the signs may cancel


@dataclass(frozen=True, slots=True)
class Worst:
    """The element with the largest error in terms of what rounding explains. index: in the flattened output."""

    index: int
    observed: float
    allowed: float
    roundings: int

    @property
    def ratio(self) -> float:
        """Observed over allowed; above 1 rounding does not explain it."""
        return self.observed / self.allowed if self.allowed else math.inf if self.observed else 0.0


class Rounding:
    """What rounding explains of one example's outputs; everything costly is computed when first asked for."""

    def __init__(self, arms: Arms, example: Example, wide: dict[str, torch.Tensor], roundings: int) -> None:
        self._arms, self._example, self._wide = arms, example, wide
        self.roundings = roundings
        known = [format_of(one) for one in arms.formats]
        self.unit = max(fmt.unit_roundoff for fmt in known)
        self.tiny = max(fmt.smallest_subnormal for fmt in known)
        self.normal = max(fmt.smallest_normal for fmt in known)
        # No chain is so long that the data move by more than what leaves two bits of them.
        self.steps = min(float(roundings), LOST / self.unit)
        self._moved: dict[tuple[float, float], list[dict[str, torch.Tensor]]] = {}
        self._float32: dict[str, torch.Tensor] | None = None
        self._flushed: list[dict[str, torch.Tensor]] | None = None
        self._graph: Any = None
        self._deciding: bool | None = None

    def worst(self, path: str, low: torch.Tensor) -> Worst:
        """The element of one output that is furthest off; one beyond its bound, if there is any."""
        twin = self._wide[path].double().reshape(-1)
        error = torch.where(twin.isfinite() & low.reshape(-1).isfinite(), low.double().reshape(-1) - twin, 0.0).abs()
        k, size = self.roundings, torch.where(twin.isfinite(), twin, 0.0).abs()
        flushed = torch.where(size < self.normal, self.normal, 0.0)
        least = k * self.tiny + torch.minimum(k * self.unit * size, LOST * size) + flushed
        own, sway = least, torch.zeros_like(least)
        ratio = error / own
        for directions in (DIRECTIONS, VOTES, MANY):  # more of them where the function decides
            if float(ratio.amax()) <= 1 or (directions > DIRECTIONS and not self._decides(directions)):
                break
            sway, once = self.swayed(path, self.steps, directions), self.swayed(path, 1.0)
            smooth = LOST * size + 4 * once + k * self.tiny + flushed
            # Where the function jumps it moves out of proportion, and no cap holds; where it is smooth, one does.
            own = torch.where(self._jumps(path, directions), least + sway, torch.minimum(least + sway, smooth))
            ratio = error / own
        order = ratio.argsort(descending=True)[:_SUSPECTS].tolist()
        found = [Worst(order[0], float(error[order[0]]), float(own[order[0]]), k)]
        if found[0].ratio > 1:  # only then is the costly part of the bound asked for
            suspects = [index for index in order if ratio[index] > 1]
            found = [Worst(i, float(error[i]), self._allowed(path, i, sway[i].item()), k) for i in suspects]
        return max(found, key=lambda one: one.ratio)

    def _jumps(self, path: str, directions: int = DIRECTIONS) -> torch.Tensor:
        """Which elements move out of proportion."""
        return self.swayed(path, self.steps, directions) > 2 * self.steps * self.swayed(path, 1.0)

    def _decides(self, directions: int) -> bool:
        """Whether more directions may show more: there are ops that decide and, for `MANY`, some output turned so far.

        An integer or a bool turns, and what moves out of proportion.
        """
        if self._deciding is None:
            watch = _Inside()
            self._arms.wide(self._example, watch)
            self._deciding = watch.decides
        if not self._deciding or directions <= VOTES:
            return self._deciding
        for path, twin in self._wide.items():
            if twin.is_floating_point():
                turned = twin.numel() > 0 and bool(self._jumps(path, VOTES).any())
            else:
                runs = [run[path] for run in self.moved(self.steps) if path in run and run[path].shape == twin.shape]
                turned = any(not torch.equal(run, twin) for run in runs)
            if turned:
                return True
        return False

    def swayed(self, path: str, roundings: float, directions: int = DIRECTIONS) -> torch.Tensor:
        """How far each element moves, at the most, when data move by so many unit roundoffs or lose subnormals; flat.

        Infinite where the judge itself becomes infinite, NaN or of another shape.
        """
        twin = self._wide[path].double().reshape(-1)
        most = torch.zeros_like(twin)
        for run in (*self.moved(roundings, directions)[:directions], *self.flushed()):
            if path not in run or run[path].numel() != twin.numel():
                return torch.full_like(twin, math.inf)
            away = torch.where(twin.isfinite(), (run[path].double().reshape(-1) - twin).abs(), 0.0)
            most = torch.maximum(most, away.nan_to_num(math.inf, math.inf))
        return most

    def moved(
        self, roundings: float, directions: int = DIRECTIONS, *, floor: float = 0.0
    ) -> list[dict[str, torch.Tensor]]:
        """The judge's outputs at data that moved by so many unit roundoffs, and inputs by `floor` besides."""
        known = self._moved.setdefault((roundings, floor), [])
        while len(known) < directions:
            number = len(known)
            generator = torch.Generator().manual_seed(number)

            def move(
                tensor: torch.Tensor,
                floor: float = 0.0,
                number: int = number,
                generator: torch.Generator = generator,
            ) -> torch.Tensor:
                signs: Any = 1 - 2 * number
                if number >= 2:
                    drawn = torch.randint(0, 2, tensor.shape, generator=generator)
                    signs = drawn.to(tensor.device, tensor.dtype) * 2 - 1
                if number >= DIRECTIONS:  # what is decided may turn long before the end of the way
                    signs = signs * torch.rand(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
                moved: torch.Tensor = tensor * (1 + roundings * self.unit * signs) + floor * signs
                return moved

            wide = self._example.to(torch.float64, self._arms.device)
            example = wide.replaced({path: move(tensor, floor) for path, tensor in wide.floats().items()})
            with self._arms.moved_weights(move):
                known.append(self._arms.wide(example).found)
        return known

    def flushed(self) -> list[dict[str, torch.Tensor]]:
        """The judge's outputs at data whose subnormals of float32 are zero; none where there are none."""
        if self._flushed is None:
            least = format_of("float32").smallest_normal

            def flush(tensor: torch.Tensor) -> torch.Tensor:
                return torch.where(tensor.abs() < least, 0.0, tensor)

            self._flushed = []
            wide = self._example.to(torch.float64, self._arms.device)
            held = (*wide.floats().values(), *self._arms.weights())
            if any(bool(((t != 0) & (t.abs() < least)).any()) for t in held if t.layout is torch.strided):
                example = wide.replaced({path: flush(tensor) for path, tensor in wide.floats().items()})
                with self._arms.moved_weights(flush):
                    self._flushed.append(self._arms.wide(example).found)
        return self._flushed

    def _allowed(self, path: str, index: int, swayed: float) -> float:
        """The largest error of one element that rounding explains."""
        k, twin = self.roundings, self._wide[path].double().reshape(-1)
        once, often, scale = self._condition(path, index)
        once, often = self.unit * once, self.unit * often
        data = max(swayed, min(k * once, LAMBDA * math.sqrt(k) * often))
        size = max(scale, abs(float(twin[index])))
        honest = data + k * (self.unit * size + self.tiny)
        # No chain is so long that it explains the loss of everything.
        single = max(once, float(self.swayed(path, 1.0)[index]))
        honest = min(honest, LOST * size + 4 * single + k * self.tiny)
        return honest + k * self._doubt(path, index) + self.normal * (abs(float(twin[index])) < self.normal)

    def _condition(self, path: str, index: int) -> tuple[float, float, float]:
        """sum(c), sqrt(sum(c^2)) with equal inputs together, and the largest output that hangs on the same inputs."""
        twin = self._wide[path].double().reshape(-1)
        whole = float(torch.where(twin.isfinite(), twin, 0.0).abs().amax())
        element = self._element(path, index)
        if element is None:
            return 0.0, 0.0, whole
        result, leaves, weights = element
        try:
            held = [*leaves.values(), *weights]
            grads: Sequence[torch.Tensor | None] = torch.autograd.grad(
                result, held, retain_graph=True, allow_unused=True
            )
        except (RuntimeError, NotImplementedError):
            return 0.0, 0.0, whole
        once = square = 0.0
        touched: dict[str, torch.Tensor] = {}
        for (name, leaf), grad in zip(leaves.items(), grads, strict=False):
            if grad is None:
                continue
            touched[name] = grad != 0
            held_on = torch.where(touched[name] & leaf.isfinite(), leaf.detach().abs(), 0.0)
            largest = held_on.amax() if held_on.numel() else 0.0
            parts = (grad.abs() * largest).nan_to_num(0.0, 0.0, 0.0).reshape(-1)
            once += float(parts.sum())
            _, group = torch.unique(leaf.detach().reshape(-1), return_inverse=True)
            square += float(parts.new_zeros(parts.numel()).scatter_add_(0, group, parts).square().sum())
        for weight, grad in zip(weights, grads[len(leaves) :], strict=True):
            if grad is not None:
                parts = (grad * weight.detach()).abs().nan_to_num(0.0, 0.0, 0.0)
                once, square = once + float(parts.sum()), square + float(parts.square().sum())
        return once, math.sqrt(square), self._neighbours(path, index, touched, whole)

    def _element(self, path: str, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[Any]] | None:
        """One element of an output with its history."""
        if self._graph is None:
            try:
                self._graph = self._arms.differentiable(self._example)
            except BaseException as error:  # noqa: BLE001  # the user's model, asked for a gradient that it may refuse
                as_result(error)
                self._graph = ()
        if not self._graph:
            return None
        result, leaves, weights = self._graph
        output = dict(tensors(result)).get(path)
        if output is None or not output.requires_grad:
            return None
        real = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
        return real.reshape(-1)[index], leaves, weights

    def _neighbours(self, path: str, index: int, touched: dict[str, torch.Tensor], whole: float) -> float:
        """The largest output that moves when the inputs move that the element hangs on; `whole` if there are none."""
        if not self._example.floats():
            return whole
        wide = self._example.to(torch.float64, self._arms.device)
        least = format_of(self._arms.dtype).smallest_normal
        generator = torch.Generator().manual_seed(0)
        changed = {}
        for name, tensor in wide.floats().items():
            if name in touched:  # each by a share of its own: a common shift or factor may change nothing
                share = _NUDGE * (1 + torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)).to(
                    tensor.device
                )
                changed[name] = tensor + share * touched[name] * tensor.abs().clamp_min(least)
        moved = self._arms.wide(wide.replaced(changed)).found.get(path)
        twin = self._wide[path].double().reshape(-1)
        if moved is None or moved.numel() != twin.numel():
            return whole
        near = (moved.double().reshape(-1) != twin) & twin.isfinite()
        near[index] = True
        return float(torch.where(near, twin, 0.0).abs().amax())

    def _doubt(self, path: str, index: int) -> float:
        """What float32 gets wrong of the element: as a model, at the data and near them; as arithmetic in kernels."""
        if self._float32 is None:
            self._float32 = {}
            arms, wide = self._arms, self._example.to(torch.float64, self._arms.device)
            for subnormal, times in ((None, _JITTERS), (format_of(arms.dtype), _SUBNORMAL_JITTERS)):
                for number in range(times):
                    jitter = Jitter(number, subnormal)
                    self._note(arms.wide(wide, jitter).found, self._wide)
                    if not jitter.moved:
                        break
            watch = _Inside()
            arms.wide(wide, watch)
            for sign in (0, 1, -1) if not watch.beyond else ():
                near = wide.replaced({name: t * (1 + sign * self.unit) for name, t in wide.floats().items()})
                self._note(arms.float32(near).found, arms.wide(near).found)
        known = self._float32.get(path)
        return float(known[index]) if known is not None and index < known.numel() else 0.0

    def _note(self, narrow: dict[str, torch.Tensor], judge: dict[str, torch.Tensor]) -> None:
        """Keep the largest finite distance of each element."""
        assert self._float32 is not None
        for name, twin in judge.items():
            if name in narrow and narrow[name].shape == twin.shape and twin.is_floating_point():
                off = (narrow[name].double() - twin.double()).abs().reshape(-1)
                off = torch.where(off.isfinite(), off, 0.0)
                self._float32[name] = torch.maximum(self._float32.get(name, off), off)


def roundings_of(arms: Arms, example: Example) -> int:
    """The longest chain of roundings in a low-precision run, those inside compound ops, and one more for the inputs."""
    watch = OpWatch(shadow=False)
    arms.low(example, Trace(arms.root, observers=(watch,)))
    compounds = Compounds(arms.device)
    arms.wide(example, compounds)
    return max(1, watch.longest_chain) + compounds.roundings + 1


_DECIDING = frozenset(
    "round floor ceil trunc frac fmod remainder floor_divide sign sgn heaviside eq ne lt le gt ge isclose argmax "
    "argmin max min topk sort argsort kthvalue median mode bucketize searchsorted unique nonzero "
    "_local_scalar_dense".split()
)
"""Ops whose results turn when data pass a tie."""


class _Inside(TorchDispatchMode):
    """Whether a value leaves the range of float32 inside, and whether an op decides something."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.beyond = self.decides = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2] if isinstance(func, torch._ops.OpOverload) else ""
        self.decides = self.decides or name.rstrip("_") in _DECIDING
        limit = format_of("float32").overflows_at
        for _, tensor in tensors(out):
            if name == "_to_copy" and not tensor.dtype.is_floating_point:
                self.decides = True
            if tensor.dtype is torch.float64 and tensor.numel() and not self.beyond:
                self.beyond = bool(((tensor.abs() >= limit) & tensor.isfinite()).any())
        return out
