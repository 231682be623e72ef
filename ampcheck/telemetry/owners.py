"""The modules that a call of a graph runs with: blocks that share one graph are distinguished by their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ampcheck.telemetry.sites import split_source

Owner = Mapping[str, str]
"""For each object that a graph's paths start from (`L['self']`), its own path in the watched model."""

NO_OWNER: Owner = MappingProxyType({})

_ADDRESSES = 10_000
"""Addresses of weights that are remembered: some loops give a module new memory in every step."""


class TensorNames:
    """The names of a model's parameters and buffers by the address of their memory."""

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        self._roots = roots
        self._names: dict[int, list[str]] = {}
        self.read()

    def read(self) -> None:
        """Read the addresses again: parameters may have been moved or replaced."""
        self._names.clear()
        for number, root in enumerate(self._roots):
            prefix = f"{number}." if len(self._roots) > 1 else ""
            for name, tensor in (
                *root.named_parameters(remove_duplicate=False),
                *root.named_buffers(remove_duplicate=False),
            ):
                if tensor.layout is torch.strided and not tensor.is_meta:
                    self._names.setdefault(_address(tensor), []).append(prefix + name.replace("_orig_mod.", ""))

    def release(self) -> None:
        """Drop the references to the modules; the names stay."""
        self._roots = ()

    def of(self, value: object) -> list[str]:
        """Every name of a tensor; none where it belongs to no module."""
        return self._names.get(_address(value), []) if isinstance(value, torch.Tensor) else []

    def __bool__(self) -> bool:
        return bool(self._names)


@dataclass(slots=True)
class Owners:
    """The owners of the calls of one graph. sources: what each input of the graph is in the user's frame."""

    names: TensorNames
    sources: tuple[str, ...]
    _weights: tuple[tuple[int, str, str], ...] = field(init=False)
    _identifying: tuple[int, ...] | None = None
    _known: dict[tuple[int, ...], Owner] = field(default_factory=dict)
    _owners: dict[tuple[tuple[str, str], ...], Owner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        split = [(number, *split_source(source)) for number, source in enumerate(self.sources) if source]
        self._weights = tuple((number, base, path) for number, base, path in split if path)

    @property
    def has_weights(self) -> bool:
        """True if the graph takes anything that a module of the user's frame has."""
        return bool(self._weights)

    def of(self, inputs: Sequence[Any]) -> Owner:
        """The owner of a call with these inputs, identified by the addresses of weights that no two modules share; the
        same object for the same modules, whatever memory their weights have."""
        if not self._weights or not self.names:
            return NO_OWNER
        if self._identifying is None:
            self._identifying = self._identifying_inputs(inputs)
        addresses = tuple([_address(inputs[number]) for number in self._identifying])
        if addresses not in self._known:
            if len(self._known) >= _ADDRESSES:
                self._known.clear()
            owner = self._find(inputs)
            if not owner:
                self.names.read()
                owner = self._find(inputs)
            self._known[addresses] = self._owners.setdefault(tuple(sorted(owner.items())), owner)
        return self._known[addresses]

    def _identifying_inputs(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """For each base one weight with a single name; all weights of the base where there is none."""
        single: dict[str, int] = {}
        for number, base, _ in self._weights:
            if base not in single and len(self.names.of(inputs[number])) == 1:
                single[base] = number
        return tuple(number for number, base, _ in self._weights if single.get(base, number) == number)

    def _find(self, inputs: Sequence[Any]) -> Owner:
        """The full name of each weight is the path of its base, then the weight's path in the frame."""
        candidates: dict[str, list[str]] = {}
        watched = False
        for number, base, path in self._weights:
            full = self.names.of(inputs[number])
            watched = watched or bool(full)
            paths = [name.removesuffix(path).removesuffix(".") for name in full if f".{name}".endswith(f".{path}")]
            if paths:
                before = candidates.get(base, paths)
                candidates[base] = [candidate for candidate in before if candidate in paths] or before
        if watched and not candidates:  # the frame names its weights in an unknown way: watched, without a path
            return MappingProxyType({"": ""})
        return MappingProxyType({base: paths[0] for base, paths in candidates.items()})


def path_of(owner: Owner, base: str, module: str) -> str:
    """The full path of a module that a graph names from `base`. Ops of the frame itself have no base: they belong to
    the object that the frame runs, if there is but one."""
    only = next(iter(owner.values())) if not base and len(owner) == 1 else ""
    return ".".join(part for part in (owner.get(base, only), module) if part)


def _address(value: Any) -> int:
    try:
        return int(value.data_ptr())
    except (AttributeError, RuntimeError, NotImplementedError, ValueError):  # a number, or a tensor without memory
        return id(value)
