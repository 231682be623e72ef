"""The same callable in several precisions: as the user runs it, in float64, in float32, and compiled.

Each is prepared once and called with many examples. Buffers, random streams and the inputs are put back after each
call, so that an example gives the same result however often, and in whatever order, it is looked at.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcheck.autocast.emulate import active
from ampcheck.autocast.missing import MissingKernels, lacking
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.formats import format_of
from ampcheck.core.subject import Call, Subject
from ampcheck.numerics.equal_random import EqualRandom, seeded
from ampcheck.numerics.reference import PromoteMixed
from ampcheck.search.cast_tracking import CastTracker
from ampcheck.torchtools.copying import forward_through, prepare
from ampcheck.torchtools.pytree import is_plain, map_tensors, tensors
from ampcheck.torchtools.snapshot import preserved_objects


@dataclass(frozen=True, slots=True)
class Example:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def floats(self) -> dict[str, torch.Tensor]:
        """The floating tensors by a name that is the same in every copy."""
        named = tensors({"args": self.args, "kwargs": dict(self.kwargs)})
        return {path: tensor for path, tensor in named if tensor.is_floating_point()}

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Example:
        """A copy with `function` applied to every tensor."""
        return Example(*map_tensors(function, (self.args, dict(self.kwargs))))

    def replaced(self, changed: Mapping[str, torch.Tensor]) -> Example:
        """A copy with other tensors in the place of those named."""
        by_id = {id(tensor): changed[path] for path, tensor in self.floats().items() if path in changed}
        return self.mapped(lambda tensor: by_id.get(id(tensor), tensor))

    def to(self, dtype: torch.dtype, device: str) -> Example:
        """A copy on `device` whose real floating tensors have `dtype`, complex ones the same width."""
        wide = torch.complex128 if dtype is torch.float64 else torch.complex64

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            wanted = dtype if tensor.is_floating_point() else wide if tensor.is_complex() else tensor.dtype
            return tensor.detach().to(device=device, dtype=wanted, copy=True)

        return self.mapped(cast)

    def signature(self) -> tuple[Any, ...]:
        """What decides which ops run: shapes, dtypes and strides of the tensors, and all other arguments."""
        held = tensors((self.args, dict(self.kwargs)))
        return tuple((path, tuple(t.shape), str(t.dtype), t.stride()) for path, t in held)

    def key(self) -> tuple[Any, ...]:
        """What tells this example from others, bit by bit."""
        held = tensors((self.args, dict(self.kwargs)))
        bits = tuple(_bits(tensor) for _, tensor in held)
        plain = repr(map_tensors(lambda tensor: None, (self.args, dict(self.kwargs))))
        return (*self.signature(), bits, plain)


def _bits(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided:
        return repr(tensor).encode()
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def as_example(drawn: object) -> Example:
    """A tensor is the one argument, a tuple the positional ones; `(args, kwargs)` is a tuple and a mapping of names."""
    if isinstance(drawn, tuple) and len(drawn) == 2 and isinstance(drawn[0], tuple) and isinstance(drawn[1], dict):
        return Example(drawn[0], drawn[1])
    return Example(drawn) if isinstance(drawn, tuple) else Example((drawn,))


@dataclass(slots=True)
class Outputs:
    """What a call gave: detached tensors by path, or the exception that it raised."""

    found: dict[str, torch.Tensor] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def lacking(self) -> str:
        """The kernel for want of which the call raised, which says nothing about the model; "" otherwise."""
        return lacking(self.error, kernels=True) if self.error is not None else ""


class Arms:
    """One callable, ready to be run on examples in each precision.

    dtype: what autocast casts to, or, where `native`, the dtype that the inputs or weights have already. example: the
    first one, which decides how wide the judge is: `float64`, with operands promoted where the model mixes dtypes, or
    `float32` where it runs no wider. `formats` are the one of `dtype` and those that the model itself casts
    to. `dropped` counts outputs that cannot be judged, `substituted` ops that ran in
    float32 since no 16-bit kernel is here, both over the calls that are judged.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype, *, device: str = "cpu", native: bool = False) -> None:
        self.subject, self.dtype, self.device, self.native = subject, dtype, device, native
        self.how = "float64"
        self.draws = False
        self.substituted: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self._low = prepare(subject, device=device)
        self._wide = prepare(subject, device=device, to=torch.float64)
        self._float32 = prepare(subject, device=device, to=torch.float32)
        self._wide_dtype = torch.float64
        self._promote = False
        self._lifts = False
        self._settled = False
        self.formats = {dtype}

    @property
    def root(self) -> torch.nn.Module | None:
        """The module of the low-precision arm whose paths findings name."""
        return self._low.root

    def weights(self) -> list[torch.nn.Parameter]:
        """The floating weights of the judge."""
        held = self._wide.root.parameters() if self._wide.root is not None else ()
        return [weight for weight in held if weight.is_floating_point()]

    def settle(self, example: Example) -> str:
        """Choose the judge with the first example that float32 takes; what it raises instead, in one line."""
        if self._settled:
            return ""
        with seeded(self.device), EqualRandom() as random:
            narrow = self.float32(example)
        if narrow.error is not None:
            return brief(narrow.error)
        self.draws = random.drew
        self._settled = True
        self._choose_judge(example, narrow)
        tracker = CastTracker(self._wide_dtype)
        wide, through = self.wide(example), self.wide(example, tracker)
        same = wide.found.keys() == through.found.keys()
        if tracker.formats and same and all(wide.found[p].shape == through.found[p].shape for p in wide.found):
            self._lifts = True  # the model's own casts are roundings of it, which the judge must not share
            self.formats |= tracker.formats
        return ""

    def unsteady(self, example: Example) -> str | None:
        """Why two runs on equal data differ; "" where they do not, also once what is drawn is drawn alike.

        None where nothing but zeros comes out, which are alike whatever they are multiplied by.
        """
        unit, first = format_of(self.dtype).unit_roundoff, self.float32(example).found
        if not any(bool(tensor.any()) for tensor in first.values()):
            return None
        if not _alike(first, self.float32(example).found, unit):
            self.draws = True  # from a generator that is none of torch's
            if not _alike(self.float32(example).found, self.float32(example).found, unit):
                return "equal inputs give different results each time, so that nothing can be told from them"
        return ""

    def _choose_judge(self, example: Example, narrow: Outputs) -> None:
        """float64, if the model runs in it and gives what it gives in float32."""
        for self.how, self._promote in (("float64", False), ("float64, mixed operands promoted", True)):
            wide = self.wide(example)
            same = wide.found.keys() == narrow.found.keys()
            if wide.error is None and same and all(wide.found[p].shape == narrow.found[p].shape for p in wide.found):
                return
        self.how, self._promote, self._wide, self._wide_dtype = "float32", False, self._float32, torch.float32

    def judged(self, example: Example) -> Outputs:
        """`low`, with what cannot be judged in it counted; drawn numbers are those of every other run."""
        before = _states(self.device)
        outputs = self.low(example, counted=True)
        if not self.draws and any(not torch.equal(a, b) for a, b in zip(before, _states(self.device), strict=True)):
            _put_back_states(self.device, before)
            self.draws = True
            outputs = self.low(example)
        return outputs

    def low(
        self, example: Example, around: AbstractContextManager[Any] | None = None, *, counted: bool = False
    ) -> Outputs:
        """As the user runs it: under autocast, or as it is where it is kept in 16 bits."""
        autocast = torch.autocast(torch.device(self.device).type, self.dtype, enabled=not self.native)
        missing = MissingKernels() if active() is not None else None
        own = self._own(example)  # before anything watches: copying reads memory that nothing was written to
        with ExitStack() as stack:
            if missing is not None:
                stack.enter_context(missing)
            stack.enter_context(autocast)
            outputs = self._run(self._low, own, inside=around, counted=counted)
        for op, times in (missing.ran if missing is not None and counted else {}).items():
            self.substituted[op] = self.substituted.get(op, 0) + times
        return outputs

    def wide(self, example: Example, around: AbstractContextManager[Any] | None = None) -> Outputs:
        """The judge's answer."""
        own = example.to(self._wide_dtype, self.device)
        with ExitStack() as stack:
            stack.enter_context(around or nullcontext())
            if self._promote:
                stack.enter_context(PromoteMixed())
            if self._lifts:
                stack.enter_context(CastTracker(self._wide_dtype))
            return self._run(self._wide, own)

    def float32(self, example: Example) -> Outputs:
        """The same in float32, without autocast."""
        with CastTracker(torch.float32) if self._lifts else nullcontext():
            return self._run(self._float32, example.to(torch.float32, self.device))

    def differentiable(self, example: Example) -> tuple[Any, dict[str, torch.Tensor], list[torch.nn.Parameter]]:
        """The judge's raw result with its history, the floating inputs and the weights that it hangs on."""
        held = example.to(self._wide_dtype, self.device)
        leaves = {path: tensor.detach().requires_grad_() for path, tensor in held.floats().items()}
        # A leaf cannot be written in place; a view of it can.
        inputs = held.replaced({path: leaf.view_as(leaf) for path, leaf in leaves.items()})
        promoted = PromoteMixed() if self._promote else nullcontext()
        with self._around(self._wide), promoted, CastTracker(self._wide_dtype) if self._lifts else nullcontext():
            result = self._wide.model(*inputs.args, **inputs.kwargs)
        return result, leaves, [weight for weight in self.weights() if weight.requires_grad]

    def compiled(self, example: Example, compiled: Callable[..., Any]) -> Outputs:
        """What `compiled` gives, which was made of `plain`."""
        autocast = torch.autocast(torch.device(self.device).type, self.dtype, enabled=not self.native)
        with autocast:
            return self._run(self._low, self._own(example), compiled)

    @property
    def plain(self) -> Callable[..., Any]:
        """The low-precision arm's callable, to be compiled."""
        return self._low.model  # type: ignore[no-any-return]

    @contextmanager
    def moved_weights(self, by: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """The judge's weights are `by(weight)` inside."""
        kept = [(weight, weight.detach().clone()) for weight in self.weights()]
        try:
            with torch.no_grad():
                for weight, before in kept:
                    weight.copy_(by(before))
            yield
        finally:
            with torch.no_grad():
                for weight, before in kept:
                    weight.copy_(before)

    def _own(self, example: Example) -> Example:
        return Example(*copy.deepcopy((example.mapped(torch.Tensor.detach).args, dict(example.kwargs)))).mapped(
            lambda tensor: tensor.detach().to(self.device)
        )

    def _run(
        self,
        prepared: Any,
        example: Example,
        model: Callable[..., Any] | None = None,
        inside: AbstractContextManager[Any] | None = None,
        *,
        counted: bool = False,
    ) -> Outputs:
        outputs = Outputs()
        # A compiled module has a length where the model has none: it must not be asked whether it is true.
        called = prepared.model if model is None else model
        with self._around(prepared):
            try:
                with inside or nullcontext():
                    result = forward_through([called], Call(example.args, example.kwargs))
            except UsageError:
                raise
            except BaseException as error:  # noqa: BLE001  # the user's model: its exception is a result
                outputs.error = as_result(error)
                return outputs
            if type(result) in (bool, int) and abs(result) <= _LARGEST_INTEGER:
                result = torch.tensor(result)
            result = _numbers_as_tensors(result)
            if counted:
                self._dropped(result)
            for path, tensor in tensors(result):
                if is_plain(tensor):
                    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
                    # A copy: what the model keeps is put back once it has run, and may be what it gave.
                    outputs.found[path] = real.detach().clone()
        return outputs

    def _dropped(self, result: object) -> None:
        """Count what cannot be judged in what the low-precision run gives."""
        held = [tensor for _, tensor in tensors(result)]
        names = [_unlike(tensor) for tensor in held if not is_plain(tensor)]
        if not held:
            names = [f"results without tensors ({type(result).__name__})"]
        for name in names:
            self.dropped[name] = self.dropped.get(name, 0) + 1

    @contextmanager
    def _around(self, prepared: Any) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the user's own run shows them once
            stack.enter_context(torch.enable_grad())
            if self.draws:
                stack.enter_context(seeded(self.device))
                stack.enter_context(EqualRandom())
            stack.enter_context(preserved_objects(prepared.model, prepared.root))
            yield


def _unlike(tensor: torch.Tensor) -> str:
    """What an output is that has no plain values."""
    if tensor.layout is not torch.strided:
        return f"outputs of layout {str(tensor.layout).removeprefix('torch.')}"
    return "outputs that are quantised, nested or on the device meta"


def _numbers_as_tensors(result: Any) -> Any:
    """Python floats, alone or in tuples, lists and dicts, are results too: as tensors without dimensions.

    An integer or bool beside tensors is not: it tells of them (a count, their bytes), which may differ by dtype.
    """
    if isinstance(result, float):
        return torch.tensor(result, dtype=torch.float64)
    if type(result) in (tuple, list):
        return type(result)(map(_numbers_as_tensors, result))
    if type(result) is dict:
        return {key: _numbers_as_tensors(item) for key, item in result.items()}
    return result


_LARGEST_INTEGER = torch.iinfo(torch.int64).max


def _alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], unit: float) -> bool:
    """Whether two runs on equal data differ by less than a rounding, as sums in another order may."""
    for path, tensor in one.items():
        again = other.get(path)
        if again is None or again.shape != tensor.shape:
            return False
        if not tensor.is_floating_point():
            if not torch.equal(tensor, again):
                return False
        elif tensor.numel():
            first, second = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (tensor, again))
            if float((first - second).abs().amax()) > unit * float(first.abs().amax()):
                return False
    return True


def _states(device: str) -> list[torch.Tensor]:
    """The states of the generators that a call may draw from."""
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if torch.device(device).type == "cuda" else states


def _put_back_states(device: str, states: list[torch.Tensor]) -> None:
    torch.random.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
