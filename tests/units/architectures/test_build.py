"""What is built from a configuration that names fields as libraries do, with modules of PyTorch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.architectures.build import Architecture, Inputs, build, wake
from ampcheck.architectures.vision import of_builder
from ampcheck.core.errors import UsageError


class Encoder(nn.Module):
    def __init__(
        self, hidden_size: int = 768, num_heads: int = 12, num_layers: int = 12, vocab_size: int = 30_000
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        layers = (nn.TransformerEncoderLayer(hidden_size, num_heads, 4 * hidden_size) for _ in range(num_layers))
        self.layers = nn.Sequential(*layers)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(input_ids))


FIELDS = {"hidden_size": 768, "num_heads": 12, "num_layers": 12, "vocab_size": 30_000}


def ids(model: nn.Module) -> Iterator[Inputs]:
    yield Inputs({"input_ids": torch.randint(0, 8, (2, 16))})


def test_a_model_is_built_small_and_runs() -> None:
    built = build(Architecture("own:Encoder", FIELDS, lambda fields: Encoder(**fields), ids))
    assert sum(weight.numel() for weight in built.model.parameters()) < 500_000
    assert built.model(**built.inputs.kwargs).shape[:2] == (2, 16)
    assert not built.model.training
    assert built.inputs.words() == "input_ids int64[2, 16]"
    assert not built.failures


def test_a_reduction_that_the_code_does_not_allow_is_left_out() -> None:
    def construct(fields: dict[str, Any]) -> Encoder:
        if fields["num_layers"] != 12:
            raise ValueError("this model has twelve layers")
        return Encoder(**fields)

    built = build(Architecture("own:Encoder", FIELDS, construct, ids))
    assert len(built.model.layers) == 12
    assert built.model.embed.embedding_dim < 768
    assert "this model has twelve layers" in built.failures[0]


def test_what_cannot_be_built_says_what_was_tried() -> None:
    def construct(fields: dict[str, Any]) -> Encoder:
        raise RuntimeError("it needs a licence")

    with pytest.raises(
        UsageError, match=r"own:Encoder could not be built small: with \d+ reductions .*it needs a licence"
    ):
        build(Architecture("own:Encoder", FIELDS, construct, ids))


def test_what_takes_other_inputs_says_which_were_tried() -> None:
    def inputs(model: nn.Module) -> Iterator[Inputs]:
        yield Inputs({"pixels": torch.randn(1, 3, 8, 8)})

    with pytest.raises(UsageError, match=r"forward\(pixels\) raised TypeError"):
        build(Architecture("own:Encoder", FIELDS, lambda fields: Encoder(**fields), inputs))


def test_a_loss_is_taken_where_the_model_has_one() -> None:
    class Output(dict):  # type: ignore[type-arg]
        loss = property(lambda self: self["loss"])

    class WithLoss(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            out = super().forward(x)
            return Output(loss=None if labels is None else nn.functional.cross_entropy(out, labels))

    def inputs(model: nn.Module) -> Iterator[Inputs]:
        x = torch.randn(2, 4)
        yield Inputs({"x": x})
        yield Inputs({"x": x, "labels": torch.tensor([0, 9])}, loss=True)  # of three classes
        yield Inputs({"x": x, "labels": torch.tensor([0, 1])}, loss=True)

    built = build(Architecture("own:WithLoss", {}, lambda _: WithLoss(4, 3), inputs))
    assert built.inputs.loss
    assert built.inputs.kwargs["labels"].tolist() == [0, 1]


def test_weights_that_hide_what_follows_are_filled() -> None:
    gate, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    nn.init.zeros_(gate.weight)
    nn.init.constant_(gate.bias, float("nan"))
    wake(nn.Sequential(gate, norm))
    assert gate.weight.abs().min() > 0
    assert gate.bias.isfinite().all()
    assert norm.bias.eq(0).all()  # a bias of zero hides nothing


def test_a_builder_hands_its_numbers_to_the_constructor() -> None:
    built = build_of(lambda: Encoder(hidden_size=512, num_heads=8))
    assert built.fields == {"hidden_size": 512, "num_heads": 8, "num_layers": 12, "vocab_size": 30_000}
    assert isinstance(built.construct({**FIELDS, "num_layers": 1}), Encoder)


def test_a_class_that_is_handed_modules_is_built_as_it_is() -> None:
    assert build_of(lambda: nn.Sequential(nn.Linear(2, 2))).fields == {}


def build_of(builder: Any) -> Architecture:
    return of_builder(builder, "own:model")
