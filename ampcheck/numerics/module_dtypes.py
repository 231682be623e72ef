"""Which dtype does each module give? `assert_dtypes` holds module outputs against declared dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Run, verify
from ampcheck.numerics.execution import check_dtypes
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.restore import restoring


@dataclass(frozen=True, slots=True)
class DtypeStats:
    """The dtypes of the floating outputs of every module that ran, by module path; `""` is the root."""

    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: int = 0


def measure_dtypes(
    model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> DtypeStats:
    """Run `model(*args, **kwargs)` once, in the autocast state and grad mode of the caller, and note what modules give.

    Tuples, dicts, dataclasses and model outputs are followed. The hooks are gone afterwards, also when the model
    raises.
    """
    found: dict[str, list[str]] = {}
    count = 0

    def hook(names: list[str]) -> Any:
        def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            nonlocal count
            for _, tensor in tensors(output):
                if tensor.is_floating_point():
                    count += 1
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    for name in names:
                        if dtype not in found.setdefault(name, []):
                            found[name].append(dtype)

        return note

    paths: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(name)  # a shared module has several
    with ExitStack() as hooks:
        for module, names in paths.items():
            hooks.callback(module.register_forward_hook(hook(names)).remove)
        model(*args, **(kwargs or {}))
    return DtypeStats({name: tuple(dtypes) for name, dtypes in found.items()}, count)


@restoring
def assert_dtypes(
    model: torch.nn.Module, inputs: Any, expected: Mapping[str, torch.dtype | str], *, name: str = ""
) -> Run:
    """Assert that modules give the dtypes that `expected` declares for them.

    inputs: the arguments: a tuple, a mapping of keyword arguments, or the one argument. expected: `{pattern: dtype}`
    over module paths, `*` standing for one part of a path and `**` for any number of them (`layers.*.norm`, `**.norm`,
    `""` for the root). A pattern that no module with a floating output matches fails. Call it under the autocast that
    you mean:

        with torch.autocast("cpu", torch.bfloat16):
            assert_dtypes(model, (x,), {"layers.*.norm": torch.float32, "head": torch.bfloat16})

    Returns the run; raises `AssertionError` with every module that differs.
    """
    __tracebackhide__ = True
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"assert_dtypes needs a module, whose parts have paths; found {type(model).__name__}")
    if not expected:
        raise UsageError("assert_dtypes needs at least one pattern: with none it would look at nothing")
    declared = {pattern: format_of(dtype).name for pattern, dtype in expected.items()}
    args, kwargs = (
        ((), inputs) if isinstance(inputs, Mapping) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    )
    stats = measure_dtypes(model, args, kwargs)
    findings = check_dtypes(name or type(model).__name__, stats.modules, declared)
    return verify(
        Run(environment(), tuple(findings), Coverage({"modules": len(stats.modules), "outputs": stats.outputs}))
    )
