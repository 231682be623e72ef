"""Models are filled in from what a repository documents: configurations, options, YAML, and inputs of a small size."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tools.init.repositories import write
from torch import nn

from ampcheck.tools.init.candidates import candidates
from ampcheck.tools.init.inputs import elements, proposed_inputs, smaller_inputs
from ampcheck.tools.init.repository import read_repository
from ampcheck.tools.init.sources import Attempt
from ampcheck.tools.init.trial import build

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        return x

"""

CONFIGURED = """
from torch import nn

class Fields:
    pass

class GPT(nn.Module):
    @staticmethod
    def get_default_config():
        config = Fields()
        config.model_type = "gpt"
        config.n_embd = None
        config.vocab_size = None
        config.dropout = 0.1
        return config

    def __init__(self, config):
        super().__init__()
        assert (config.model_type is None) ^ (config.n_embd is None)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd or 768)

    def forward(self, idx):
        return self.wte(idx)
"""


def attempts_of(folder: Path, files: dict[str, str]) -> tuple[Attempt, ...]:
    (model,) = candidates(read_repository(write(folder, files)))
    return model.attempts


def test_the_default_configuration_of_a_class_is_filled_without_its_preset(tmp_path: Path) -> None:
    first = attempts_of(tmp_path, {"model.py": CONFIGURED})[0]
    assert first.code == "GPT(config)"
    assert first.setup == (
        "config = GPT.get_default_config()",
        "config.model_type = None",
        "config.n_embd = 128",
        "config.vocab_size = 512",
    )
    assert first.origin == "with the configuration of GPT.get_default_config, in small sizes"


def test_a_configuration_whose_fields_are_set_keeps_its_statements(tmp_path: Path) -> None:
    readme = "```python\nfrom model import GPT\nconfig = GPT.get_default_config()\nconfig.vocab_size = 50257\n"
    readme += "config.n_embd = 1024\nmodel = GPT(config)\nconfig.late = 1\n```\n"
    attempts = attempts_of(tmp_path, {"model.py": CONFIGURED, "README.md": readme})
    lines = ("config = GPT.get_default_config()", "config.vocab_size = 50257", "config.n_embd = 1024")
    assert (attempts[0].code, attempts[0].setup) == ("GPT(config)", lines)
    assert attempts[0].imports == ("from model import GPT",)
    small = next(each for each in attempts if each.origin.endswith("in a smaller size"))
    assert small.setup == ("config = GPT.get_default_config()", "config.vocab_size = 512", "config.n_embd = 128")


def test_a_class_method_that_makes_a_configuration_is_followed(tmp_path: Path) -> None:
    files = {
        "net.py": NET + "class Config: pass\n",
        "test_net.py": "from net import Config, Net\ndef test():\n    config = Config.from_name('tiny', depth=2)\n"
        "    model = Net(config)\n",
    }
    assert attempts_of(tmp_path, files)[0].code == "Net(Config.from_name('tiny', depth=2))"


@pytest.mark.parametrize(
    "how", ["args = parser.parse_args()\nmodel = Net(args.width)", "def main(args):\n    net = Net(args.width)"]
)
def test_an_option_of_the_command_line_has_its_default(tmp_path: Path, how: str) -> None:
    script = "import argparse\nfrom net import Net\nparser = argparse.ArgumentParser()\n"
    script += f"parser.add_argument('-w', '--width', type=int, default=24)\n{how}\n"
    assert attempts_of(tmp_path, {"net.py": NET, "train.py": script})[0].code == "Net(24)"


def test_a_target_of_hydra_is_written_as_code(tmp_path: Path) -> None:
    yaml = "_target_: net.Net\nconfig:\n  _target_: torch.optim.Adam\n  _partial_: true\n  lr: 0.001\n"
    (first, *_) = attempts_of(tmp_path, {"net.py": NET, "configs/model.yaml": yaml})
    assert first.code == "Net(config=functools.partial(Adam, lr=0.001))"
    assert first.imports == ("from net import Net", "from torch.optim import Adam", "import functools")
    assert first.origin == "as configs/model.yaml configures it"


@pytest.mark.parametrize(
    ("yaml", "code"),
    [
        ("model:\n  class_path: net.Net\n  init_args: {config: 3}\n", "Net(config=3)"),
        ("model_params: {name: Net, config: [1, 2]}\n", "Net(config=[1, 2])"),
        ("width: 8\nmodel: {_target_: net.Net, config: '${width}'}\n", "Net(config=8)"),
    ],
)
def test_other_forms_of_yaml_are_read(tmp_path: Path, yaml: str, code: str) -> None:
    assert attempts_of(tmp_path, {"net.py": NET, "a.yaml": yaml})[0].code == code


@pytest.mark.parametrize(
    "yaml",
    [
        "_target_: net.Net\nconfig: ${oc.env:HOME}\n",
        "_target_: other.Net\nconfig: 1\n",
        "{name: Net, config: 1, epochs: 3}\n",
        "[unfinished\n",
        "!!python/object/apply:os.system ['true']\n",
    ],
)
def test_what_yaml_leaves_open_or_says_of_another_class_is_no_construction(tmp_path: Path, yaml: str) -> None:
    attempts = attempts_of(tmp_path, {"net.py": NET, "a.yaml": yaml})
    assert not any("configures" in attempt.origin for attempt in attempts)


def test_smaller_inputs_begin_with_the_smallest_and_keep_what_belongs_together() -> None:
    given = "(torch.randn(8, 3, 572, 572), torch.ones(8, 572, 572), torch.rand(8))"
    first, *_, last = smaller_inputs(given)
    assert first == "(torch.randn(2, 3, 32, 32), torch.ones(2, 32, 32), torch.rand(2))"
    assert last == "(torch.randn(2, 3, 572, 572), torch.ones(2, 572, 572), torch.rand(2))"
    assert elements("(torch.randn(2, 3), torch.randint(0, 10, (4, 5)))") == 26
    assert (
        next(smaller_inputs("{'ids': torch.randint(0, 512, (4, 1024))}")) == "{'ids': torch.randint(0, 512, (2, 16))}"
    )


def test_a_model_that_flattens_images_is_given_images() -> None:
    assert "(torch.randn(4, 1, 28, 28),)" in list(proposed_inputs(nn.Sequential(nn.Flatten(), nn.Linear(784, 10))))


HEAVY = """
import torch
from torch import nn

class Unpadded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 64, 9), nn.Conv2d(64, 64, 9), nn.AvgPool2d(40))

    def forward(self, x):
        return self.layers(x)
"""


def test_a_heavy_example_gives_way_to_the_smallest_inputs_that_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"heavy.py": HEAVY})
    monkeypatch.syspath_prepend(str(tmp_path))
    attempt = {
        "code": "Unpadded()",
        "setup": (),
        "imports": ("from heavy import Unpadded",),
        "inputs": "(torch.randn(8, 1, 572, 572),)",
        "origin": "",
    }
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setattr("ampcheck.tools.init.trial._limit_memory", lambda: None)
    answer = build([], [attempt], 60.0)
    assert not answer["heavy"]
    assert torch.Size(eval(answer["inputs"], {"torch": torch})[0].shape) == (2, 1, 64, 64)  # 56 would do, 32 do not


def test_a_small_model_is_not_heavy_on_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"small.py": "from torch import nn\n\nclass Small(nn.Linear):\n    pass\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setattr("ampcheck.tools.init.trial._limit_memory", lambda: None)
    seconds = itertools.count(step=60.0)
    monkeypatch.setattr("time.process_time", lambda: next(seconds))
    attempt = {
        "code": "Small(370, 370)",
        "setup": (),
        "imports": ("from small import Small",),
        "inputs": "",
        "origin": "",
    }
    answer = build([], [attempt], 60.0)
    assert (answer["parameters"], answer["heavy"]) == (137_270, False)


def test_many_weights_are_heavy_whatever_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"wide.py": "from torch import nn\n\nclass Wide(nn.Linear):\n    pass\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setattr("ampcheck.tools.init.trial._limit_memory", lambda: None)
    attempt = {
        "code": "Wide(9000, 9000)",
        "setup": (),
        "imports": ("from wide import Wide",),
        "inputs": "",
        "origin": "",
    }
    assert build([], [attempt], 60.0)["heavy"]
