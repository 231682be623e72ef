"""Parameters that get gradients and that no optimizer trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ampcheck.training.loop import TrainingLoop, parameters_of


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What the optimizers of a loop leave out. All names are those of parameters.

    replaced: of a model, with gradients that nobody uses; for each, an optimizer steps another parameter of its shape
    that is in no module and never has a gradient. narrow: all those in 16 bits that train, where the optimizers take
    the ones in float32 and others are frozen. without: those that an optimizer steps, whose gradient is None whenever
    backward reaches them, and that never change.
    """

    replaced: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def left_out(
    loop: TrainingLoop,
    reached: Mapping[int, bool],
    stepped: Mapping[int, bool],
    unchanged: Collection[str],
) -> LeftOut:
    """Compare the parameters that get gradients with those that optimizers hold.

    reached, stepped: by the id of a parameter that backward has reached, or that an optimizer has stepped, whether it
    has ever had a gradient then. unchanged: names of parameters whose bits never changed.
    """
    parameters = dict(loop.parameters())
    in_modules = {id(p) for module in loop.reached.modules.values() for p in module.parameters()}
    optimized = {*stepped, *(id(p) for optimizer in loop.optimizers.values() for p in parameters_of(optimizer))}
    trained = {name: p for name, p in parameters.items() if p.requires_grad and reached.get(id(p))}
    unused = {name: p for name, p in trained.items() if id(p) in in_modules - optimized and name in unchanged}
    orphans = [
        p.shape
        for p in parameters.values()
        if p.requires_grad and stepped.get(id(p)) is False and not reached.get(id(p)) and id(p) not in in_modules
    ]
    replaced = [name for name, p in unused.items() if p.shape in orphans]
    without = [
        name
        for name, p in parameters.items()
        if name in unchanged and reached.get(id(p)) is False and stepped.get(id(p)) is False
    ]
    taken = [p for p in trained.values() if id(p) in optimized]
    by_width = (
        {name for name, p in trained.items() if p.is_floating_point() and p.itemsize == 2} == unused.keys()
        and any(p.dtype is torch.float32 for p in taken)
        and any(not p.requires_grad for p in parameters.values() if id(p) in in_modules)
    )
    return LeftOut(tuple(replaced), tuple(unused) if by_width else (), tuple(without))
