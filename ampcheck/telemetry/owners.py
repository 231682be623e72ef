"""Which modules a call of a graph runs with: blocks that share one compiled graph are told apart by their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ampcheck.telemetry.sites import split_source

Owner = Mapping[str, str]
"""For each object that a graph's paths start from (`L['self']`), its own path in the watched model."""

NOBODY: Owner = MappingProxyType({})

_ADDRESSES = 10_000
"""How many addresses of weights are remembered: some loops give a module new memory in every step."""


class Names:
    """The names of a model's parameters and buffers by the address of their memory."""

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        self._roots = roots
        self._names: dict[int, list[str]] = {}
        self.read()

    def read(self) -> None:
        """Look again: parameters may have been moved or replaced."""
        self._names.clear()
        for number, root in enumerate(self._roots):
            first = f"{number}." if len(self._roots) > 1 else ""
            held = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
            for name, tensor in held:
                if tensor.layout is torch.strided and not tensor.is_meta:
                    self._names.setdefault(_address(tensor), []).append(first + name.replace("_orig_mod.", ""))

    def release(self) -> None:
        """Let the modules go; the names stay."""
        self._roots = ()

    def of(self, tensor: torch.Tensor) -> list[str]:
        """Every name of a tensor; none where it belongs to no module."""
        return self._names.get(_address(tensor), [])

    def __bool__(self) -> bool:
        return bool(self._names)


@dataclass(slots=True)
class Owners:
    """Tells for the calls of one graph which owner they run with."""

    names: Names
    sources: tuple[str, ...]
    _weights: tuple[tuple[int, str, str], ...] = field(init=False)
    _telling: tuple[int, ...] | None = None
    _known: dict[tuple[int, ...], Owner] = field(default_factory=dict)
    _owners: dict[tuple[tuple[str, str], ...], Owner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        split = [(place, *split_source(source)) for place, source in enumerate(self.sources) if source]
        self._weights = tuple((place, base, path) for place, base, path in split if path)

    @property
    def has_weights(self) -> bool:
        """Whether the graph takes anything that a module of the user's frame holds."""
        return bool(self._weights)

    def of(self, inputs: Sequence[Any]) -> Owner:
        """The owner of a call with these inputs, found by the addresses of weights that no two modules share; the same
        object for the same modules, wherever their weights lie by now."""
        if not self._weights or not self.names:
            return NOBODY
        if self._telling is None:
            self._telling = self._find_telling(inputs)
        addresses = tuple([_address(inputs[place]) for place in self._telling])
        if addresses not in self._known:
            if len(self._known) >= _ADDRESSES:
                self._known.clear()
            found = self._find(inputs) or self._find_again(inputs)
            self._known[addresses] = self._owners.setdefault(tuple(sorted(found.items())), found)
        return self._known[addresses]

    def _find_telling(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """For each base the place of one weight with a single name; all weights of the base where there is none."""
        alone: dict[str, int] = {}
        for place, base, _ in self._weights:
            value = inputs[place]
            if base not in alone and isinstance(value, torch.Tensor) and len(self.names.of(value)) == 1:
                alone[base] = place
        return tuple(place for place, base, _ in self._weights if alone.get(base, place) == place)

    def _find_again(self, inputs: Sequence[Any]) -> Owner:
        self.names.read()
        return self._find(inputs)

    def _find(self, inputs: Sequence[Any]) -> Owner:
        """Where the full name of each weight is its path in the frame behind something, that is the base's own path."""
        candidates: dict[str, list[str]] = {}
        ours = False
        for place, base, path in self._weights:
            value = inputs[place]
            full = self.names.of(value) if isinstance(value, torch.Tensor) else []
            ours = ours or bool(full)
            found = [name.removesuffix(path).removesuffix(".") for name in full if f".{name}".endswith(f".{path}")]
            if found:
                before = candidates.get(base, found)
                candidates[base] = [one for one in before if one in found] or before
        if ours and not candidates:  # the frame names its weights in a way that is not known here: no path, but ours
            return MappingProxyType({"": ""})
        return MappingProxyType({base: found[0] for base, found in candidates.items()})


def path_of(owner: Owner, base: str, module: str) -> str:
    """The full path of a module that a graph names from `base`. Ops of the frame itself have no base: they belong to
    the object that the frame runs, if there is but one."""
    only = next(iter(owner.values())) if not base and len(owner) == 1 else ""
    return ".".join(part for part in (owner.get(base, only), module) if part)


def _address(value: Any) -> int:
    try:
        return int(value.data_ptr())
    except (AttributeError, RuntimeError, NotImplementedError):  # a number, or a subclass without memory of its own
        return id(value)
