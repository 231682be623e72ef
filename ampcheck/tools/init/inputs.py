"""Inputs for a model that was built, as code: by the names of forward's parameters and by the model's first layers."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from torch import nn

from ampcheck.numerics.losses import total_loss

_INTEGERS = re.compile(
    r"(input_?)?ids|idx|tokens?|indices|input_tokens|token_ids|words|sequences?|seq|text|src|tgt|trg"
)
_TARGETS = ("labels", "targets", "target")
_TIMES = ("t", "time", "times", "timestep", "timesteps", "sigma", "noise_level")
_LENGTHS = ("lengths", "lens", "seq_lens", "src_lengths", "input_lengths")
_IMAGES = ("x", "img", "image", "images", "pixel_values", "pixels", "input", "inputs")
_SIDES = (64, 224, 32, 28, 128, 256)
_SMALL_SIDES = (32, 64, 96, 128, 188, 224)
"""Sides of smaller images, 188 being the least of a U-Net of four levels without padding."""
_SMALL_LENGTHS = (16, 64, 128)
_BATCH = 2
"""Of smaller inputs: normalization over a batch needs two."""

_SHAPED = frozenset({"rand", "randn", "randint", "ones", "zeros", "full"})
"""Functions of torch whose arguments are a shape, or have one."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A proposed tensor. batch, length: of its first two dimensions, which others follow; integers: it holds ids."""

    code: str
    batch: int
    length: int = 0
    integers: bool = False


def proposed_inputs(model: nn.Module) -> Iterator[str]:
    """Arguments of `model(...)` as code, the most likely first: a tuple `(a, b)`, or a mapping of keyword arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [each for each in inspect.signature(model.forward).parameters.values() if each.kind in kinds]
    names = [each.name for each in parameters]
    required = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    if not required and names:
        main = getattr(model, "main_input_name", names[0])
        required = [main if main in names else names[0]]
    if not required:
        yield from (f"({tensor.code},)" for tensor in _firsts(model, "x"))  # forward(*args)
        return
    target = next((name for name in names if name in _TARGETS and name not in required), None)
    for first in _firsts(model, required[0]):
        others = [_others(name, first) for name in required[1:]]
        with_target = [[*required, target]] if target and first.integers else []
        for chosen in (*with_target, required):
            options = others + ([_others(chosen[-1], first)] if len(chosen) > len(required) else [])
            for rest in islice(product(*options), 12):
                yield _written(names, chosen, [first.code, *rest])


def _written(names: list[str], chosen: list[str], codes: list[str]) -> str:
    """A tuple if the parameters are the first ones in order, else a mapping."""
    if names[: len(chosen)] == chosen:
        return f"({', '.join(codes)},)" if len(codes) == 1 else f"({', '.join(codes)})"
    return "{" + ", ".join(f'"{name}": {code}' for name, code in zip(chosen, codes, strict=True)) + "}"


def _firsts(model: nn.Module, name: str) -> Iterator[_Tensor]:
    """Tensors for the first parameter."""
    sizes = [layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding)]
    is_ids = _INTEGERS.fullmatch(name) is not None
    ids = [
        _Tensor(f"torch.randint(0, {size}, (2, 16))", 2, 16, integers=True)
        for size in dict.fromkeys([*sizes[:1], *([min(sizes)] if sizes else [])])
    ]
    layers = [layer for layer in model.modules() if not list(layer.children())]
    starts_with_ids = next((isinstance(each, nn.Embedding) for each in layers if list(each.parameters())), False)
    if is_ids or starts_with_ids:
        yield from ids
    seen: set[str] = set()
    for layer in islice((each for each in layers if list(each.parameters())), 8):
        for tensor in _for_layer(layer):
            if tensor.code not in seen:
                seen.add(tensor.code)
                yield tensor
    if not (is_ids or starts_with_ids):
        yield from ids
    if name in _IMAGES:
        yield from _images(3)


def _for_layer(layer: nn.Module) -> Iterator[_Tensor]:
    """Yield what the layer accepts."""
    if isinstance(layer, nn.ConvTranspose2d):
        yield from (_Tensor(f"torch.randn(4, {layer.in_channels}, {side}, {side})", 4) for side in (1, 4, 8))
    elif isinstance(layer, nn.Conv2d):
        yield from _images(layer.in_channels)
    elif isinstance(layer, (nn.Conv1d, nn.ConvTranspose1d)):
        yield from (_Tensor(f"torch.randn(2, {layer.in_channels}, {length})", 2) for length in (256, 64, 1024))
    elif isinstance(layer, (nn.Conv3d, nn.ConvTranspose3d)):
        yield _Tensor(f"torch.randn(2, {layer.in_channels}, 16, 32, 32)", 2)
    elif isinstance(layer, nn.Linear):
        yield _Tensor(f"torch.randn(4, {layer.in_features})", 4)
        yield _Tensor(f"torch.randn(2, 16, {layer.in_features})", 2, 16)
        for channels in (1, 3):  # images that the model flattens
            side = math.isqrt(layer.in_features // channels)
            if side >= 8 and channels * side * side == layer.in_features:
                yield _Tensor(f"torch.randn(4, {channels}, {side}, {side})", 4)
    elif isinstance(layer, nn.RNNBase):
        yield _Tensor(f"torch.randn(4, 16, {layer.input_size})", 4, 16)
    elif isinstance(layer, nn.LayerNorm):
        yield _Tensor(f"torch.randn(2, 16, {layer.normalized_shape[-1]})", 2, 16)


def _images(channels: int) -> Iterator[_Tensor]:
    for side in _SIDES:
        batch = 4 if side <= 64 else 2
        yield _Tensor(f"torch.randn({batch}, {channels}, {side}, {side})", batch)


def _others(name: str, first: _Tensor) -> list[str]:
    """Tensors for a further parameter, beside the first one."""
    batch, length = first.batch, first.length
    if name in _TIMES:
        return [f"torch.rand({batch})", f"torch.randint(0, 100, ({batch},))"]
    if "mask" in name and length:
        return [f"torch.ones({batch}, {length}, dtype=torch.bool)"]
    if name in _LENGTHS and length:
        return [f"torch.full(({batch},), {length})"]
    if name in (*_TARGETS, "y", "label"):
        classes = f"torch.randint(0, 2, ({batch},))"
        return [first.code, classes] if first.integers else [classes, first.code]
    return [first.code]


def runs(model: nn.Module, inputs: object) -> bool:
    """Return whether the model computes a floating tensor from these inputs with gradients; its gradients are
    cleared."""
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)  # type: ignore[misc]
    if (loss := total_loss(output, None, finite=False)) is not None:
        loss.backward()  # type: ignore[no-untyped-call]
    got_gradient = any(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad(set_to_none=True)
    return got_gradient


def elements(code: str) -> int:
    """The number of elements of the tensors that inputs are made of."""
    return sum(math.prod(each.value for each in shape) for shape in _shapes(ast.parse(code, mode="eval")))


def smaller_inputs(code: str) -> Iterator[str]:
    """The same inputs with a smaller batch and smaller images, or shorter sequences, the smallest first."""
    shapes = _shapes(ast.parse(code, mode="eval"))
    sides = {shape[-1].value for shape in shapes if len(shape) >= 4}
    lengths = {shape[1].value for shape in shapes if 2 <= len(shape) <= 3}
    large, smaller = (max(sides, default=0), _SMALL_SIDES) if sides else (max(lengths, default=0), _SMALL_LENGTHS)
    for size in (*(each for each in smaller if each < large), large):
        tree = ast.parse(code, mode="eval")
        for shape in _shapes(tree):
            shape[0].value = min(shape[0].value, _BATCH)
            for dimension in shape[1:] if not sides else shape[2 if len(shape) >= 4 else 1 :]:
                if dimension.value == large:
                    dimension.value = size
        if (text := ast.unparse(tree)) != ast.unparse(ast.parse(code, mode="eval")):
            yield text


def _shapes(tree: ast.Expression) -> list[list[Any]]:
    """The sizes in the calls that make tensors, as nodes of the tree, of those that are plain numbers."""
    found: list[list[Any]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _SHAPED:
            continue
        tuples = [each.elts for each in node.args if isinstance(each, (ast.Tuple, ast.List))]
        sizes = [each for each in (tuples[0] if tuples else node.args) if isinstance(each, ast.Constant)]
        if sizes and all(type(each.value) is int for each in sizes):
            found.append(sizes)
    return found
