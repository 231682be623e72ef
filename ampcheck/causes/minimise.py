"""The smallest set of modules that must stay in float32 for a subject to pass, as code to paste.

The set is found by delta debugging (A. Zeller and R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input,
2002) on the tree of modules (G. Misherghi and Z. Su, HDD: Hierarchical Delta Debugging, 2006). What is tried is what is
printed: every trial runs the code of `float32_code` on a copy of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampcheck.core.subject import Kind, Subject
from ampcheck.records.blame import Minimised
from ampcheck.torchtools.copying import prepare

_AUTOCAST = '''
def forward_in_float32(self, *args, **kwargs):
    with torch.autocast({device!r}, enabled=False):
        return type(self).forward(self, *cast(args), **cast(kwargs))


def keep_in_float32(model):
    """Run the modules of FLOAT32 without autocast, on inputs in float32."""
    for name in FLOAT32:
        module = model.get_submodule(name)
        module.forward = types.MethodType(forward_in_float32, module)
    return model
'''

_NATIVE = '''
def forward_in_float32(self, *args, **kwargs):
    return type(self).forward(self, *cast(args), **cast(kwargs))


def forward_in_own_dtype(self, *args, **kwargs):
    dtype = next(self.parameters(recurse=False)).dtype
    return type(self).forward(self, *cast(args, dtype), **cast(kwargs, dtype))


def keep_in_float32(model):
    """Bring the modules of FLOAT32 to float32; every other layer casts what it gets to the dtype of its weights."""
    kept = [model.get_submodule(name).float() for name in FLOAT32]
    for module in model.modules():
        weight = next(module.parameters(recurse=False), None)
        is_layer = weight is not None and weight.is_floating_point() and next(module.children(), None) is None
        if module in kept:
            module.forward = types.MethodType(forward_in_float32, module)
        elif is_layer:
            module.forward = types.MethodType(forward_in_own_dtype, module)
    return model
'''

_CODE = """import types

import torch

FLOAT32 = {names}


def cast(value, dtype=torch.float32):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in (torch.float16, torch.bfloat16, torch.float32) else value
    if type(value) in (list, tuple):
        return type(value)(cast(item, dtype) for item in value)
    return {{key: cast(item, dtype) for key, item in value.items()}} if type(value) is dict else value

{rest}"""


def float32_code(names: Sequence[str], device: str, *, native: bool) -> str:
    """Python that defines `keep_in_float32(model)`: it changes the named modules of a model in place and returns it.

    names: dotted paths, `""` for the model itself. device: whose autocast is switched off. native: the model is kept in
    16 bits and runs without autocast; then other layers cast what kept ones hand them in float32. Needs only PyTorch;
    the changed model can be copied, compiled and trained, and its parameters keep their names.
    """
    rest = _NATIVE if native else _AUTOCAST.format(device=torch.device(device).type)
    return _CODE.format(names=json.dumps(list(names)), rest=rest)


def subject_in_float32(subject: Subject, code: str, *, device: str = "cpu") -> Subject:
    """A copy of the subject whose model the code of `float32_code` has changed."""
    prepared = prepare(subject, device=device)
    space: dict[str, Any] = {}
    exec(compile(code, "<kept in float32>", "exec"), space)
    space["keep_in_float32"](prepared.root)
    model = list(prepared.model) if subject.kind is Kind.REGIONAL else prepared.model
    return replace(subject, shape=(model, *subject.shape[1:]))


class _SpentError(Exception):
    """The budget of runs is used up."""


@dataclass(slots=True)
class _Trials:
    """Which sets pass, each tried once."""

    passes: Callable[[tuple[str, ...]], bool]
    budget: int
    known: dict[frozenset[str], bool] = field(default_factory=dict)
    best: tuple[str, ...] | None = None

    def __call__(self, names: Iterable[str]) -> bool:
        chosen = tuple(sorted(names))
        key = frozenset(chosen)
        if key not in self.known:
            if len(self.known) >= self.budget:
                raise _SpentError
            self.known[key] = self.passes(chosen)
        if self.known[key]:
            self.best = chosen
        return self.known[key]


def smallest_set(
    modules: Collection[str],
    passes: Callable[[tuple[str, ...]], bool],
    *,
    guesses: Iterable[Collection[str]] = (),
    budget: int = 60,
) -> Minimised:
    """The smallest set of modules that `passes`.

    modules: dotted paths that may be kept; keeping one keeps all below it. guesses: sets to start from, the first that
    passes; everything is the last. The set that is found is minimal in its tree: no module can be left out, and none be
    replaced by a part of its children.
    """
    trials = _Trials(passes, budget)
    try:
        starts = [_outermost(set(guess) & set(modules)) for guess in guesses] + [_outermost(modules)]
        start = next((names for names in starts if names and trials(names)), None)
        if start is None:
            return Minimised(None, len(trials.known), True)
        found = _minimal(_narrowed(_minimal(start, trials), modules, trials), trials)
        found = _minimal(_gathered(found, modules, trials), trials)
        return Minimised(tuple(sorted(found)), len(trials.known), True)
    except _SpentError:
        return Minimised(trials.best, len(trials.known), False)


def _minimal(names: Sequence[str], passes: Callable[[Iterable[str]], bool]) -> tuple[str, ...]:
    """Delta debugging: a part of `names`, which passes, that no longer does when any one of it is left out."""
    names, parts = tuple(names), 2
    while len(names) > 1:
        size = -(-len(names) // parts)
        chunks = [names[start : start + size] for start in range(0, len(names), size)]
        rests = [tuple(name for name in names if name not in chunk) for chunk in chunks]
        smaller = next((part for part in (*chunks, *rests) if part != names and passes(part)), None)
        if smaller is not None:
            parts = 2 if smaller in chunks else max(parts - 1, 2)
            names = smaller
        elif parts >= len(names):
            break
        else:
            parts = min(2 * parts, len(names))
    return names


def _narrowed(names: Sequence[str], modules: Collection[str], passes: Callable[[Iterable[str]], bool]) -> list[str]:
    """Each module replaced by those of its children that suffice, down to the leaves."""
    found, waiting = list(names), list(names)
    while waiting:
        name = waiting.pop()
        children = _children(name, modules)
        rest = [other for other in found if other != name]
        if children and passes((*rest, *children)):
            enough = _minimal(children, lambda some, rest=rest: passes((*rest, *some)))  # type: ignore[misc]
            found = [*rest, *enough]
            waiting.extend(enough)
    return found


def _gathered(names: Sequence[str], modules: Collection[str], passes: Callable[[Iterable[str]], bool]) -> list[str]:
    """Modules all of whose children are kept, in place of these."""
    found = list(names)
    for name in sorted(modules, key=lambda path: path.count(".") + bool(path), reverse=True):
        children = _children(name, modules)
        whole = [*(other for other in found if other not in children), name]
        if len(children) > 1 and set(children) <= set(found) and passes(whole):
            found = whole
    return found


def _children(name: str, modules: Collection[str]) -> list[str]:
    """The modules below `name` with none of `modules` between."""
    below = [other for other in modules if other != name and _inside(other, name)]
    return [one for one in below if not any(one != other and _inside(one, other) for other in below)]


def _outermost(names: Collection[str]) -> tuple[str, ...]:
    """Without what lies inside another."""
    return tuple(sorted(n for n in set(names) if not any(n != other and _inside(n, other) for other in names)))


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")
