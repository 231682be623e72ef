"""The built-in subject: carried by the package, the same each time, and honest about what it starts from."""

from __future__ import annotations

import importlib
import math
import random
from importlib.resources import files

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck import Run, Subject, demo
from ampcheck.core.settings import Target
from ampcheck.core.subject import Kind
from ampcheck.target import audit_target

VOCABULARY = sorted(set(demo.corpus()))


def test_the_corpus_is_carried_by_the_package() -> None:
    place = files("ampcheck.demo") / "sonnets.txt"
    assert place.is_file()
    assert demo.corpus() == place.read_text(encoding="utf-8")
    assert 3_000 < len(demo.corpus()) < 5_000
    assert demo.corpus().count("\n\n") >= 5  # six sonnets
    assert demo.corpus().isascii()


@given(st.integers(1, 9), st.integers(1, 64), st.integers(0, 2**31))
def test_a_batch_is_characters_of_the_corpus_and_their_successors(size: int, length: int, seed: int) -> None:
    characters, targets = demo.batch(size, length, seed=seed)
    assert characters.shape == targets.shape == (size, length)
    assert characters.dtype == targets.dtype == torch.int64
    assert torch.equal(characters[:, 1:], targets[:, :-1])
    for row, successors in zip(characters.tolist(), targets.tolist(), strict=True):
        text = "".join(VOCABULARY[code] for code in [*row, successors[-1]])
        assert text in demo.corpus()


@given(st.integers(0, 2**31))
def test_a_batch_is_the_same_for_the_same_seed(seed: int) -> None:
    torch.manual_seed(seed + 1)
    first = demo.batch(3, 8, seed=seed)
    torch.manual_seed(seed + 2)
    again = demo.batch(3, 8, seed=seed)
    assert all(map(torch.equal, first, again))


def test_batches_of_different_seeds_differ() -> None:
    assert len({demo.batch(4, 16, seed=seed)[0].numpy().tobytes() for seed in range(20)}) == 20
    assert torch.equal(demo.batch(4, 16)[0], demo.batch(4, 16, seed=0)[0])


def test_no_random_state_is_touched() -> None:
    torch.manual_seed(123)
    random.seed(123)
    np.random.seed(123)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes())
    demo.subject()
    demo.batch(2, 8, seed=9)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tobytes() == before[2]


def test_the_model_does_not_depend_on_the_random_state() -> None:
    torch.manual_seed(1)
    one = demo.subject().model.state_dict()
    torch.manual_seed(2)
    two = demo.subject().model.state_dict()
    assert list(one) == list(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_it_is_two_layers_of_width_128_and_4_heads_on_8_by_64_characters() -> None:
    subject = demo.subject()
    assert subject.kind is Kind.FORWARD
    assert subject.name == "demo"
    model, (call,) = subject.model, subject.calls
    assert len(model.blocks) == 2
    assert {block.heads for block in model.blocks} == {4}
    assert model.characters.weight.shape == model.head.weight.shape == (len(VOCABULARY), 128)
    assert {tuple(block.qkv.weight.shape) for block in model.blocks} == {(3 * 128, 128)}
    assert [tuple(tensor.shape) for tensor in call.args] == [(8, 64), (8, 64)]
    assert call.kwargs == {}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_demo_of_an_audit_without_a_target_has_one_layer_which_compiles_in_less_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[Subject] = []
    audit = importlib.import_module("ampcheck.audit")  # `ampcheck.audit` is the function
    monkeypatch.setattr(audit, "judge_subject", lambda subject, **_: judged.append(subject) or Run())
    audit_target(Target(""))
    assert [len(subject.model.blocks) for subject in judged] == [1]


def test_its_loss_starts_near_the_entropy_of_a_guess() -> None:
    subject = demo.subject()
    output = subject.model(*subject.calls[0].args)
    logits, loss = output
    assert subject.loss is not None
    assert subject.loss(output) is loss
    assert logits.shape == (8, 64, len(VOCABULARY))
    assert loss.shape == ()
    assert loss.dtype is torch.float32
    assert float(loss.detach()) == pytest.approx(math.log(len(VOCABULARY)), rel=0.1)
    chosen = logits.detach().double().log_softmax(-1).gather(-1, subject.calls[0].args[1][..., None])
    assert float(loss.detach()) == pytest.approx(-float(chosen.mean()), rel=1e-5)


def test_every_parameter_gets_a_gradient() -> None:
    subject = demo.subject()
    assert subject.loss is not None
    subject.loss(subject.model(*subject.calls[0].args)).backward()
    for name, parameter in subject.model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.norm()) > 0, name


def test_it_is_causal() -> None:
    subject = demo.subject()
    characters, targets = subject.calls[0].args
    later = characters.clone()
    later[:, 40:] = (later[:, 40:] + 1) % len(VOCABULARY)
    with torch.no_grad():
        before, after = (subject.model(given, targets)[0] for given in (characters, later))
    assert torch.allclose(before[:, :40], after[:, :40], atol=1e-5)
    assert not torch.allclose(before[:, 40:], after[:, 40:], atol=1e-2)


def test_a_shorter_text_fits_too() -> None:
    assert demo.subject().model(*demo.batch(1, 5))[0].shape == (1, 5, len(VOCABULARY))
