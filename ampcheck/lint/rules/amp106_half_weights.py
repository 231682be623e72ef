"""Requires: An optimizer holds float32 weights: an update below half a spacing of a float16 weight, 2**-11 of its size,
vanishes, and Adam's eps of 1e-8 is zero in float16.

Measured: In one function, a model is cast to float16 and an optimizer is built from its parameters.

Causes: .half() for speed, in place of autocast.

Fix: Leave the weights in float32 and run the model under torch.autocast; or keep float32 masters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.core.syntax import dotted
from ampcheck.lint.names import is_optimizer
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import HALF, Call, Scope, Source


def cast_and_held(source: Source, scope: Scope, dtypes: frozenset[str]) -> Iterator[tuple[Call, Call]]:
    """The casts of a model, each with the optimizer that is built from its parameters in the same function."""
    held = [(call, name) for call in scope.calls for name in _held(source, call)]
    for cast in scope.calls:
        if source.casts(cast, dtypes):
            for optimizer, name in held:
                if name == cast.receiver and not cast.excludes(optimizer):
                    yield cast, optimizer


def _held(source: Source, call: Call) -> Iterator[str]:
    """The models whose parameters an optimizer gets."""
    kind = source.resolve(call.node.func)
    if not (kind.startswith("torch.optim.") or "Adam" in call.method or is_optimizer(call.method)):
        return
    for part in (*call.node.args[:1], *(k.value for k in call.node.keywords if k.arg == "params")):
        for inner in ast.walk(part):
            if (
                isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Attribute)
                and inner.func.attr == "parameters"
            ):
                yield dotted(inner.func.value)


def _read(source: Source) -> Iterator[Report]:
    for scope in source.scopes:
        for cast, optimizer in cast_and_held(source, scope, HALF):
            message = (
                f"the optimizer of line {optimizer.line} steps float16 weights of {cast.receiver}, without masters"
            )
            yield Report(cast.line, message)


RULE = Rule(
    Check("AMP106", "lint", __doc__),
    (("half()", "float16", "torch.half"), ("optim", "Adam"), (".parameters()",)),
    _read,
    audit="ampcheck audit train.py:main --checks master-weights,stagnation",
)
