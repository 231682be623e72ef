"""Circumstances in which a function must give the same: in parts, alone and in a batch, with other threads, again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from ampcheck.core.arguments import parse_integer
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.parity.arguments import (
    Inputs,
    has_dim,
    is_as_long,
    length_of,
    map_named,
    named_arguments,
    own,
    parts_of,
    require_inputs,
    require_parts,
)
from ampcheck.torchtools.pytree import map_tensors, tensors

Function: TypeAlias = Callable[..., Any]


class Circumstance(ABC):
    """Stand-in for the second function of `assert_parity`: `applied(f)` must agree with `reference(f)`."""

    __slots__ = ()
    splits: ClassVar[bool] = False
    """True if it adds up what the whole computes at once, so that gradients of parameters have other bits."""
    judges: ClassVar[bool] = False
    """True if it runs and compares the subject by itself, in other processes."""

    @property
    def name(self) -> str:
        """Name in findings."""
        return self._title()

    @abstractmethod
    def _title(self) -> str: ...

    @abstractmethod
    def applied(self, function: Function) -> Function:
        """The function in this circumstance, with the arguments of the function itself."""

    def reference(self, function: Function) -> Function:
        """Return what it is compared with: the function itself."""
        return function

    def judge(self, subject: Any, name: str) -> Run:
        """The run of a comparison that the circumstance makes by itself, where it `judges`."""
        raise NotImplementedError

    def sides(self, function: Function) -> tuple[Function, Function]:
        """What it is compared with, which runs first, and the function in this circumstance."""
        return self.reference(function), self.applied(function)


@dataclass(frozen=True, slots=True)
class Batch(Circumstance):
    """Rows of a batch, `size` at a time, give what they give in the whole batch.

        assert_parity(model, Batch(), (tokens,))                      # each row alone
        assert_parity(model, Batch(3), (tokens,), relation="bitwise")  # batch-invariant kernels

    Tensors among the arguments whose dimension `dim` is as long as that of the first are split, others are passed
    whole; `inputs` names those that are split, by position or keyword: `(0, "mask")`. Each output must have the rows
    along `dim`.
    """

    size: int = 1
    dim: int = 0
    inputs: Inputs = None
    splits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        parse_integer(self.size, "size of Batch")
        _require_dim(self)
        require_inputs(self)

    def _title(self) -> str:
        return "rows of a batch alone" if self.size == 1 else f"{self.size} rows of a batch at a time"

    def applied(self, function: Function) -> Function:
        """The function on parts of its batch, whose outputs are joined."""

        def in_parts(*args: Any, **kwargs: Any) -> Any:
            length = length_of(named_arguments(self, args, kwargs), self.dim)
            parts = parts_of(args, kwargs, self.size, self.dim, self.inputs, length)
            return own(_joined, [function(*a, **k) for a, k, _ in parts], self.dim)

        return in_parts


@dataclass(frozen=True, slots=True)
class Chunks(Circumstance):
    """A sequence in chunks with a state, such as a cache of keys and values, gives what the whole sequence gives.

        assert_parity(model, Chunks(1), (tokens,))           # decode against the full forward of a transformers model
        assert_parity(model, Chunks(16), (tokens,))          # prefill in parts
        assert_parity(rnn, Chunks(8, step=lambda f, x, h: f(x, h)), (x,))

    step: `step(function, chunk, state) -> (output, state)`, the state of the first chunk is None; by default that of a
    transformers model, by `past_key_values`. The sequence is the first argument, along `dim`.
    """

    splits: ClassVar[bool] = True
    size: int = 1
    dim: int = 1
    step: Callable[[Function, torch.Tensor, Any], tuple[Any, Any]] | None = None

    def __post_init__(self) -> None:
        parse_integer(self.size, "size of Chunks")
        _require_dim(self)
        if self.step is not None and not callable(self.step):
            raise UsageError(f"step of Chunks must be step(function, chunk, state); found {self.step!r:.60}")

    def _title(self) -> str:
        return "decoding step by step" if self.size == 1 else f"chunks of {self.size}"

    def applied(self, function: Function) -> Function:
        """The function chunk by chunk, whose outputs are joined."""
        step = self.step or _cached_step

        def in_chunks(*given: Any, **kwargs: Any) -> Any:
            sequence, args = _sequence(given, kwargs)
            state, outputs = None, []
            require_parts(sequence.shape[self.dim], self.size, self.dim)
            for chunk in own(torch.split, sequence, self.size, self.dim):
                output, state = _stepped(step(_with(function, args, kwargs), chunk, state))
                outputs.append(output)
            return own(_joined, outputs, self.dim)

        return in_chunks

    def reference(self, function: Function) -> Function:
        """The function on the whole sequence, without the state that it returns."""
        step = self.step or _cached_step

        def whole(*given: Any, **kwargs: Any) -> Any:
            sequence, args = _sequence(given, kwargs)
            return _stepped(step(_with(function, args, kwargs), sequence, None))[0]

        return whole


@dataclass(frozen=True, slots=True)
class Microbatches(Circumstance):
    """The mean of a loss over micro-batches, and its gradient, are those of the whole batch.

        assert_parity(loss_of_batch, Microbatches(4), (inputs, targets))

    The function returns a loss. A mean over tokens is not the mean over micro-batches that hold different numbers of
    tokens.
    count: of micro-batches, of rows along `dim`, which are weighted by their rows.
    """

    count: int = 2
    dim: int = 0
    inputs: Inputs = None
    splits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        parse_integer(self.count, "count of Microbatches", 2)
        _require_dim(self)
        require_inputs(self)

    def _title(self) -> str:
        return f"{self.count} micro-batches"

    def applied(self, function: Function) -> Function:
        """The mean of what the function gives of its micro-batches."""

        def accumulated(*args: Any, **kwargs: Any) -> Any:
            rows = length_of(named_arguments(self, args, kwargs), self.dim)
            losses = []
            for a, k, share in parts_of(args, kwargs, -(-rows // self.count), self.dim, self.inputs, rows):
                loss = function(*a, **k)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise UsageError(
                        f"Microbatches needs a function that returns a loss of one element; found {_shown(loss)}"
                    )
                losses.append((loss, share))
            return own(_weighted_sum, losses)

        return accumulated


@dataclass(frozen=True, slots=True)
class Permutation(Circumstance):
    """Elements of every input in another order along `dim` give the outputs in this order."""

    dim: int = 1

    def __post_init__(self) -> None:
        _require_dim(self)

    def _title(self) -> str:
        return f"a permutation along dimension {self.dim}"

    def applied(self, function: Function) -> Function:
        """The function of permuted inputs, its outputs in the order of before."""

        def permuted(*args: Any, **kwargs: Any) -> Any:
            length = length_of((args, kwargs), self.dim)
            require_parts(length, 1, self.dim)
            order = torch.randperm(length, generator=torch.Generator().manual_seed(length))
            if torch.equal(order, torch.arange(length)):
                order = order.roll(1)

            def shuffled(tensor: torch.Tensor, index: torch.Tensor = order) -> torch.Tensor:
                return tensor.index_select(self.dim, index) if is_as_long(tensor, self.dim, length) else tensor

            args, kwargs = own(map_named, shuffled, args, kwargs)
            back = order.argsort()
            return own(map_tensors, lambda tensor: shuffled(tensor, back), function(*args, **kwargs))

        return permuted


@dataclass(frozen=True, slots=True)
class Threads(Circumstance):
    """Another number of threads gives the same. Where the process has `count` already, one more is compared with it."""

    count: int = 1

    def __post_init__(self) -> None:
        parse_integer(self.count, "count of Threads")

    def _title(self) -> str:
        return f"{self.count} thread{'s' if self.count > 1 else ''}"

    def applied(self, function: Function) -> Function:
        """The function with so many threads."""
        return _with_threads(function, self.count)

    def reference(self, function: Function) -> Function:
        """The function with the threads of the process, or with one more."""
        usual = torch.get_num_threads()
        return _with_threads(function, usual if usual != self.count else usual + 1)


@dataclass(frozen=True, slots=True)
class Repeat(Circumstance):
    """The same call again gives the same: with `relation="bitwise"`, determinism."""

    def _title(self) -> str:
        return "the same call again"

    def applied(self, function: Function) -> Function:
        """The function itself."""
        return lambda *args, **kwargs: function(*args, **kwargs)


def _with_threads(function: Function, count: int) -> Function:
    """A function that runs with so many threads."""

    def threaded(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(before)

    return threaded


def _cached_step(function: Function, chunk: torch.Tensor, state: Any) -> tuple[Any, Any]:
    """A step of a transformers model with its cache of keys and values."""
    try:
        output = function(chunk, past_key_values=state, use_cache=True)
        values = output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state
        return values, output.past_key_values
    except (TypeError, AttributeError) as error:
        raise UsageError(
            "Chunks needs step(function, chunk, state) -> (output, state) for a function that is no transformers "
            f"model: {error}"
        ) from error


def _sequence(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Sequence[Any]]:
    """The sequence, which is the first argument, and the other positional ones; a keyword is taken out of `kwargs`."""
    first, rest = (args[0], args[1:]) if args else (kwargs.pop(next(iter(kwargs), ""), None), ())
    if not isinstance(first, torch.Tensor):
        raise UsageError(f"Chunks needs a sequence as the first argument; found {_shown(first)}")
    return first, rest


def _with(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Function:
    return lambda first, *more, **options: function(first, *(more or args), **{**kwargs, **options})


def _stepped(result: Any) -> tuple[Any, Any]:
    """Return the output and the state of a step. A tensor would be taken apart along its first dimension."""
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise UsageError(f"step of Chunks must return (output, state), with None for no state; found {_shown(result)}")
    return result[0], result[1]


def _weighted_sum(terms: Sequence[tuple[torch.Tensor, float]]) -> Any:
    return sum(value * weight for value, weight in terms)


def _joined(outputs: Sequence[Any], dim: int) -> Any:
    """Outputs of parts as one: each tensor is concatenated along `dim`."""
    named = [dict(tensors(output)) for output in outputs]
    if any(one.keys() != named[0].keys() for one in named):
        raise UsageError("the parts must give the same outputs")
    for path, tensor in named[0].items():
        if not has_dim(tensor, dim):
            raise UsageError(
                f"output {path or ''} has no dimension {dim} along which parts are joined: shape {list(tensor.shape)}"
            )
    joined = iter([torch.cat([one[path] for one in named], dim) for path in named[0]])
    return map_tensors(lambda tensor: next(joined), outputs[0])


def _require_dim(circumstance: Any) -> None:
    if type(circumstance.dim) is not int:
        raise UsageError(f"dim of {type(circumstance).__name__} must be a whole number; found {circumstance.dim!r:.40}")


def _shown(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
