"""A step that raises is told and let go: nothing of it is kept alive, and no PyTorch is too old to say `memory`."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from training_loops import mlp

from ampcheck.core.subject import as_subject
from ampcheck.records.protocol import StepError
from ampcheck.torchtools.reachable import reach
from ampcheck.torchtools.snapshot import preserved
from ampcheck.training.loop import TrainingLoop


class Big:
    """Stands for what a step holds in its locals."""


def test_a_step_that_raises_keeps_nothing_of_it_alive():
    alive = []

    def step(number):
        big = Big()
        alive.append(weakref.ref(big))
        try:
            raise torch.cuda.OutOfMemoryError("out of memory")
        except RuntimeError as error:
            raise ValueError("while handling it") from error

    taken = TrainingLoop(as_subject({"model": mlp(), "step": step})).take(0)
    assert isinstance(taken, StepError)
    assert taken.line is not None
    assert alive[0]() is None


@pytest.mark.parametrize("where", ["closure", "handed over"])
def test_a_generator_without_a_state_is_left_alone(where):
    system = random.SystemRandom()

    def step(number):
        return system.random()

    given = {"random": system} if where == "handed over" else {"step": step}
    with preserved(reach({"model": mlp(), **given})) as snapshot:
        step(0)
        snapshot.restore()
