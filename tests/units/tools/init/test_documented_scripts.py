"""Training scripts run as they are documented, with small batches, and on random images of the shapes of their data."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from tools.init.repositories import write

from ampcheck.setup.datasets import random_datasets
from ampcheck.tools.init.options import documented_arguments
from ampcheck.tools.init.render import Contents, render_tests
from ampcheck.tools.init.repository import read_repository
from ampcheck.tools.init.scripts import TrainingScript

LOOP = """
import argparse
import torch

def train(args):
    net = torch.nn.Linear(4, 1)
    net(torch.randn(args.batch_size, 4)).sum().backward()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-net", required=True)
    parser.add_argument("-b", "--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=4)
    train(parser.parse_args())
"""


def script_of(folder: Path, files: dict[str, str]) -> TrainingScript:
    (script,) = read_repository(write(folder, files)).scripts
    return script


@pytest.mark.parametrize(
    "line",
    ["python train.py -net vgg16", "$ accelerate launch --mixed_precision fp16 train.py \\\n  -net vgg16  # all"],
)
def test_the_readmes_command_gives_the_options_and_the_batch_is_made_small(tmp_path: Path, line: str) -> None:
    script = script_of(tmp_path, {"train.py": LOOP, "README.md": f"# Net\n```sh\n{line}\n```\n"})
    assert (script.function, script.needs) == (None, "")
    assert script.arguments == ("-net", "vgg16", "--batch-size", "8", "--workers", "0")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "python train.py -net NET",
        "python train.py -net /path/to/it",
        "python other.py -net a",
        "python other/train.py -net a",
        "python train.py -net /data/a",
        "python train.py -net a --data=/data",
        "python train.py -net ~/a",
    ],
)
def test_without_a_documented_command_the_options_are_asked_for(tmp_path: Path, line: str) -> None:
    script = script_of(tmp_path, {"train.py": LOOP, "README.md": line})
    assert (script.needs, script.arguments) == ("the options -net of its command line", ())


@pytest.mark.parametrize("batch", ["-b 64", "--batch-size=64"])
def test_a_batch_that_is_given_stays(tmp_path: Path, batch: str) -> None:
    script = script_of(tmp_path, {"train.py": LOOP, "README.md": f"`python train.py -net a {batch}`"})
    assert script.arguments == ("-net", "a", *batch.split(), "--workers", "0")


@pytest.mark.parametrize("name", ["other/train.py", "./other/train.py", "train.py"])
def test_a_command_is_of_the_script_in_its_folder(name: str) -> None:
    examples = f"python examples/train.py --lr 1\npython setup.py install; python {name} --lr 2\n"
    assert documented_arguments("other/train.py", examples) == ["--lr", "2"]


HYDRA = """
import hydra

@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg):
    trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(hydra.utils.instantiate(cfg.model))

if __name__ == "__main__":
    main()
"""


def test_a_script_of_hydra_runs_whole_with_its_own_configuration(tmp_path: Path) -> None:
    script = script_of(tmp_path, {"train.py": HYDRA})
    assert (script.function, script.needs, script.title) == (None, "", "train.py")
    text = render_tests(Contents(script=script, script_runs=True))
    assert 'runpy.run_path("train.py", run_name="__main__")' in text
    assert 'sys.argv = ["train.py"]' in text


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("net = net.cuda()", True),
        ("device = 'cuda:0'", True),
        ("scaler = torch.cuda.amp.GradScaler()", True),
        ("net.to('cuda' if torch.cuda.is_available() else 'cpu')", True),
        ("device = torch.device(f'cuda:{0}')", True),
        ("torch.autocast(device_type='cuda')", True),
        ("scaler = GradScaler('cuda')", True),
        ("x = torch.ones(3, device='cuda')", True),
        ("print('no cuda here')", False),
        ("print('cuda')", False),
        ("fast = net.device.type == 'cuda'", False),
        ("torch.autocast('cpu', enabled=net.device.type == 'cuda')", False),
    ],
)
def test_a_script_that_asks_for_cuda_has_it_in_its_test(tmp_path: Path, line: str, cuda: bool) -> None:
    files = {"train.py": f"import torch\ndef main():\n    {line}\n    net(1).backward()\n"}
    script = script_of(tmp_path, files)
    assert script.cuda is cuda
    assert ('device="cuda"' in render_tests(Contents(script=script, script_runs=True))) is cuda


def test_datasets_of_torchvision_are_random_wherever_the_repository_takes_them(tmp_path: Path) -> None:
    files = {"data.py": "from torchvision.datasets import MNIST\n", "train.py": "def main():\n    loss().backward()\n"}
    script = script_of(tmp_path, files)
    assert (script.datasets, script.is_target) == (True, False)
    text = render_tests(Contents(script=script, script_runs=True))
    assert "with random_datasets():\n            main()" in text


@pytest.mark.parametrize(
    ("name", "options", "count", "size"),
    [
        ("MNIST", {"train": True}, 60_000, (28, 28)),
        ("FashionMNIST", {"train": False}, 10_000, (28, 28)),
        ("EMNIST", {"split": "balanced", "train": True}, 60_000, (28, 28)),
        ("QMNIST", {"train": False}, 10_000, (28, 28)),
        ("CIFAR100", {"train": True}, 50_000, (32, 32)),
        ("SVHN", {"split": "test"}, 26_032, (32, 32)),
        ("ImageFolder", {}, 10_000, (256, 256)),
    ],
)
def test_a_dataset_that_is_not_there_has_random_images_of_its_shape(
    tmp_path: Path, name: str, options: dict[str, object], count: int, size: tuple[int, int]
) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    options = options if name == "ImageFolder" else {**options, "download": True}
    with random_datasets():
        data = getattr(datasets, name)(str(tmp_path / "none"), transform=lambda image: image, **options)
        image, label = data[count - 1]
    assert (len(data), image.size) == (count, size)
    assert 0 <= int(label) < {"CIFAR100": 100, "EMNIST": 47}.get(name, 10)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises((RuntimeError, OSError)):
        getattr(datasets, name)(str(tmp_path / "none"), **{key: options[key] for key in options if key != "download"})


class _Dataset:
    """A dataset of torchvision as far as it matters here; subclasses are those of its names."""

    def __init__(self, root: str, **kwargs: object) -> None:
        if error := kwargs.pop("error", None):
            raise error  # type: ignore[misc]
        self.root, self.given = root, kwargs

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("torchvision.datasets")
    vars(module)["VisionDataset"] = type("VisionDataset", (), {"__init__": lambda self, root: None})
    for name in ("MNIST", "EMNIST", "QMNIST", "CIFAR10", "SVHN", "STL10", "ImageFolder", "ImageNet", "DatasetFolder"):
        vars(module)[name] = type(name, (_Dataset,), {})
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)
    return module


@pytest.mark.parametrize("name", ["CIFAR10", "ImageFolder"])
def test_a_dataset_that_is_there_is_read(
    name: str, torchvision: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with random_datasets():
        data = getattr(torchvision, name)("here", train=True)
    assert (data.root, data.given) == ("here", {"train": True})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["CIFAR10", "ImageFolder"])
def test_a_dataset_that_is_not_there_is_named(
    name: str, torchvision: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with random_datasets():
        for _ in range(2):
            getattr(torchvision, name)("none", error=FileNotFoundError())
    assert capsys.readouterr().err == f"ampcheck: random images, as the files are not there: {name}\n"


@pytest.mark.parametrize("name", ["CIFAR10", "ImageFolder"])
def test_an_error_other_than_of_missing_files_is_the_users(name: str, torchvision: ModuleType) -> None:
    with random_datasets(), pytest.raises(TypeError):
        getattr(torchvision, name)("here", error=TypeError())
