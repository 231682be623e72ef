"""How a configuration is made small: by the roles that names of fields give away, and by division alone.

Within a part of a configuration (the whole, or the text and the vision part of one model), counts of heads are divided
by one number, sizes of heads by another, and widths by the product of both, so that every relation that is a product or
a sum of them holds afterwards: `width = heads * head_dim`, `heads : kv_heads`, `expand * width = ssm_heads * ssm_dim`.
Layers are left out: one of each kind that lists by layer tell apart remains, and two at least.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

Path = tuple[str, ...]
"""The names that lead to a field of nested mappings."""

VOCABULARY, ROWS, EXPERTS, WINDOW, GRID, PIXELS = 256, 64, 8, 8, 4, 64
_HEAD, _NARROW, _LEAST = 16, 32, 8
_SEVERAL, _CHANNELS = 4, 128


class Role(str, Enum):
    """What the number of a field counts."""

    DEPTH = "layers"
    PERIOD = "periods of layers"
    HEADS = "heads"
    HEAD_DIM = "sizes of heads"
    WIDTH = "widths"
    GROUPS = "groups"
    SECTION = "sections of a head"
    VOCABULARY = "vocabulary"
    TOKEN = "token ids"
    EXPERTS = "experts"
    CHOSEN = "chosen experts"
    WINDOW = "windows"
    POSITIONS = "positions of frames"
    IMAGE = "images"
    PATCHES = "numbers of patches"


_NAMES: tuple[tuple[Role | None, str], ...] = (
    (None, r"^(id2label|label2id|quantization_config)$|ignore|version|_ratio|_scale$|loss|coefficient"),
    (Role.TOKEN, r"(^|_)(tok|token|bos|eos|pad|boi|eoi|boa|eoa|unk|mask|sep|cls)_(id|ids|index|idx)$"),
    (Role.CHOSEN, r"experts?_per_tok|(moe|experts?)_?(top_?)?k$|top_k_experts|^topk_group$"),
    (Role.EXPERTS, r"experts$|^n_group$|expert_groups?$"),
    (Role.HEAD_DIM, r"(head_?dim|dim_head|d_head|d_kv|head_size|kv_channels|rotary_dim)$"),
    (Role.HEADS, r"(^|_)heads$|(^|_)n_head(_kv)?$|kv_n_heads$"),
    (Role.PERIOD, r"(period|interval|frequency|sparse_step|layer_step|every_n_layers|first_k_dense_replace|dense_layers|shared_layers|predict_layers)$"),
    (Role.PERIOD, r"layer_(offset|id|idx)$"),
    (None, r"^(max|min)_.*(layers|depth)$|window_layers|_layers?_type|index_.*blocks|divisor"),
    (Role.DEPTH, r"(^|_)(layers?|depths?|blocks|repeats)$|layers_per_block$|layers_decoder$|^depth_|numb_of_layers$"),
    (Role.VOCABULARY, r"vocab(?!.*offset)|num_embeddings$|codebook_size$|num_embeds$"),
    (Role.WINDOW, r"window|chunk_?(size|length)|^local_attention$|chunk_length$"),
    (Role.GROUPS, r"groups$"),
    (Role.SECTION, r"section"),
    (Role.POSITIONS, r"max_source_positions$"),
    (Role.IMAGE, r"(image|img|sample|crop|spec)_size$|pinpoints$"),
    (Role.PATCHES, r"(image_tokens|tokens_per_image|image_seq_length|num_patches|num_position_embeddings|seq_len)$"),
    (None, r"^(max|min)_|^num_(?!filters|pos_feats)|kernel|stride|position|mel|per_group|feature_size|_in_|^in_c|^out_c|downscale"),
    (Role.WIDTH, r"hidden|(^|_)dims?($|_)|d_model|d_ff|d_inner|d_ssm|d_latents|width|channels|embd|embed|emb_dim|inner"),
    (Role.WIDTH, r"intermediate|ffn|feedforward|units|rank$|filters|planes|proj.*size|pos_feats|_dims?$|output_size$"),
)  # fmt: skip
_ROLES = tuple((role, re.compile(pattern)) for role, pattern in _NAMES)
_LAYER_INDICES = re.compile(r"indices|indexes|_idxs?$|layers$|layer_ids$|blocks$")
_FEATURE_LAYER = re.compile(r"feature_layers?$")
_ALONE = frozenset({"mlp_ratio", "id2label", "label2id", "task_specific_params"})


def role_of(name: str) -> Role | None:
    """The role of a field by its name; None of one that is not reduced."""
    return next((role for role, pattern in _ROLES if pattern.search(name.lower())), None)


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a field."""

    role: Role
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class _Part:
    """A mapping with its path, the fields with a role, and what heads, their sizes and widths are divided by."""

    path: Path
    fields: Mapping[str, Any]
    roles: Mapping[str, Role]
    heads: float
    sizes: float
    grid: tuple[int, int] = (0, 0)

    def of(self, *roles: Role) -> list[int]:
        """The numbers of these roles, those of lists too."""
        return [n for name, role in self.roles.items() if role in roles for n in _numbers(self.fields[name])]


def reductions(fields: Mapping[str, Any], *, alike: bool = True, whole_heads: bool = False) -> dict[Path, Change]:
    """What becomes of each field of a configuration that is made small.

    alike: all parts are divided by the same numbers, so that relations between them hold; else each by its own. whole_heads: fewer
    heads of the size that they have, for code that takes a size for granted.
    """
    parts = list(_parts(fields, (), (1.0, 1.0)))
    if alike:
        heads, sizes = _divisors([n for p in parts for n in p.of(Role.HEADS)], _all_sizes(parts), _all_widths(parts))
        parts = [replace(p, heads=heads, sizes=sizes) for p in parts]
    if whole_heads:
        parts = [replace(p, sizes=1.0) for p in parts]
    grid = next((_grids(p) for p in parts if p.of(Role.IMAGE) and _numbers(p.fields.get("patch_size"))), (0, 0))
    parts = [replace(p, grid=grid) for p in parts]
    vocabulary = min([VOCABULARY, *(n for p in parts for n in p.of(Role.VOCABULARY) if n > 8)])
    tokens = _small_tokens([n for p in parts for n in p.of(Role.TOKEN)], vocabulary)
    changes: dict[Path, Change] = {}
    for part in parts:
        layers = _layers(part)
        for name, value in part.fields.items():
            role = part.roles.get(name)
            if name in layers:
                value = layers[name]
            if role is not None and not (name in layers and isinstance(value, int)):
                value = _mapped(value, lambda n, role=role, part=part, name=name: _reduced(n, role, part, name, tokens))
            if role is Role.SECTION:
                value = _sections(part.fields[name], part.sizes)
            if value != part.fields[name]:
                changes[*part.path, name] = Change(role or Role.DEPTH, part.fields[name], value)
    return changes


def applied(fields: Mapping[str, Any], changes: Mapping[Path, Change], path: Path = ()) -> dict[str, Any]:
    """The configuration with these changes."""
    return {
        name: changes[*path, name].after
        if (*path, name) in changes
        else applied(value, changes, (*path, name))
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        else value
        for name, value in fields.items()
    }


def _parts(fields: Mapping[str, Any], path: Path, inherited: tuple[float, float]) -> Iterator[_Part]:
    """The mapping and those in it; one without heads is divided as that around it."""
    roles = {
        name: role
        for name, value in fields.items()
        if isinstance(name, str) and _numbers(value) and (role := role_of(name)) is not None
    }
    part = _Part(path, fields, roles, 1, 1)
    if part.of(Role.HEADS, Role.WIDTH):
        own = _divisors(part.of(Role.HEADS), _all_sizes([part]), _all_widths([part]))
        inherited = own if part.of(Role.HEADS) or not path else inherited
    yield _Part(path, fields, roles, *inherited)
    for name, value in fields.items():
        if isinstance(value, Mapping) and name not in _ALONE and all(isinstance(key, str) for key in value):
            yield from _parts(value, (*path, name), inherited)


def _all_sizes(parts: Sequence[_Part]) -> list[int]:
    """The sizes of heads: those that are said, and width over heads where that is whole."""
    stated = [n for part in parts for n in part.of(Role.HEAD_DIM) if n >= _LEAST]
    implied = []
    for part in parts:
        if part.of(Role.HEAD_DIM):
            continue
        heads = {name: part.fields[name] for name, role in part.roles.items() if role is Role.HEADS}
        for name, role in part.roles.items():
            if role is Role.WIDTH and re.search(r"hidden_sizes?$|d_model|embd|embed_dims?$|^dim$|hidden_dim$", name):
                for count in heads.values():
                    pairs = _paired(part.fields[name], count)
                    implied += [w // h for w, h in pairs if h > 1 and w % h == 0 and w // h >= _LEAST]
    return stated + implied


def _paired(width: Any, heads: Any) -> list[tuple[int, int]]:
    widths, counts = _numbers(width), _numbers(heads)
    if len(widths) == len(counts):
        return list(zip(widths, counts, strict=True))
    return [(w, h) for w in widths for h in counts] if 1 in (len(widths), len(counts)) else []


def _all_widths(parts: Sequence[_Part]) -> list[int]:
    return [n for part in parts for n in part.of(Role.WIDTH) if n >= _NARROW]


def _divisors(heads: Sequence[int], sizes: Sequence[int], widths: Sequence[int]) -> tuple[float, float]:
    """What counts of heads and sizes of heads are divided by."""
    several = [n for n in heads if n > 1]
    if not several:
        return 1.0, float(2 ** max(0, int(math.log2(min(widths, default=_HEAD) / _HEAD))))
    common = math.gcd(*several)
    kept = next(n for n in (4, 2, 1) if common % n == 0 and (n == 1 or max(several) * n // common <= 2 * _SEVERAL))
    for step in (4, 2):  # rotary embeddings of images split a head in four
        for divisor in _divisors_of(math.gcd(*sizes)) if sizes else ():
            small = [n // divisor for n in sizes if n % step == 0]
            if min(sizes) // divisor >= min(_HEAD, *sizes, _HEAD) and all(n % step == 0 for n in small):
                return common / kept, float(divisor)
    return common / kept, 1.0


def _divisors_of(number: int) -> list[int]:
    return [d for d in range(number, 0, -1) if number % d == 0]


def _numbers(value: Any) -> list[int]:
    """The number, or those of a list of nothing else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, (list, tuple)) and value:
        nested = [_numbers(item) for item in value]
        return [n for numbers in nested for n in numbers] if all(nested) else []
    return []


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _small_tokens(ids: Sequence[int], vocabulary: int) -> dict[int, int]:
    """Ids beyond the small vocabulary, each with one at its end that no other has."""
    taken = {n for n in ids if n < vocabulary}
    free = iter(n for n in range(vocabulary - 1, -1, -1) if n not in taken)
    return {n: next(free, vocabulary - 1) for n in sorted({n for n in ids if n >= vocabulary})}


def _reduced(number: int, role: Role, part: _Part, name: str, tokens: Mapping[int, int]) -> int:
    """A number of a role, reduced; never a larger one."""
    if role is Role.TOKEN:
        return tokens.get(number, number)
    if number <= 1 and role is not Role.PERIOD:
        return number
    if role is Role.HEADS:
        return max(1, math.ceil(number / part.heads))
    if role is Role.HEAD_DIM:
        return number if number <= _LEAST else _divided(number, part.sizes, 2)
    if role is Role.WIDTH:
        return number if number < _NARROW else _divided(number, part.heads * part.sizes, 8)
    if role is Role.GROUPS:
        depthwise = number >= _CHANNELS and number in part.of(Role.WIDTH)
        return _divided(number, part.heads * part.sizes, 8) if depthwise else math.gcd(number, _SEVERAL)
    if role is Role.IMAGE:
        before, after = part.grid if name.endswith("pinpoints") else (0, 0)
        return number * after // before if before else _side(number, part)
    if role is Role.PATCHES:
        return _patches(number, part.grid)
    if role is Role.DEPTH:
        return number if "layer" in name and name.endswith(("ids", "indices")) else min(number, 2)
    limits = {
        Role.VOCABULARY: VOCABULARY, Role.POSITIONS: ROWS, Role.PERIOD: _period(name),
        Role.EXPERTS: 2 if "group" in name else EXPERTS, Role.CHOSEN: 1 if "group" in name else 2,
        Role.WINDOW: _window(number, part),
    }  # fmt: skip
    return min(number, limits.get(role, number))


def _window(number: int, part: _Part) -> int:
    """A window that some of the data lie outside of; one in pixels holds whole patches."""
    patch = next(iter(_numbers(part.fields.get("patch_size"))), 1)
    if patch >= WINDOW and number % patch == 0:
        return GRID * patch
    return WINDOW if number > 2 * WINDOW else number


def _period(name: str) -> int:
    """Of two layers every second one may differ, the first, or none."""
    return 0 if re.search("shared|predict", name) else 1 if re.search("first_k|dense|offset|_id", name) else 2


def _divided(number: int, divisor: float, step: int) -> int:
    """The quotient, rounded up to a multiple of the step where it is not whole."""
    quotient = number / divisor
    return (
        int(quotient) if quotient.is_integer() and quotient >= step else min(number, math.ceil(quotient / step) * step)
    )


def _side(number: int, part: _Part) -> int:
    """A side of images: a few patches, or what convolutions can halve."""
    patch = next(iter(_numbers(part.fields.get("patch_size"))), 0)
    return min(number, GRID * patch if patch >= 8 else PIXELS)


def _grids(part: _Part) -> tuple[int, int]:
    """The patches along a side of an image before and after it is reduced."""
    side, patch = part.of(Role.IMAGE)[0], _numbers(part.fields["patch_size"])[0]
    return side // patch, _side(side, part) // patch


def _patches(number: int, grid: tuple[int, int]) -> int:
    """A count of patches, or of squares of patches, that the image had before and has now."""
    before, after = grid
    root = math.isqrt(number)
    if not before or root * root != number or (root < before and before % root):
        return number
    if root > before:  # as some defaults have it
        return min(number, after**2)
    return max(1, after * root // before) ** 2


def _sections(value: Any, divisor: float) -> Any:
    """Sections that add up to the size of a head, of which each is divided and the first has the rest."""
    numbers = _numbers(value)
    if not isinstance(value, (list, tuple)) or not numbers:
        return value
    rest = [max(1, int(n / divisor)) for n in numbers[1:]]
    return type(value)([max(1, int(sum(numbers) / divisor) - sum(rest)), *rest])


def _layers(part: _Part) -> dict[str, Any]:
    """The lists by layer, and of numbers of layers, for the layers that remain, and their count."""
    result: dict[str, Any] = {}
    depths = [(name, part.fields[name]) for name, role in part.roles.items() if role is Role.DEPTH]
    for depth in {value for _, value in depths if isinstance(value, int) and value > 2}:
        lists = {k: v for k, v in part.fields.items() if isinstance(v, (list, tuple)) and v and k not in _ALONE}
        by_layer = {k: v for k, v in lists.items() if len(v) == depth}
        indices = {k: v for k, v in lists.items() if k not in by_layer and _LAYER_INDICES.search(k) and _are_indices(v, depth)}  # fmt: skip
        kept = _kept(depth, by_layer, indices)
        for name, value in by_layer.items():
            result[name] = type(value)(value[n] for n in kept)
        for name, value in indices.items():
            base = int(max(value) == depth)
            result[name] = type(value)(kept.index(n - base) + base for n in value if n - base in kept)
        for name, value in depths:
            if value == depth and (len(kept) > 2 or by_layer):
                result[name] = len(kept)
    for name, value in part.fields.items():
        if _FEATURE_LAYER.search(name) and _numbers(value):
            result[name] = _mapped(value, lambda n: max(-2, min(n, 1)))
    return result


def _are_indices(value: Sequence[Any], depth: int) -> bool:
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    return whole and min(value) >= 0 and max(value) <= depth and all(a < b for a, b in pairwise(value))


def _kept(depth: int, by_layer: Mapping[str, Sequence[Any]], indices: Mapping[str, Sequence[int]]) -> list[int]:
    """The layers that remain: the first of each kind, those that are pointed at, and two at least."""
    kinds: dict[str, int] = {}
    for number, kind in enumerate(zip(*by_layer.values(), strict=True)):
        kinds.setdefault(repr(kind), number)
    kept = set(list(kinds.values())[: 2 * _SEVERAL])
    for numbers in indices.values():
        base = int(max(numbers) == depth)
        kept |= {n - base for n in (numbers if len(numbers) <= _SEVERAL else numbers[:1])}
    kept |= set([n for n in range(depth) if n not in kept][: max(0, 2 - len(kept))])
    return sorted(kept)
