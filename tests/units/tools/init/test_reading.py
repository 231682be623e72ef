"""A repository is read without importing it: its whole models first, with arguments that it uses itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.init.repositories import NANOGPT, SRC, TRAINING, TRANSFORMERS, write

from ampcheck.tools.init.arguments import guessed, shrunken
from ampcheck.tools.init.candidates import candidates, factory_name, unimportable
from ampcheck.tools.init.repository import read_repository
from ampcheck.tools.init.uses import plain_uses


def test_reading_imports_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"model.py": "open('imported', 'w')\nfrom torch import nn\nclass Net(nn.Module): pass\n"})
    assert [model.name for model in read_repository(tmp_path).models] == ["Net"]
    assert not (tmp_path / "imported").exists()


def test_whole_models_are_found_and_not_their_parts(tmp_path: Path) -> None:
    assert [model.name for model in read_repository(write(tmp_path, NANOGPT)).models] == ["GPT"]


PACKAGE = {
    "earshot/__init__.py": "from .model import Classifier\n",
    "earshot/model.py": "from torch import nn\nclass Block(nn.Module):\n    def forward(self, x): return x\n"
    "class Classifier(nn.Module):\n    def __init__(self): self.block = Block()\n    def forward(self, x): return x\n",
    "earshot/infer.py": "from torch import nn\nfrom .model import Classifier\nclass Engine(nn.Module):\n"
    "    def __init__(self, model): self.model: Classifier = model\n    def forward(self, x): return x\n",
}
LOOP = """
from .model import Classifier
def train(steps=10):
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler.scale(model(1)).backward()
    scaler.step(optimizer)
    return model
def main():
    train()
"""


def test_a_part_that_a_package_exports_or_a_script_trains_is_a_model_as_well(tmp_path: Path) -> None:
    exported = write(tmp_path / "exported", PACKAGE)
    trained = write(tmp_path / "trained", {**PACKAGE, "earshot/__init__.py": "", "earshot/train.py": LOOP})
    neither = write(tmp_path / "neither", {**PACKAGE, "earshot/__init__.py": ""})
    found = [{model.name for model in read_repository(each).models} for each in (exported, trained, neither)]
    assert found == [{"Classifier", "Engine"}, {"Classifier", "Engine"}, {"Engine"}]


def test_a_module_of_a_package_with_a_function_that_trains_is_a_script(tmp_path: Path) -> None:
    penalty = "def train(): ...\ndef penalty(loss):\n    loss.backward()\n"
    files = {**PACKAGE, "earshot/train.py": LOOP, "earshot/penalty.py": penalty}
    scripts = read_repository(write(tmp_path, files)).scripts
    assert [(each.source.path, each.function, each.needs) for each in scripts] == [("earshot/train.py", "main", "")]


def test_functions_that_return_a_model_and_its_inputs_are_tried_as_they_are(tmp_path: Path) -> None:
    text = """
from earshot import Classifier
def direct(): return Classifier(), (1,)
def named(scale=1):
    model = Classifier().eval()
    return model, (scale,)
def needs(path): return Classifier(), (path,)
def wave(): return 1, 2
"""
    found = candidates(read_repository(write(tmp_path, {**PACKAGE, "check.py": text})))
    assert [each.title for each in found[:2]] == ["check.direct", "check.named"]
    assert not {"check.needs", "check.wave"} & {each.title for each in found}
    assert (found[0].attempts[0].code, found[0].attempts[0].inputs) == ("direct()[0]", "direct()[1]")


def test_models_derive_from_modules_through_classes_of_the_repository(tmp_path: Path) -> None:
    files = {
        "base.py": "import torch\nclass Base(torch.nn.Module):\n    def forward(self, x): return x\n",
        "net.py": "from base import Base\nclass Net(Base): pass\nclass Config: pass\n",
    }
    assert {model.name for model in read_repository(write(tmp_path, files)).models} == {"Base", "Net"}


@pytest.mark.parametrize("folder", [".hidden", "build", "node_modules", "site-packages"])
def test_what_is_not_the_repositorys_own_is_not_read(tmp_path: Path, folder: str) -> None:
    write(tmp_path, {f"{folder}/net.py": "from torch import nn\nclass Net(nn.Module): pass\n"})
    assert read_repository(tmp_path).models == []


def test_an_environment_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, {"any/pyvenv.cfg": "", "any/net.py": "from torch import nn\nclass Net(nn.Module): pass\n"})
    assert read_repository(tmp_path).models == []


def test_files_that_are_no_python_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {"old.py": "print 'two'\n", "net.py": "from torch import nn\nclass Net(nn.Module): pass\n"})
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert [model.name for model in read_repository(tmp_path).models] == ["Net"]


def test_a_configuration_class_is_found_and_made_small(tmp_path: Path) -> None:
    repository = read_repository(write(tmp_path, NANOGPT))
    code, imports, missing = guessed(repository.models[0], repository, small=True)
    assert code == "GPT(config=GPTConfig(block_size=128, vocab_size=512, n_layer=2, n_head=4, n_embd=128))"
    assert imports == ("from model import GPT", "from model import GPTConfig")
    assert missing == ()


def test_required_arguments_get_values_by_their_names(tmp_path: Path) -> None:
    repository = read_repository(write(tmp_path, SRC))
    assert guessed(repository.models[0], repository, small=False)[0] == "Net(in_channels=3, num_classes=10)"


def test_the_repositorys_own_constructions_become_explicit_code(tmp_path: Path) -> None:
    files = {
        "net.py": "from torch import nn\nclass Part(nn.Module): pass\nclass Net(nn.Module):\n"
        "    def forward(self, x): return x\n",
        "use.py": "from net import Net, Part\nWIDTH = 4 * 8\npart = Part(WIDTH)\nmodel = Net(part, depth=2)\n",
    }
    repository = read_repository(write(tmp_path, files))
    net = next(model for model in repository.models if model.name == "Net")
    assert [(use.code, use.imports, use.origin) for use in plain_uses(net, repository)] == [
        ("Net(Part(4 * 8), depth=2)", ("from net import Net", "from net import Part"), "as use.py:4 builds it")
    ]


def test_the_example_of_the_readme_gives_arguments_and_inputs(tmp_path: Path) -> None:
    text = (
        "# Net\n```python\nimport torch\nfrom net import Net\n\nmodel = Net(3)\nx = torch.randn(2, 3)\nmodel(x)\n```\n"
    )
    files = {
        "net.py": "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x): return x\n",
        "README.md": text,
    }
    repository = read_repository(write(tmp_path, files))
    (use,) = plain_uses(repository.models[0], repository)
    assert (use.code, use.inputs, use.origin) == ("Net(3)", "(torch.randn(2, 3),)", "as README.md builds it")


@pytest.mark.parametrize("call", ["Net(options.width)", "Net(**config)", "Net(*sizes)", "Net(width)", "Net(load())"])
def test_what_only_a_run_knows_is_no_construction(tmp_path: Path, call: str) -> None:
    text = f"from net import Net\ndef build(options, config, sizes, load, width):\n    return {call}\n"
    files = {"net.py": "from torch import nn\nclass Net(nn.Module): pass\n", "use.py": text}
    repository = read_repository(write(tmp_path, files))
    assert plain_uses(repository.models[0], repository) == []


def test_only_larger_sizes_are_made_small() -> None:
    assert shrunken("Net(dim=512, depth=1, name='a', inner=Part(heads=16))") == (
        "Net(dim=128, depth=1, name='a', inner=Part(heads=4))"
    )


def test_scripts_say_what_their_functions_need(tmp_path: Path) -> None:
    found = {}
    for name, files in {"loop": TRAINING, "module": NANOGPT, "options": TRANSFORMERS}.items():
        (script,) = read_repository(write(tmp_path / name, files)).scripts
        found[name] = (script.signature, script.needs)
    assert found == {
        "loop": ("main()", ""),
        "module": ("train.py", ""),
        "options": ("main()", ""),
    }


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        ("'--lr', type=float, default=0.1", ""),
        ("'--lr', type=float, required=True", "the options --lr of its command line"),
        ("'data'", "the options data of its command line"),
        ("'data', nargs='?'", ""),
        ("'--fast', action='store_true'", ""),
    ],
)
def test_a_parser_without_required_arguments_needs_no_command_line(tmp_path: Path, arguments: str, needs: str) -> None:
    text = f"import argparse\ndef main():\n    p = argparse.ArgumentParser()\n    p.add_argument({arguments})\n"
    (script,) = read_repository(write(tmp_path, {"a.py": text + "    net(p.parse_args()).backward()\n"})).scripts
    assert (script.needs, script.has_options) == (needs, not needs)


def test_models_in_a_script_that_trains_when_imported_are_named(tmp_path: Path) -> None:
    text = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x): return x\nNet()(1).backward()\n"
    repository = read_repository(write(tmp_path, {"main.py": text}))
    assert unimportable(repository) == {"main.py": "Net"}
    assert candidates(repository) == []


@pytest.mark.parametrize("name", ["my-net.py", "01_net.py", "class.py", "my-package/__init__.py", "__init__.py"])
def test_what_no_import_statement_can_name_is_left_out_and_named(tmp_path: Path, name: str) -> None:
    text = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x): return x\n"
    text += "class NetConfig: pass\ndef main(): Net()(1).backward()\n"
    user = "from torch import nn\nfrom net import NetConfig\nclass User(nn.Module):\n"
    user += "    def __init__(self, config): pass\n    def forward(self, x): return x\n"
    repository = read_repository(write(tmp_path, {name: text, "user.py": user}))
    assert [each.title for each in candidates(repository)] == ["user.User"]
    assert not any("NetConfig" in attempt.code for attempt in candidates(repository)[0].attempts)
    assert repository.scripts == []
    assert repository.unnameable == [name]


def test_a_file_that_cannot_be_imported_still_shows_how_a_model_is_built(tmp_path: Path) -> None:
    files = {
        "net.py": "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x): return x\n",
        "01_use.py": "from net import Net\nmodel = Net(3)\n",
    }
    (model,) = candidates(read_repository(write(tmp_path, files)))
    assert model.attempts[0].code == "Net(3)"


def test_a_script_gives_the_model_of_its_library(tmp_path: Path) -> None:
    files = {
        "a.py": "import argparse\nfrom torchvision import models\n"
        "p = argparse.ArgumentParser()\np.add_argument('-a', '--arch', default='resnet18')\n"
        "def main(args):\n    models.__dict__[args.arch]()(1).backward()\n",
        "b.py": "from timm import create_model\ndef main():\n    create_model('vit_tiny_patch16_224')(1).backward()\n",
    }
    found = candidates(read_repository(write(tmp_path, files)))
    assert [each.attempts[0].code for each in found] == [
        'torchvision.models.get_model("resnet18")',
        'timm.create_model("vit_tiny_patch16_224")',
    ]


def test_a_checkpoint_becomes_a_small_model_without_a_download(tmp_path: Path) -> None:
    (model,) = candidates(read_repository(write(tmp_path, TRANSFORMERS)))
    assert model.attempts[0].code.startswith(
        'AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", vocab_size=512'
    )


def test_of_two_modules_with_one_name_one_is_tried(tmp_path: Path) -> None:
    text = "from torch import nn\nclass {}(nn.Module):\n    def forward(self, x): return x\n"
    write(tmp_path, {"a/main.py": text.format("First"), "b/main.py": text.format("Second")})
    assert [each.title for each in candidates(read_repository(tmp_path))] == ["main.First"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GPT", "gpt"),
        ("XTransformer", "x_transformer"),
        ("ResNet50", "res_net50"),
        ("Lambda", "model_lambda"),
        ("2d", "model_2d"),
        ("Build", "model_build"),
        ("Training", "model_training"),
        ("Torch", "model_torch"),
        ("Dict", "model_dict"),
        ("TestNet", "model_test_net"),
        ("SetupModule", "model_setup_module"),
    ],
)
def test_factories_get_valid_names(name: str, expected: str) -> None:
    assert factory_name(name) == expected
