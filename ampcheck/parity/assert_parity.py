"""`assert_parity`: two executions that should agree."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from typing import Any

import torch

from ampcheck.checks import findings
from ampcheck.core.arguments import DType, parse_choice, parse_dtypes, parse_flag
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage, Run, Table
from ampcheck.core.settings import resolve_limits
from ampcheck.core.subject import Call, name_of
from ampcheck.facts.memory import dtype_name
from ampcheck.outcome.raising import verify
from ampcheck.parity.calls import Side, side_of_target
from ampcheck.parity.circumstances import Circumstance
from ampcheck.parity.compare import RELATIONS, Subject, compare
from ampcheck.parity.invariances import as_circumstance
from ampcheck.parity.recorded import Recorded, load_record
from ampcheck.parity.tokens import Tokens
from ampcheck.records.parity import Parity
from ampcheck.torchtools.pytree import results


def assert_parity(
    a: Any,
    b: Any,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    relation: str = "rounding",
    modules: Mapping[str, str] | None = None,
    dtype: DType | None = None,
    backward: bool = True,
    tokens: str | Tokens | None = None,
    name: str = "",
) -> Run:
    """Assert that two executions agree, by bounds that follow from their own roundings.

        assert_parity(RMSNorm(64), lambda x: torch.rms_norm(x, (64,)), (x,))
        assert_parity(model, torch.compile(model), (tokens,))
        assert_parity(model, Batch(), (tokens,))          # a row alone and in a batch
        assert_parity(make_ours, make_theirs)             # functions that return (module, args)

    a, b: modules, functions, compiled or exported programs, custom ops. `b` may be a circumstance, in which `a` runs
    again (`Batch`, `Chunks`, `Padding`, ...). Without `args`, functions that
    return `(module, args)`: they are called inside the comparison, so that tables that they make are followed too.
    args, kwargs: a tuple, a mapping of keyword arguments, or the one argument; each side gets copies. relation:
    `"rounding"`: one function, each within its own bound; `"function"`: one function; `"bitwise"`: equal bits. modules:
    `{path in a: path in b}` of modules whose results are compared as well, for a port; parameters inside are compared
    by these names. dtype: what autocast casts to in both; None for none. backward: compare gradients of the arguments,
    and of parameters of one name; else both run in the caller's grad mode, and none is taken. tokens: the path of an
    output of log-probabilities, `""` for the only one, of which a table shows each token that differs most, with the
    share of the difference that rounding explains; or `Tokens`, with the band outside of which ratios of probabilities
    are counted.

    Returns the run, whose finding is `parity` (of `Ranks` those of `assert_sharded`); raises `AssertionError` where the
    two do not agree, and `UsageError` for a side that raises. Parameters, buffers and random streams are afterwards as
    before.
    """
    __tracebackhide__ = True
    circumstance = as_circumstance(b)
    if circumstance is not None and circumstance.judges:
        options = {"args": args, "kwargs": kwargs, "modules": modules, "dtype": dtype, "tokens": tokens}
        unused = [key for key, value in options.items() if value is not None]
        unused += [] if relation == "rounding" else ["relation"]
        unused += [] if backward is True else ["backward"]
        if unused:
            raise UsageError(
                f"{circumstance.name} run a by themselves and take no options; leave out {', '.join(unused)}"
            )
        return verify(circumstance.judge(a, name))
    return verify(
        judge_parity(
            *sides_of(a, b, args, kwargs, relation=relation, modules=modules, dtype=dtype, backward=backward),
            relation=relation,
            tokens=tokens,
            name=name or _name(a, b),
        )
    )


def judge_parity(
    a: Subject,
    b: Subject,
    *,
    relation: str = "rounding",
    tokens: str | Tokens | None = None,
    name: str = "",
) -> Run:
    """The run of a comparison, without raising."""
    parse_choice(relation, "relation", RELATIONS)
    bounds = resolve_limits(None)
    tokens = Tokens(tokens) if isinstance(tokens, str) else tokens
    compared = compare(a, b, relation=relation, limits=bounds, tokens=tokens)
    parity = replace(compared, subject=name or "a and b")
    seen = {"results": parity.compared, "kernel results": len(parity.kernels)}
    coverage = Coverage({sort: count for sort, count in seen.items() if count})
    found = findings(parity, bounds)
    return Run(environment(), tuple(found), coverage, tuple(_tables(parity)), title=f"parity of {parity.subject}")


def sides_of(
    a: Any,
    b: Any,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    relation: str = "rounding",
    modules: Mapping[str, str] | None = None,
    dtype: DType | None = None,
    backward: bool = True,
) -> tuple[Subject, Subject]:
    """The two sides that the arguments of `assert_parity` name. Raises `UsageError` for what is none."""
    parse_flag(backward, "backward")
    cast = None if dtype is None else getattr(torch, parse_dtypes(dtype, choices=("float16", "bfloat16"))[0])
    own, other = _named_modules(modules)
    options = {"dtype": cast, "backward": backward}
    call = _call_of(args, kwargs)
    if isinstance(a, Circumstance):
        raise UsageError(
            "a must be what runs, and b the circumstance in which it runs again; found them the other way round"
        )
    if given := next((side for side in (a, b) if isinstance(side, type) and issubclass(side, Circumstance)), None):
        raise UsageError(f"a circumstance must be an object; found the class {given.__name__}: give {given.__name__}()")
    first = _side(a, "a", call, modules=own, **options)
    circumstance = as_circumstance(b)
    if circumstance is None:
        return first, _side(b, "b", call, modules=other, **options)
    if call is None or not isinstance(first, Side) or first.function is None:
        raise UsageError(f"{circumstance.name} runs a again on the same arguments: give args")
    if modules:
        raise UsageError(f"modules= names those of a second function, and b is {circumstance.name}")
    if circumstance.splits and relation == "bitwise":  # what parts add up to has other bits
        first = replace(first, backward=False)
    assert first.function is not None
    whole, applied = circumstance.sides(first.function)
    return replace(first, function=whole), replace(first, name="b", function=applied, modules={})


def _side(value: Any, name: str, call: Call | None, **options: Any) -> Subject:
    if isinstance(value, Recorded):
        return _as_recorded(replace(value, name=name), **options)
    if isinstance(value, (str, os.PathLike)):
        target = os.fspath(value)
        if target.endswith(".npz"):
            return _as_recorded(load_record(target, name), **options)
        return side_of_target(target, name, **options)
    if not callable(value):
        raise UsageError(
            f"{name} must be a module or function, a target or a recorded execution; found {type(value).__name__}"
        )
    if call is None:
        if isinstance(value, torch.nn.Module):
            raise UsageError(f"{name} is a module: give args, or a function that returns (module, args)")
        return Side(name, build=value, **options)
    return Side(name, value, call.args, call.kwargs, **options)


def _as_recorded(
    recorded: Recorded, *, dtype: torch.dtype | None, backward: bool, modules: Mapping[str, str]
) -> Recorded:
    """A record, compared as it was made: what runs no more takes no options."""
    if modules:
        raise UsageError(f"modules name those of two sides that run; {recorded.name} is a record, which has none")
    if dtype is not None and dtype_name(dtype) != recorded.dtype:
        how = f"was recorded under autocast to {recorded.dtype}" if recorded.dtype else "was recorded without a dtype"
        raise UsageError(f"dtype must be that of a record, and {recorded.name} {how}; found {dtype_name(dtype)}")
    return recorded if backward else recorded.without_gradients()


def _call_of(args: Any, kwargs: Mapping[str, Any] | None) -> Call | None:
    if args is None:
        if kwargs is not None:
            raise UsageError("kwargs belong to args: give args=() where there are no positional ones")
        return None
    if used_up := next((value for _, value in results((args, kwargs)) if isinstance(value, Iterator)), None):
        raise UsageError(f"arguments must last for both sides; found a {type(used_up).__name__}: give a list")
    if isinstance(args, tuple):
        return Call(args, dict(kwargs or {}))
    if isinstance(args, Mapping) and all(isinstance(key, str) for key in args):
        return Call((), {**args, **(kwargs or {})})
    return Call((args,), dict(kwargs or {}))


def _named_modules(modules: Mapping[str, str] | None) -> tuple[dict[str, str], dict[str, str]]:
    """The names of the modules of both sides: those of `a`."""
    pairs = modules or {}
    if not isinstance(pairs, Mapping) or not all(isinstance(text, str) for pair in pairs.items() for text in pair):
        raise UsageError(f"modules must map paths of modules of a to paths of b; found {pairs!r:.80}")
    own, other = {path: path for path in pairs}, {path: name for name, path in pairs.items()}
    if len(other) < len(own):
        raise UsageError(f"modules must map each path of a to a path of b of its own; found {dict(pairs)!r:.120}")
    return own, other


def _name(a: Any, b: Any) -> str:
    circumstance = as_circumstance(b)
    if circumstance is not None:
        return f"{name_of(a)} and {circumstance.name}"
    first, second = (os.fspath(s) if isinstance(s, (str, os.PathLike)) else name_of(s) for s in (a, b))
    return f"{first} and {second}"


def _tables(parity: Parity) -> Iterator[Table]:
    yield from parity.tables
    if parity.pairs:
        columns = ("result", "apart, in roundings", "error of a", "limit of a", "error of b", "limit of b")
        rows = [astuple(pair) for pair in parity.pairs]
        yield Table("Results of both sides", columns, rows, "parity", note="errors are relative, against float64")
