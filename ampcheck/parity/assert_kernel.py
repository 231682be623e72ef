"""`assert_kernel`: a kernel that cannot be followed inside, such as a custom op, Triton or C++, against PyTorch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import Any

import torch

from ampcheck.checks import findings
from ampcheck.core.arguments import parse_flag, parse_integer
from ampcheck.core.environment import environment, quiet
from ampcheck.core.errors import UsageError
from ampcheck.core.files import write_atomically
from ampcheck.core.run import Coverage, Run, Table
from ampcheck.core.settings import resolve_limits
from ampcheck.core.subject import name_of
from ampcheck.facts.memory import roundoff
from ampcheck.outcome.raising import verify
from ampcheck.parity.calls import Side
from ampcheck.parity.execution import Execution, execute, run_plainly, str_of
from ampcheck.parity.functions import have_equal_bits
from ampcheck.parity.judgement import failures_of
from ampcheck.parity.kernel_cases import SIZES, Case, cases_of
from ampcheck.parity.kernels import compare_kernel
from ampcheck.records.parity import LEFT_OUT, PASSED, REFUSED, REPEATED, SAYS_NOTHING, KernelTrial, Tried
from ampcheck.records.results import UNKNOWABLE, Key
from ampcheck.shadow.compare import Result
from ampcheck.torchtools.pytree import tensors


def assert_kernel(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Any,
    *,
    sizes: Sequence[int] = SIZES,
    backward: bool = True,
    runs: int = 10,
    examples: int = 50,
    certificate: str | os.PathLike[str] | None = None,
    name: str = "",
) -> Run:
    """Assert that a kernel computes what PyTorch computes, to the roundings of one op.

        assert_kernel(my_ops.rms_norm, rms_norm_in_pytorch, lambda n: (randn(4, n), randn(n)))

    kernel: a custom op, a Triton kernel (on a CPU in its interpreter), C++; it may take 16 bits alone. reference: the
    same in PyTorch, which is followed in float64; write it in float32 inside, as one would. inputs: a tuple of
    arguments, a list of such, a function of a size that returns one, or a Hypothesis strategy. sizes: for that
    function. Each is tried as it is, in other layouts, and with values of all ranges, unevenly conditioned. backward:
    compare the gradients of arguments that require one. runs: how often the largest case runs; each run must give equal
    bits. examples: how many a strategy draws. certificate: a file for what was tried, as JSON.

    Arguments that the reference leaves alone must keep their bits, memory that a kernel does not write is NaN, and all
    zeros prove nothing. Returns the run, whose finding is `kernel`; raises `AssertionError` for a kernel that is
    refused, and `UsageError` where the reference raises on every case.
    """
    __tracebackhide__ = True
    parse_integer(runs, "runs")
    parse_integer(examples, "examples")
    parse_flag(backward, "backward")
    for role, function in (("kernel", kernel), ("reference", reference)):
        if not callable(function):
            raise UsageError(f"{role} must be a function of the arguments; found {type(function).__name__}")
    trial = partial(try_case, kernel, reference, backward=backward)
    if hasattr(inputs, "example"):
        known = list[Case]()
        tried = list(_try_examples(trial, inputs, examples))
    else:
        cases = list(cases_of(inputs, sizes))
        tried = [trial(case) for case in cases]
        known = [case for case, one in zip(cases, tried, strict=True) if one.outcome != LEFT_OUT]
    if tried and all(one.outcome == LEFT_OUT for one in tried):
        raise UsageError(f"no case can be tried: {tried[0].reason}")
    if all(one.outcome != REFUSED for one in tried):
        tried += _try_again(kernel, known, runs, backward=backward)
    done = KernelTrial(name or name_of(kernel), name_of(reference), tuple(tried), environment())
    if certificate is not None:
        write_atomically(certificate, json.dumps({"schema": 1, **asdict(done)}, indent=1) + "\n")
    return verify(_run_of(done))


def try_case(kernel: Callable[..., Any], reference: Callable[..., Any], case: Case, *, backward: bool = True) -> Tried:
    """Try a kernel on one case."""
    wants = backward and any(t.requires_grad for t in _tensors(case.arguments))
    try:
        exact = execute(
            Side("the reference", reference, case.arguments, backward=wants, grad=wants, own_gradients=True)
        )
    except UsageError as error:
        return Tried(case.name, LEFT_OUT, reason=str(error))
    if failures := failures_of(exact, resolve_limits(None)):
        return Tried(case.name, LEFT_OUT, reason=f"the reference itself loses values: {failures[0].message}"[:300])
    if wants and not any(key[0] == "gradient" for key in exact.results):
        return Tried(case.name, LEFT_OUT, reason="; ".join(exact.notes) or "the reference gives no gradient")
    try:
        with _uninitialised_is_nan():
            results = run_plainly(
                Side("the kernel", kernel, case.arguments, backward=wants, grad=wants, own_gradients=True)
            )
    except UsageError as error:
        if not any(t.numel() for t in _tensors(case.arguments)):
            return Tried(case.name, LEFT_OUT, reason=f"nothing to compute: {error}")
        return Tried(case.name, REFUSED, reason=str(error))
    return _compared(case, exact, results, backward=wants)


def _compared(case: Case, exact: Execution, results: Execution, *, backward: bool) -> Tried:
    """A run of a kernel beside that of the reference. backward: gradients of arguments that require one count."""
    wanted = {f"argument {path}" for path, t in tensors((list(case.arguments), {})) if backward and t.requires_grad}
    expected = {k: r for k, r in exact.results.items() if k[0] != "gradient" or k[1] in wanted}
    lacking = [key for key, result in expected.items() if key not in results.values and bool(result.value.any())]
    more = [key for key in results.values if key not in exact.results and key[0] in ("output", "written")]
    if lacking or more or repr(results.plain) != repr(exact.plain):
        text = f"it returns {results.plain!r:.80} and not {exact.plain!r:.80}"
        text = (
            f"it does not give {str_of(lacking[0])}"
            if lacking
            else f"it alone gives {str_of(more[0])}"
            if more
            else text
        )
        text += "".join(f"; {note}" for note in results.notes)
        return Tried(case.name, REFUSED, reason=text)
    ties = exact.freedom.ties if exact.freedom is not None else 0
    terms = exact.freedom.terms if exact.freedom is not None else 1
    each = [
        _compare_one(case, k, r, results.values[k], (ties, terms)) for k, r in expected.items() if k in results.values
    ]
    refused = [tried for tried in each if tried.outcome == REFUSED]
    passed = [tried for tried in each if tried.outcome == PASSED]
    telling = refused or passed or each
    if not telling:
        return Tried(case.name, SAYS_NOTHING, reason="there is no result")
    silent = tuple(
        tried.result for tried in each if tried.outcome == SAYS_NOTHING and not tried.result.startswith("gradient")
    )
    return replace(max(telling, key=lambda tried: tried.nearness), silent=silent)


def _compare_one(case: Case, key: Key, result: Result, value: torch.Tensor, freedom: tuple[int, int]) -> Tried:
    """One result of a kernel beside that of the reference. freedom: indices of equal values, terms of the longest
    sum."""
    (ties, terms), name, own = freedom, str_of(key), result.value
    if (value.shape, value.dtype) != (own.shape, own.dtype):
        found = f"{list(value.shape)} of {value.dtype} and not {list(own.shape)} of {own.dtype}"
        return Tried(case.name, REFUSED, name, reason=f"{name} is {found}")
    if result.reference is None:
        other = int((value != own).sum())
        text = f"{other:,} of {own.numel():,} integers of {name} differ"
        return Tried(case.name, REFUSED if other > 2 * ties else PASSED, name, reason=text if other else "")
    if value.dtype.itemsize > 4 and not value.is_complex():
        return Tried(case.name, SAYS_NOTHING, name, reason="a result in float64 has no wider format to be judged by")
    if not bool(result.reference.exact.count_nonzero()):
        return _compare_zeros(case, name, value)
    message, error, limit = compare_kernel(value, result.reference, result.roundings, terms)
    if not message and limit * roundoff(value.dtype) > UNKNOWABLE:
        return Tried(case.name, SAYS_NOTHING, name, error, limit, "the data determine nothing in this range")
    return Tried(case.name, REFUSED if message else PASSED, name, error, limit, f"{name}: {message}" if message else "")


def _compare_zeros(case: Case, name: str, value: torch.Tensor) -> Tried:
    """A result of which every exact element is zero."""
    nonzero, nans = int(value.count_nonzero()), int(value.isnan().sum())
    if not nonzero:
        return Tried(case.name, SAYS_NOTHING, name, reason="all exact results are zero or empty")
    text = f"{nonzero:,} of {value.numel():,} elements of {name} are not zero, as they must be"
    text += f": {nans:,} are NaN" if nans else ""
    return Tried(case.name, REFUSED, name, reason=text)


def _try_again(kernel: Callable[..., Any], cases: Sequence[Case], runs: int, *, backward: bool) -> Iterator[Tried]:
    """Return whether a kernel gives the same bits each time, on the largest case as it was given."""
    plain = [case for case in cases if "," not in case.name and any(t.numel() for t in _tensors(case.arguments))]
    if runs < 2 or not plain:
        return
    case = max(plain, key=lambda case: sum(t.numel() for t in _tensors(case.arguments)))
    try:
        wants = backward and any(t.requires_grad for t in _tensors(case.arguments))
        first, *others = (
            run_plainly(Side("the kernel", kernel, case.arguments, backward=wants, grad=wants, own_gradients=True))
            for _ in range(runs)
        )
    except UsageError as error:
        yield Tried(f"{case.name}, {runs} times", REFUSED, reason=f"a further run raised: {error}")
        return
    differing = sum(not _are_equal(first, other) for other in others)
    text = f"{differing} of {runs - 1} further runs gave other bits" if differing else ""
    yield Tried(f"{case.name}, {runs} times", REFUSED if differing else REPEATED, reason=text)


def _are_equal(a: Execution, b: Execution) -> bool:
    """Return whether two runs gave the same results, bit by bit."""
    if a.values.keys() != b.values.keys() or repr(a.plain) != repr(b.plain):
        return False
    return all(have_equal_bits(value, b.values[key]) for key, value in a.values.items())


def _try_examples(trial: Callable[[Case], Tried], strategy: Any, examples: int) -> Iterator[Tried]:
    """Try a kernel on what a Hypothesis strategy draws; the first that is refused is made as small as possible."""
    import hypothesis

    tried: list[Tried] = []

    class RefusedError(Exception):
        pass

    @hypothesis.settings(
        max_examples=examples, database=None, deadline=None, derandomize=True, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck), verbosity=hypothesis.Verbosity.quiet,
    )  # fmt: skip
    @hypothesis.given(strategy)
    def search(drawn: Any) -> None:
        arguments = drawn if isinstance(drawn, tuple) else (drawn,)
        tried.append(trial(Case(_described(arguments), arguments)))
        if tried[-1].outcome == REFUSED:
            raise RefusedError

    try:
        search()
    except (RefusedError, hypothesis.errors.Flaky):  # flaky: refused once, and not when Hypothesis ran it again
        yield [one for one in tried if one.outcome == REFUSED][-1]  # Hypothesis ends with the smallest
    yield from (one for one in tried if one.outcome != REFUSED)


def _described(arguments: Iterable[Any]) -> str:
    return ", ".join(f"{list(a.shape)} {a.dtype}" if isinstance(a, torch.Tensor) else repr(a)[:40] for a in arguments)


def _run_of(trial: KernelTrial) -> Run:
    columns = ("case", "outcome", "result", "error, in roundings", "limit", "reason")
    rows = [astuple(tried)[: len(columns)] for tried in trial.tried]
    table = Table(f"What was tried of {trial.kernel}", columns, rows, "kernel")
    counts = {f"{outcome} cases": len(trial.of(outcome)) for outcome in (PASSED, REFUSED)}
    coverage = Coverage({name: count for name, count in counts.items() if count})
    found = findings(trial, resolve_limits(None))
    return Run(trial.environment, tuple(found), coverage, (table,), title=f"kernel {trial.kernel}")


@contextmanager
def _uninitialised_is_nan() -> Iterator[None]:
    """Let PyTorch fill memory that nothing was written to with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]

    with quiet():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _tensors(arguments: Iterable[Any]) -> list[torch.Tensor]:
    return [tensor for _, tensor in tensors(tuple(arguments))]
