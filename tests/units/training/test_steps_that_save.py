"""A step may save and copy what it trains, however it calls PyTorch, while it is listened to."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from training_loops import mlp

from ampcheck.core.subject import as_subject
from ampcheck.records.protocol import Act
from ampcheck.stream import calls
from ampcheck.torchtools.snapshot import preserved
from ampcheck.training.gradients.watch import captured
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.protocol import recorder as recording
from ampcheck.training.protocol.recorder import Recorder

EMPTY = inspect.Parameter.empty
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def loop_of(model, step=lambda number: 0.0):
    return TrainingLoop(as_subject({"model": model, "step": step}))


def subscribers(monkeypatch):
    found = {}
    monkeypatch.setattr(recording, "subscribed", lambda **kinds: found.update(kinds))
    Recorder(loop_of(mlp())).listening()
    for kind, subscriber in found.items():
        for owner, name in calls._KINDS[kind].places():
            yield f"{owner.__name__}.{name}", vars(owner)[name], subscriber, isinstance(owner, type)


def test_subscribers_take_what_the_originals_take_by_position_and_by_name(monkeypatch):
    found = list(subscribers(monkeypatch))
    assert len(found) > 10
    for name, original, wrapper, method in found:
        ours, theirs = inspect.signature(wrapper), inspect.signature(original)
        first = int(method)  # `self`, which nobody passes by name
        named = [one for one in list(theirs.parameters.values())[first:] if one.kind in NAMED]
        receiver = [object()] * first
        for positions in range(len(named) + 1):
            if any(one.kind is inspect.Parameter.KEYWORD_ONLY for one in named[:positions]):
                break
            given = receiver + [object()] * positions
            for rest in (named[positions:], [one for one in named[positions:] if one.default is EMPTY]):
                kwargs = {one.name: object() for one in rest}
                theirs.bind(*given, **kwargs)
                bound = ours.bind(*given, **kwargs)
                others = bound.arguments.get("kwargs", bound.arguments.get("__", {}))
                assert kwargs.keys() <= bound.arguments.keys() | others.keys(), name


@pytest.mark.parametrize("by_name", [False, True])
def test_a_checkpoint_is_heard_of_however_save_is_called(by_name):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(TrainingLoop(as_subject({"model": model, "optimizer": optimizer, "step": lambda i: 0.0})))
    content, file = {"optimizer": optimizer.state_dict()}, io.BytesIO()
    with recorder.listening():
        if by_name:
            torch.save(obj=content, f=file)
        else:
            torch.save(content, file)
    assert [event.act for event in recorder.events] == [Act.CHECKPOINT]
    file.seek(0)
    assert torch.load(file, weights_only=True)["optimizer"] == content["optimizer"]


def test_a_step_may_save_and_copy_the_whole_model_while_its_gradients_are_captured():
    model = mlp()
    inputs = torch.ones(2, model[0].in_features)
    twins, seen = [], []

    def step(number):
        model(inputs).sum().backward()
        file = io.BytesIO()
        torch.save(model, file)
        torch.save(dict(model.named_parameters()), io.BytesIO())
        file.seek(0)
        twins.extend((torch.load(file, weights_only=False), copy.deepcopy(model)))
        return 0.0

    loop = loop_of(model, step)
    with preserved(loop.reached), captured(loop, lambda name, grad: seen.append(name)):
        taken = loop.take(0)
        assert taken == 0.0, taken
        heard = len(seen)
        assert heard
        for twin in twins:
            assert torch.equal(twin(inputs), model(inputs))
            twin(inputs).sum().backward()
        assert len(seen) == heard, "a copy is listened to"
