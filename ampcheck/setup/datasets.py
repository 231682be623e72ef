"""Random images in the place of torchvision's datasets, so that a training script runs without a download."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.private import without_modes

_IMAGES = {
    "MNIST": (60_000, 10_000, (28, 28)),
    "CIFAR10": (50_000, 10_000, (32, 32, 3)),
    "SVHN": (73_257, 26_032, (3, 32, 32)),
    "STL10": (5_000, 8_000, (3, 96, 96)),
}
"""Images to train and to test with, and the shape of one, as torchvision's class keeps them; subclasses have those of
their base."""

_CLASSES = {"CIFAR100": 100, "EMNIST": 47}
"""Numbers of classes other than 10."""

_DRAWN = 500
"""Images that are drawn; a dataset repeats them."""

_FOLDER_CLASSES, _FOLDER_SIDE, _FOLDER_IMAGES = 10, 256, 10_000


@contextmanager
def random_datasets() -> Iterator[None]:
    """Inside, torchvision's datasets whose files are not there hold random images of their shapes, and nothing is
    downloaded.

    Those are MNIST and its relatives, CIFAR10, CIFAR100, SVHN, STL10, and `ImageFolder` with ImageNet's: ten classes of
    256 x 256 pixels. Numbers of images, labels and transforms are as in the dataset itself. Standard error names those
    that are random.
    """
    datasets = importlib.import_module("torchvision.datasets")
    filled = dict[str, None]()
    with ExitStack() as stack:
        stack.callback(_tell, filled)
        for name in ("MNIST", "EMNIST", "QMNIST", "CIFAR10", "SVHN", "STL10", "ImageFolder", "ImageNet"):
            make = partial(_make_random, filled, _fill_folder if name.startswith("Image") else _fill)
            stack.enter_context(replaced(getattr(datasets, name), "__init__", make))
        for name in ("MNIST", "QMNIST", "CIFAR10", "SVHN", "STL10", "DatasetFolder"):
            stack.enter_context(replaced(getattr(datasets, name), "__getitem__", _make_unobserved))
        yield


def _tell(filled: dict[str, None]) -> None:
    if filled:
        print(f"ampcheck: random images, as the files are not there: {', '.join(filled)}", file=sys.stderr, flush=True)


def _make_unobserved(original: Callable[..., object]) -> Callable[..., object]:
    def item(self: object, index: int) -> object:
        with without_modes():  # as in a worker: transforms of each image would take longer than the training
            return original(self, index)

    return item


def _make_random(
    filled: dict[str, None], fill: Callable[[Any, dict[str, Any]], None], original: Callable[..., None]
) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(list(bound.arguments.items())[1:])
        given |= given.pop("kwargs", {})
        try:
            original(self, **{**given, **({"download": False} if "download" in given else {})})
        except (RuntimeError, OSError):  # of a missing file or folder, which each dataset reports in its own way
            fill(self, given)
            filled[type(self).__name__] = None

    return init


def _fill(self: Any, given: dict[str, Any]) -> None:
    """Give a dataset random images and labels, in the attributes from which its class reads them."""
    import torch

    base = next(each.__name__ for each in type(self).__mro__ if each.__name__ in _IMAGES)
    trains = given.get("train")
    trains = "train" in given.get("split", "train") if trains is None else bool(trains)
    _begin(self, given, [str(each) for each in range(_CLASSES.get(type(self).__name__, 10))])
    self.train = trains
    train, test, shape = _IMAGES[base]
    count, generator = train if trains else test, np.random.default_rng(0)
    drawn = generator.integers(0, 256, (_DRAWN, *shape), dtype=np.uint8)
    self.data = np.resize(drawn, (count, *shape))
    labels = generator.integers(0, len(self.classes), count)
    self.targets, self.labels = labels.tolist(), labels
    if base == "MNIST":
        self.data, self.targets = torch.from_numpy(self.data), torch.from_numpy(labels)
        if hasattr(self, "compat"):  # QMNIST, of whose eight numbers of an image the first is the label
            self.targets = self.targets[:, None].repeat(1, 8)


def _begin(self: Any, given: dict[str, Any], classes: list[str]) -> None:
    base = importlib.import_module("torchvision.datasets").VisionDataset

    names = ("transforms", "transform", "target_transform")
    base.__init__(self, given.get("root", ""), **{name: given[name] for name in names if name in given})
    if "split" in given:
        self.split = given["split"]
    own = getattr(type(self), "classes", ())
    if len(own) != len(classes):
        self.classes = classes
    if not isinstance(getattr(type(self), "class_to_idx", None), property):
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}


def _fill_folder(self: Any, given: dict[str, Any]) -> None:
    _begin(self, given, [str(each) for each in range(_FOLDER_CLASSES)])
    self.samples = self.imgs = [(str(each), each % _FOLDER_CLASSES) for each in range(_FOLDER_IMAGES)]
    self.targets = [label for _, label in self.samples]
    self.loader, self.extensions = _random_image, None


def _random_image(path: str) -> object:
    from PIL import Image

    generator = np.random.default_rng(int(path))
    return Image.fromarray(generator.integers(0, 256, (_FOLDER_SIDE, _FOLDER_SIDE, 3), dtype=np.uint8))
