"""Equal random numbers for successive runs of a subject."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def seeded(device: str = "cpu") -> Iterator[None]:
    """Seed torch, numpy and random inside; the caller's streams go on afterwards as if nothing had been drawn.

    Only the streams of the CPU and of `device` are touched: to ask for more would initialise devices that nobody uses.
    """
    python, array = random.getstate(), numpy.random.get_state()
    place = torch.device(device)
    others = [] if place.type == "cpu" else [place.index or 0]
    with torch.random.fork_rng(devices=others, device_type=place.type if others else "cuda"):
        torch.default_generator.manual_seed(0)
        if others:
            getattr(torch, place.type).manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(array)
