"""The law by which a configuration is made small: by the roles that names of fields give away, and by division alone.

In a configuration, or in each of its parts, counts of heads are divided by one number, sizes of heads by another, and
widths by the product of both. Every relation that is a product or a sum of them holds afterwards:
`width = heads * head_dim`, `heads : kv_heads`, `expand * width = ssm_heads * ssm_dim`. Layers are left out: one of each
kind that lists by layer tell apart remains, and two at least.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

from ampcheck.architectures.roles import Role, mapped, numbers, role_of

Path = tuple[str, ...]
"""The names that lead to a field of nested mappings."""

VOCABULARY = 256
"""Words of a small model."""

_FRAMES, _EXPERTS, _QUERIES, _WINDOW, _GRID, _PIXELS, _SEVERAL = 64, 8, 8, 8, 4, 64, 4
_HEAD, _NARROW, _LEAST, _CHANNELS = 16, 32, 8, 128
"""The least size of heads, of widths that are reduced, of what becomes of them, and of groups that are widths."""

_MAIN_WIDTH = re.compile(r"hidden_sizes?$|d_model|embd|embed_dims?$|^dim$|hidden_dim$")
_LAYER_INDICES = re.compile(r"indices|indexes|_idxs?$|layers$|layer_ids$|blocks$")
_FEATURE_LAYER = re.compile(r"feature_layers?$")
_Rule: TypeAlias = "Callable[[int, str, _Part], int]"
_NO_PART = frozenset({"id2label", "label2id", "task_specific_params"})


@dataclass(frozen=True, slots=True)
class Change:
    """Rule for the new value of a field."""

    role: Role
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class _Part:
    """A mapping with its path and the fields that have a role. heads, sizes: what counts and sizes of heads are divided
    by. grid: patches along a side of an image, before and after."""

    path: Path
    fields: Mapping[str, Any]
    roles: Mapping[str, Role]
    heads: float = 1.0
    sizes: float = 1.0
    grid: tuple[int, int] = (0, 0)

    def of(self, *roles: Role) -> list[int]:
        """The numbers of these roles, those of lists too."""
        return [n for name, role in self.roles.items() if role in roles for n in numbers(self.fields[name])]

    @property
    def patch(self) -> int:
        """The side of a patch of an image; 0 where it is not said."""
        return next(iter(numbers(self.fields.get("patch_size"))), 0)


def reductions(fields: Mapping[str, Any], *, alike: bool = True, whole_heads: bool = False) -> dict[Path, Change]:
    """Return what becomes of each field of a configuration that is made small.

    alike: all parts are divided by the same numbers, so that relations between them hold; else each by its own.
    whole_heads: fewer heads of the size that they have, for code that takes a size for granted.
    """
    parts = list(_parts(fields, (), (1.0, 1.0)))
    if alike:
        heads, sizes = _divisors(parts)
        parts = [replace(part, heads=heads, sizes=sizes) for part in parts]
    grid = next((_grid(part) for part in parts if part.of(Role.IMAGE) and part.patch), (0, 0))
    parts = [replace(part, grid=grid, sizes=1.0 if whole_heads else part.sizes) for part in parts]
    vocabulary = min([VOCABULARY, *(n for part in parts for n in part.of(Role.VOCABULARY) if n > _LEAST)])
    tokens = _small_tokens([n for part in parts for n in part.of(Role.TOKEN)], vocabulary)
    return {path: change for part in parts for path, change in _changes(part, tokens)}


def applied(fields: Mapping[str, Any], changes: Mapping[Path, Change], path: Path = ()) -> dict[str, Any]:
    """The configuration with these changes."""
    result = {}
    for name, value in fields.items():
        inner = (*path, name)
        if inner in changes:
            result[name] = changes[inner].after
        else:
            result[name] = applied(value, changes, inner) if _is_part(name, value) else value
    return result


def _is_part(name: str, value: Any) -> bool:
    return isinstance(value, Mapping) and name not in _NO_PART and all(isinstance(key, str) for key in value)


def _parts(fields: Mapping[str, Any], path: Path, inherited: tuple[float, float]) -> Iterator[_Part]:
    """The mapping and those in it; one without heads is divided as that around it."""
    named = {name: role_of(name) for name, value in fields.items() if isinstance(name, str) and numbers(value)}
    part = _Part(path, fields, {name: role for name, role in named.items() if role is not None})
    if part.of(Role.HEADS) or (not path and part.of(Role.WIDTH)):
        inherited = _divisors([part])
    yield replace(part, heads=inherited[0], sizes=inherited[1])
    for name, value in fields.items():
        if _is_part(name, value):
            yield from _parts(value, (*path, name), inherited)


def _divisors(parts: Sequence[_Part]) -> tuple[float, float]:
    """Return what counts of heads and sizes of heads are divided by; without heads, widths are by the second alone."""
    heads = [n for part in parts for n in part.of(Role.HEADS) if n > 1]
    if not heads:
        narrowest = min((n for part in parts for n in part.of(Role.WIDTH) if n >= _NARROW), default=_HEAD)
        return 1.0, float(2 ** int(math.log2(narrowest / _HEAD)))
    common = math.gcd(*heads)
    fewest = 2 if any(1 in part.of(Role.HEADS) for part in parts) else 1  # several queries share the keys of one head
    counts = {n: (min(heads) * n // common, max(heads) * n // common) for n in (4, 2, 1) if common % n == 0}
    fitting = (n for n, (least, most) in counts.items() if fewest <= least and (most <= 2 * _SEVERAL or n == 1))
    kept = next(fitting, common)
    sizes = [n for part in parts for n in _head_sizes(part)]
    for step in (4, 2):  # rotary embeddings of images split a head in four
        for divisor in range(math.gcd(*sizes), 0, -1):
            whole = all(n % (divisor * step) == 0 for n in sizes if n % step == 0)
            if whole and math.gcd(*sizes) % divisor == 0 and min(sizes) // divisor >= min(_HEAD, *sizes):
                return common / kept, float(divisor)
    return common / kept, 1.0


def _head_sizes(part: _Part) -> list[int]:
    """The sizes of heads: those that are said, or else widths over heads."""
    if stated := part.of(Role.HEAD_DIM):
        return [n for n in stated if n >= _LEAST]
    counts = [numbers(part.fields[name]) for name, role in part.roles.items() if role is Role.HEADS]
    names = [name for name, role in part.roles.items() if role is Role.WIDTH and _MAIN_WIDTH.search(name)]
    widths = [numbers(part.fields[name]) for name in names]
    pairs = [pair for width in widths for count in counts for pair in _paired(width, count)]
    return [width // count for width, count in pairs if count > 1 and width % count == 0 and width // count >= _LEAST]


def _paired(widths: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Stage by stage where there are as many of both, else each with each of a single one."""
    if len(widths) == len(counts):
        return list(zip(widths, counts, strict=True))
    return [(width, count) for width in widths for count in counts] if 1 in (len(widths), len(counts)) else []


def _small_tokens(ids: Sequence[int], vocabulary: int) -> dict[int, int]:
    """Ids beyond the small vocabulary, each with one at its end that no other has."""
    taken = {n for n in ids if n < vocabulary}
    free = iter(n for n in range(vocabulary - 1, -1, -1) if n not in taken)
    return {n: next(free, vocabulary - 1) for n in sorted({n for n in ids if n >= vocabulary})}


def _changes(part: _Part, tokens: Mapping[int, int]) -> Iterator[tuple[Path, Change]]:
    """Yield what becomes of the fields of a part."""
    layers = _layers(part)
    for name, value in part.fields.items():
        role, small = part.roles.get(name), layers.get(name, value)
        if role is Role.TOKEN:
            small = mapped(small, lambda n: tokens.get(n, n))
        elif role is Role.SECTION and isinstance(value, (list, tuple)):
            small = _sections(value, part.sizes)
        elif role in _RULES and not (name in layers and isinstance(small, int)):
            small = mapped(small, partial(_reduced, rule=_RULES[role], name=name, part=part))
        if small != value:
            yield (*part.path, name), Change(role or Role.DEPTH, value, small)


def _reduced(number: int, rule: _Rule, name: str, part: _Part) -> int:
    return min(number, rule(number, name, part)) if number > 0 else number


def _divided(number: int, divisor: float, step: int) -> int:
    """The quotient, rounded up to a multiple of the step where it is not whole, or less than that."""
    quotient = number / divisor
    return int(quotient) if quotient.is_integer() and quotient >= step else math.ceil(quotient / step) * step


def _width(number: int, name: str, part: _Part) -> int:
    return number if number < _NARROW else _divided(number, part.heads * part.sizes, _LEAST)


def _groups(number: int, name: str, part: _Part) -> int:
    """Groups that divide every width; one for each channel follows the width."""
    depthwise = number >= _CHANNELS and number in part.of(Role.WIDTH)
    return _width(number, name, part) if depthwise else math.gcd(number, _SEVERAL) if number > _SEVERAL else number


def _window(number: int, name: str, part: _Part) -> int:
    """A window that some of the data lie outside of; in pixels, of whole patches; in patches, in ratio to the image."""
    if part.patch >= _WINDOW and number % part.patch == 0:
        return _GRID * part.patch
    before, after = part.grid
    if part.of(Role.IMAGE) and before and before % number == 0:
        return max(2, number * after // before)
    return _WINDOW if number > 2 * _WINDOW else number


def _period(number: int, name: str, part: _Part) -> int:
    """Of two layers every second one may differ, the first, or none."""
    return 0 if re.search("shared|predict", name) else 1 if re.search("first_k|dense|offset|_id", name) else 2


def _side(number: int, name: str, part: _Part) -> int:
    """A side of images: a few patches, or what convolutions can halve; sides of tiled images are multiples of it."""
    if name.endswith("pinpoints"):
        before, after = part.grid
        return number * after // before if before else number
    return _GRID * part.patch if part.patch >= _LEAST else _PIXELS


def _grid(part: _Part) -> tuple[int, int]:
    side = part.of(Role.IMAGE)[0]
    return side // part.patch, min(side, _side(side, "", part)) // part.patch


def _patches(number: int, name: str, part: _Part) -> int:
    """A count of patches, or of squares of patches, that the image had before and has now."""
    (before, after), root = part.grid, math.isqrt(number)
    if name.endswith("embedding_size") and number == before:  # of one side
        return after
    if not before or root * root != number or (root < before and before % root):
        return number
    return max(1, min(after, after * root // before)) ** 2  # some defaults have more of them than their image


_RULES: Mapping[Role | None, _Rule] = {
    Role.DEPTH: lambda number, name, part: number if name.endswith(("ids", "indices")) else 2,
    Role.PERIOD: _period,
    Role.HEADS: lambda number, name, part: max(1, math.ceil(number / part.heads)),
    Role.HEAD_DIM: lambda number, name, part: number if number <= _LEAST else _divided(number, part.sizes, 2),
    Role.WIDTH: _width,
    Role.GROUPS: _groups,
    Role.VOCABULARY: lambda number, name, part: VOCABULARY,
    Role.EXPERTS: lambda number, name, part: 2 if "group" in name else _EXPERTS,
    Role.CHOSEN: lambda number, name, part: 1 if "group" in name else 2,
    Role.WINDOW: _window,
    Role.POSITIONS: lambda number, name, part: _FRAMES,
    Role.IMAGE: _side,
    Role.PATCHES: _patches,
    Role.QUERIES: lambda number, name, part: _QUERIES,
}
"""New number of a field, by its role; never more than it was."""


def _sections(value: Sequence[int], divisor: float) -> Any:
    """Sections that add up to the size of a head, of which each is divided and the first has the rest."""
    rest = [max(1, int(n / divisor)) for n in value[1:]]
    return type(value)([max(1, int(sum(value) / divisor) - sum(rest)), *rest])  # type: ignore[call-arg]


def _layers(part: _Part) -> dict[str, Any]:
    """The lists by layer, and of numbers of layers, for the layers that remain, and their count."""
    depths = {name: part.fields[name] for name, role in part.roles.items() if role is Role.DEPTH}
    lists = {name: value for name, value in part.fields.items() if isinstance(value, (list, tuple)) and value}
    result: dict[str, Any] = {}
    for depth in {value for value in depths.values() if isinstance(value, int) and value > 2}:
        by_layer = {name: value for name, value in lists.items() if len(value) == depth}
        others = {name: value for name, value in lists.items() if name not in by_layer and _LAYER_INDICES.search(name)}
        kept = _kept(depth, by_layer, pointing := {name: v for name, v in others.items() if _points(v, depth)})
        result |= {name: type(value)(value[n] for n in kept) for name, value in by_layer.items()}
        result |= {name: _renumbered(value, kept, depth) for name, value in pointing.items()}
        if len(kept) > 2 or by_layer:
            result |= {name: len(kept) for name, value in depths.items() if value == depth}
    taken = [name for name in part.fields if _FEATURE_LAYER.search(name)]  # -2: the last but one
    return result | {name: mapped(part.fields[name], lambda n: max(-2, min(n, 1))) for name in taken}


def _renumbered(indices: Sequence[int], kept: Sequence[int], depth: int) -> Any:
    """The numbers that the layers that remain have afterwards; those that end with the depth count from 1."""
    first = int(max(indices) == depth)
    return type(indices)(kept.index(n - first) + first for n in indices if n - first in kept)  # type: ignore[call-arg]


def _points(value: Sequence[Any], depth: int) -> bool:
    """Return whether these are numbers of layers, in order."""
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    return whole and min(value) >= 0 and max(value) <= depth and all(a < b for a, b in pairwise(value))


def _kept(depth: int, by_layer: Mapping[str, Sequence[Any]], pointing: Mapping[str, Sequence[int]]) -> list[int]:
    """The layers that remain: the first of each kind, those that are pointed at, and two at least."""
    kinds: dict[str, int] = {}
    for number, kind in enumerate(zip(*by_layer.values(), strict=True)):
        kinds.setdefault(repr(kind), number)
    kept = set(list(kinds.values())[: 2 * _SEVERAL])
    for indices in pointing.values():
        first = int(max(indices) == depth)
        kept |= {n - first for n in (indices if len(indices) <= _SEVERAL else indices[:1])}
    kept |= set([n for n in range(depth) if n not in kept][: max(0, 2 - len(kept))])
    return sorted(kept)
