"""The public callables of a package, and arguments for them from names, defaults and hints."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[], tuple[Callable[..., Any], list[nn.Module], tuple[Any, ...]]]

CONSTRUCTION: list[tuple[str, Any]] = [
    (r"(num_|n_)?(attention_)?heads?|nhead|num_attention_heads|groups|num_groups", 4),
    (r"dim_?head|head_dim|attention_head_dim|rotary_dim|dim_rotary", 8),
    (r"(num_|n_)?(classes|labels|class)|num_tokens|vocab_size|codebook_size|num_embeddings|n_embed|n_e", 10),
    (r"max_seq(uence)?_len(gth)?|seq_?len(gth)?|max_len|max_position_embeddings|num_positions|context_length", 64),
    (r"depth|num_?layers|num_blocks|n_layers|num_experts|num_quantizers|num_codebooks", 2),
    (r"kernel_size|patch_size|window_size|stride|factor|upscale|scale_factor|bucket_size|block_size", 2),
    (r"levels", [8, 5, 5]),
    (r"img_size|image_size|input_resolution|feat_size", 16),
    (r"drop(out)?(_?p(rob)?)?|p|drop_prob|rate|dropout_rate", 0.1),
    (r"margin|alpha|beta|gamma|temperature|tau|weight|sigma|lambda_?|scale|smoothing|theta|base", 0.5),
    (r"eps|epsilon", 1e-6),
    (r"act(ivation)?(_fn|_layer)?|hidden_act", "gelu"),
    (r"normalized_shape|.*(dim|channels?|features|width|size|planes|chs?|d_model|hidden|embed|inner|n_embd)s?", 32),
    (r".*(bias|causal|mask)", True),
]
"""What a constructor gets for an argument without a default, by its name."""

TOKENS, IMAGE, MAP, ROWS, HEADS, VECTOR = (2, 16, 32), (2, 3, 16, 16), (2, 32, 16, 16), (8, 10), (2, 4, 16, 8), (8,)
SHAPES = (TOKENS, MAP, IMAGE, ROWS, HEADS, VECTOR)
WHOLE = re.compile(
    r"targets?|labels?|y|y_true|gt|.*_?ids?|index|indices|timesteps?|t|step|positions?|tokens|class_labels"
)
PLAIN = re.compile(r"mask|.*_mask|attn_bias|weights?|pos_weight")
IMAGES = re.compile(r"im(g|age)s?\d?|pixel_values")
PROFILES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "unit": lambda x: x.abs().clamp(max=3) / 3,
    "pixels": lambda x: (x.abs().clamp(max=3) * 85).round(),
    "large": lambda x: x * 15,
    "zero rows": lambda x: (
        x * (torch.arange(x.shape[-2] if x.dim() > 1 else x.shape[-1]) % 2).view((-1, 1) if x.dim() > 1 else (-1,))
    ),
    "same rows": lambda x: x[:1].expand_as(x).clone() if x.dim() > 1 else x,
    "small": lambda x: x * 1e-3,
}
"""Values that users have: activations, images, logits of a trained model, padding, duplicates."""


def callables(package: str) -> Iterator[tuple[str, Any]]:
    """Public modules, optimizers and functions that the package defines, each once, by qualified name."""
    root = importlib.import_module(package)
    names = [package]
    if hasattr(root, "__path__"):
        names += [info.name for info in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda _: None)]
    seen: set[int] = set()
    for name in names:
        if re.search(r"(^|\.)(tests?|testing|_\w+|convert\w*|__main__|setup|cli|commands|scripts?)(\.|$)", name):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except BaseException:  # noqa: BLE001  # an optional dependency that is absent, or a script
            continue
        for attribute, value in sorted(vars(module).items()):
            if attribute.startswith("_") or id(value) in seen or not callable(value):
                continue
            if getattr(value, "__module__", None) == name and (inspect.isclass(value) or inspect.isfunction(value)):
                seen.add(id(value))
                yield f"{name}.{attribute}", value


def construction(of: Any) -> dict[str, Any] | None:
    """Arguments for a constructor without defaults; None where a name says nothing."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(of).parameters.items():
        if (
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            or parameter.default is not parameter.empty
        ):
            continue
        known = next((value for pattern, value in CONSTRUCTION if re.fullmatch(pattern, name)), None)
        if known is None:
            return None
        arguments[name] = known
    return arguments


def _tensor(name: str, shape: tuple[int, ...], first: tuple[int, ...], whole: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    if WHOLE.fullmatch(name) and whole != "float":
        size = first[:1] if whole == "classes" else first
        return torch.randint(0, 2 if whole == "binary" else 8, size, generator=generator)
    if PLAIN.fullmatch(name):
        return torch.ones(first[:2], dtype=torch.bool)
    return torch.randn(shape, generator=generator)


def arguments(call: Callable[..., Any]) -> Iterator[tuple[Any, ...]]:
    """Arguments that a call may take: its required ones by name, in the shapes of tokens, images and logits."""
    signature = inspect.signature(call).parameters.values()
    required = [p for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    if not required and any(p.kind is p.VAR_POSITIONAL for p in signature):
        required = [inspect.Parameter("x", inspect.Parameter.POSITIONAL_ONLY)]
    names = [p.name for p in required if p.name != "self"]
    if not names or len(names) > 5:
        return
    plain = {n: v for n in names for pattern, v in CONSTRUCTION if re.fullmatch(pattern, n) and not PLAIN.fullmatch(n)}
    images = any(IMAGES.fullmatch(name) for name in names)
    for shape, whole in itertools.product(
        (IMAGE, *SHAPES) if images else SHAPES, ("classes", "same", "float", "binary")
    ):
        for scalars in (plain, {}) if plain else ({},):
            yield tuple(scalars[n] if n in scalars else _tensor(n, shape, shape, whole) for n in names)


def builder(value: Any) -> Callable[[], tuple[Callable[..., Any], nn.Module | None]] | None:
    """What makes the callable: a module with its defaults, or a function that takes tensors."""
    if inspect.isclass(value):
        if not issubclass(value, nn.Module):
            return None
        try:
            given = construction(value)
        except (TypeError, ValueError):
            return None
        if given is None:
            return None

        def module() -> tuple[Callable[..., Any], nn.Module | None]:
            torch.manual_seed(0)
            made = value(**given)
            return made, made

        return module
    return lambda: (value, None)


def first_that_runs(value: Any) -> tuple[Any, ...] | None:
    """Arguments with which the callable runs in float32 and gives finite floating results."""
    build = builder(value)
    if build is None:
        return None
    call, module = build()
    target = module.forward if module is not None else call
    for values in arguments(target):
        try:
            with torch.no_grad():
                outputs = floating(call(*(v.clone() if isinstance(v, Tensor) else v for v in values)))
        except Exception:  # noqa: BLE001  # another shape
            continue
        if outputs and all(t.isfinite().all() for t in outputs):
            return values
    return None


def floating(result: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result)
    if not leaves or any(not isinstance(leaf, Tensor) for leaf in leaves):
        leaves = list(vars(result).values()) if hasattr(result, "__dict__") else leaves
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]
