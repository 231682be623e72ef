"""What the matrix runs: seven workloads in two sizes, and any model of the user's.

small   for two cores: a step of some milliseconds
large   for a large GPU
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.demo import CharTransformer, batch
from ampcheck.speed.matrix.models import Decoder, DenoisingStep, ResidualNet, VisionTransformer
from ampcheck.speed.paired import Step
from ampcheck.speed.steps import Optimizer, Way, step_of

SIZES = ("small", "large")

RATE = 1e-6
"""Of the optimizers: so low that the weights, and with them the work, are the same after thousands of steps."""


class Workload(Protocol):
    """What the matrix needs of a workload."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def trains(self) -> bool | None:
        """Whether a step goes backward; None where the model says so itself, by its mode."""

    @property
    def optimizer(self) -> Optimizer | None:
        """Makes the optimizer of a step from a list of parameters; None where nothing is updated."""

    def subject(self, size: str) -> Subject:
        """The model and its inputs, for the judges of its numbers."""

    def step(self, way: Way, *, device: str, size: str) -> Step:
        """One step, of a model of its own."""


@dataclass(frozen=True, slots=True)
class Made:
    """A workload made of a subject. make: gives it, by size. scaler: whether a GradScaler scales the loss."""

    name: str
    make: Callable[[str], Subject]
    trains: bool | None = False
    optimizer: Optimizer | None = None
    scaler: bool = False

    def subject(self, size: str) -> Subject:
        """The model and its inputs. Raises `UsageError` for another size than `SIZES`."""
        if size not in SIZES:
            raise UsageError(f"there is no size {size!r}; there are {', '.join(SIZES)}")
        return self.make(size)

    def step(self, way: Way, *, device: str, size: str) -> Step:
        """One step, of a model of its own."""
        return step_of(
            self.subject(size), way, device=device, backward=self.trains, optimizer=self.optimizer, scaler=self.scaler
        )


def workload_of(value: Any) -> Workload:
    """A built-in workload by its name, a workload as it is, or one of a user's subject of any size.

    Raises `UsageError` for an unknown name, and for a subject that runs by itself, which takes neither mode nor
    precision.
    """
    if isinstance(value, str):
        if value not in WORKLOADS:
            raise UsageError(f"there is no workload {value!r}; there are {', '.join(WORKLOADS)}")
        return WORKLOADS[value]
    if all(hasattr(value, name) for name in ("name", "trains", "optimizer", "subject", "step")):
        workload: Workload = value
        return workload
    subject = as_subject(value)
    if subject.kind in (Kind.TRAINING, Kind.CALL):
        raise UsageError(
            f"{subject.name} runs by itself, so no mode or precision can be chosen for it: give a module and its args"
        )
    return Made(subject.name, lambda size: subject, trains=None)


def _of(make: Callable[[], Any], name: str, loss: Callable[[Any], Any] | None = None) -> Subject:
    """A subject whose weights and data are the same whenever it is made."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Subject(make(), name=name, loss=loss)


def _frozen(model: torch.nn.Module) -> torch.nn.Module:
    """As it is served: in evaluation mode, and nothing is trained."""
    return model.eval().requires_grad_(False)


def _decoding(size: str) -> Subject:
    layers, width, heads, sequences, length = (3, 192, 4, 2, 128) if size == "small" else (24, 1024, 16, 4, 2048)
    vocabulary = 1024 if size == "small" else 32000

    def make() -> Any:
        model = Decoder(layers=layers, width=width, heads=heads, vocabulary=vocabulary, batch=sequences, length=length)
        tokens = torch.randint(0, vocabulary, (4, sequences, 1))
        return _frozen(model), [(one, torch.tensor([length // 2 + place])) for place, one in enumerate(tokens)]

    return _of(make, "decoding")


def _batched(size: str) -> Subject:
    layers, width, heads, many, length = (2, 192, 4, 4, 64) if size == "small" else (12, 1024, 16, 32, 512)

    def make() -> Any:
        model = CharTransformer(layers=layers, width=width, heads=heads, length=length)
        return _frozen(model), batch(many, length)

    return _of(make, "batched inference")


def _convolutional(size: str) -> Subject:
    def make() -> Any:
        if size == "small":
            model, pictures = ResidualNet(width=16, stages=(2, 2, 2), classes=10, stem=1), torch.randn(4, 3, 32, 32)
        else:
            model = ResidualNet(width=64, stages=(3, 4, 6, 3), classes=1000, stem=4)
            pictures = torch.randn(64, 3, 224, 224)
        return _frozen(model), (pictures,)

    return _of(make, "convolutional net")


def _vision(size: str) -> Subject:
    def make() -> Any:
        if size == "small":
            model = VisionTransformer(size=64, patch=8, layers=3, width=128, heads=4, classes=10)
            pictures = torch.randn(4, 3, 64, 64)
        else:
            model = VisionTransformer(size=224, patch=16, layers=12, width=768, heads=12, classes=1000)
            pictures = torch.randn(64, 3, 224, 224)
        return _frozen(model), (pictures,)

    return _of(make, "vision transformer")


def _diffusion(size: str) -> Subject:
    width, heads, many, side = (32, 4, 2, 16) if size == "small" else (320, 8, 8, 64)

    def make() -> Any:
        model = DenoisingStep(channels=4, width=width, heads=heads)
        return _frozen(model), (torch.randn(many, 4, side, side), torch.linspace(0.2, 0.8, many))

    return _of(make, "diffusion step")


def _training(size: str) -> Subject:
    layers, width, heads, many, length = (2, 128, 4, 4, 32) if size == "small" else (12, 768, 12, 16, 512)

    def make() -> Any:
        return CharTransformer(layers=layers, width=width, heads=heads, length=length), batch(many, length)

    return _of(make, "training", loss=_own_loss)


def _own_loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return output[1]


def _adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


WORKLOADS: Mapping[str, Workload] = {
    made.name: made
    for made in (
        Made("decoding", _decoding),
        Made("batched inference", _batched),
        Made("convolutional net", _convolutional),
        Made("vision transformer", _vision),
        Made("diffusion step", _diffusion),
        Made("training", _training, trains=True, optimizer=_adamw),
        Made("training, scaled", _training, trains=True, optimizer=_adamw, scaler=True),
    )
}
"""By name. `training, scaled` is `training` with a GradScaler, in every precision, so that its cost can be read."""
