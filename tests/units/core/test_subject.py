"""What is judged: five shapes, their forgiving forms, one sentence for everything else; targets and how they fail."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import SHAPES, Call, Kind, Subject, as_subject, load_subject, name_of

X, Y = torch.ones(2, 3), torch.zeros(2, 3)
MODEL = nn.Linear(3, 3)


def function(a: Any, b: Any = None) -> Any:
    return a


# Shapes.


@pytest.mark.parametrize(
    ("shape", "kind", "calls"),
    [
        ((MODEL, (X,)), Kind.FORWARD, [Call((X,))]),
        ((MODEL, (X, Y)), Kind.FORWARD, [Call((X, Y))]),
        ((MODEL, (X,), {"b": Y}), Kind.FORWARD, [Call((X,), {"b": Y})]),
        ((function, (X,)), Kind.FORWARD, [Call((X,))]),
        ((MODEL, ()), Kind.FORWARD, [Call()]),
        ((MODEL, [(X,), (Y,)]), Kind.COMPILE, [Call((X,)), Call((Y,))]),
        ((function, [(X, Y)]), Kind.COMPILE, [Call((X, Y))]),
        (([MODEL, MODEL], [(X,)]), Kind.REGIONAL, [Call((X,))]),
        ({"model": MODEL, "step": lambda i: 0.0}, Kind.TRAINING, []),
        ({"step": lambda i: 0.0}, Kind.TRAINING, []),
        (lambda: None, Kind.CALL, []),
        (functools.partial(function, X), Kind.CALL, []),
        # The forgiving forms.
        ((MODEL, X), Kind.FORWARD, [Call((X,))]),
        ((MODEL, {"a": X}), Kind.FORWARD, [Call((), {"a": X})]),
        ((MODEL, {"a": X}, {"b": Y}), Kind.FORWARD, [Call((), {"a": X, "b": Y})]),
        ((MODEL, {0: X}), Kind.FORWARD, [Call(({0: X},))]),
        ((MODEL, [X, Y]), Kind.COMPILE, [Call((X,)), Call((Y,))]),
        ((MODEL, [{"a": X}, (Y,)]), Kind.COMPILE, [Call((), {"a": X}), Call((Y,))]),
        ((MODEL, [(X,)], {"b": Y}), Kind.COMPILE, [Call((X,), {"b": Y})]),
        (((MODEL, MODEL), [X]), Kind.REGIONAL, [Call((X,))]),
        ((nn.Sequential(MODEL), X), Kind.FORWARD, [Call((X,))]),
    ],
)
def test_a_shape_says_what_it_is(shape: Any, kind: Kind, calls: list[Call]) -> None:
    subject = as_subject(shape, name="it")
    assert subject.kind is kind
    assert subject.name == "it"
    assert len(subject.calls) == len(calls)
    for found, wanted in zip(subject.calls, calls, strict=True):  # tensors: the very same, not equal ones
        assert [id(a) if isinstance(a, torch.Tensor) else a for a in found.args] == [
            id(a) if isinstance(a, torch.Tensor) else a for a in wanted.args
        ]
        assert {k: id(v) for k, v in found.kwargs.items()} == {k: id(v) for k, v in wanted.kwargs.items()}


def test_the_model_is_the_one_that_was_given() -> None:
    assert Subject((MODEL, X)).model is MODEL
    blocks = [nn.Linear(3, 3), nn.Linear(3, 3)]
    assert [id(block) for block in Subject((blocks, [X])).model] == [id(block) for block in blocks]


def test_a_subject_stays_what_it_is() -> None:
    subject = Subject((MODEL, X), name="mine", limits={"flush": 2})
    assert as_subject(subject, name="other") is subject


def test_the_keywords_are_a_copy() -> None:
    given = {"b": Y}
    subject = Subject((MODEL, (X,), given))
    given["c"] = X
    assert set(subject.calls[0].kwargs) == {"b"}


class Callable2:
    def __call__(self, a: Any) -> Any:
        return a


@pytest.mark.parametrize(
    "shape",
    [
        None,
        5,
        "module:function",
        X,
        MODEL,
        nn.Linear,
        function,
        Callable2(),
        [],
        [MODEL, X],
        (),
        (MODEL,),
        (MODEL, X, {}, 1),
        (MODEL, X, Y),
        (MODEL, X, [Y]),
        (MODEL, []),
        (5, X),
        (X, MODEL),
        (None, X),
        ("model", X),
        ([], [X]),
        ([MODEL, 5], [X]),
        ([MODEL, MODEL], X),
        ([MODEL, MODEL], (X,)),
        ([MODEL, MODEL], []),
        ([MODEL, MODEL], [X, Y]),
        ([MODEL, MODEL], [X], {"b": Y}),
        {},
        {"model": MODEL},
        {"step": 5},
        {5: MODEL, "step": None},
        {1, 2},
        b"bytes",
        Subject((MODEL, X)),
    ],
    ids=lambda shape: type(shape).__name__,
)
def test_anything_else_names_the_required_shapes_in_one_sentence(shape: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Subject(shape, name="the thing")
    said = str(caught.value)
    assert said.startswith("the thing is no subject")
    assert SHAPES in said
    assert "\n" not in said
    assert said.rpartition("found ")[2]


# Targets.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own; imports are undone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield tmp_path
    for name in [name for name in sys.modules if name not in before]:
        del sys.modules[name]
    sys.modules.update(before)


LINEAR = """
import torch
from ampcheck.core.subject import Subject
def factory():
    return torch.nn.Linear(3, 3), torch.ones(2, 3)
"""


def write(path: Path, text: str = LINEAR) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def complaint(target: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_subject(target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_loaded_and_called_by_its_target(folder: Path) -> None:
    write(folder / "target_a.py")
    subject = load_subject("target_a.py:factory")
    assert subject.kind is Kind.FORWARD
    assert subject.name == "target_a.py:factory"


def test_a_file_may_be_named_by_any_path(folder: Path) -> None:
    path = write(folder / "deep" / "er" / "target_b.py")
    for target in (str(path), "deep/er/target_b.py", "./deep/er/target_b.py"):
        assert load_subject(f"{target}:factory").kind is Kind.FORWARD


def test_a_module_is_loaded_by_its_name(folder: Path) -> None:
    write(folder / "package_c" / "__init__.py", "")
    write(folder / "package_c" / "layers.py", "import torch\nLayer = torch.nn.Linear\n")
    text = "import torch\nfrom .layers import Layer\ndef factory():\n    return Layer(3, 3), torch.ones(1, 3)\n"
    write(folder / "package_c" / "model.py", text)
    subject = load_subject("package_c.model:factory")
    assert subject.kind is Kind.FORWARD
    assert subject.name == "package_c.model:factory"


@pytest.mark.parametrize("inner", ["", "deep/er"])
def test_a_path_to_a_file_of_a_package_is_imported_as_its_module(folder: Path, inner: str) -> None:
    package = Path("package_d", inner)
    for part in (package, *package.parents[:-1]):
        write(folder / part / "__init__.py", "")
    write(folder / package / "layers.py", "import torch\nclass Layer(torch.nn.Linear): pass\n")
    text = "import torch\nfrom {} import Layer\ndef factory():\n    return Layer(3, 3), torch.ones(1, 3)\n"
    write(folder / package / "model_d.py", text.format(".layers"))
    name = ".".join(package.parts)
    models = [load_subject(f"{package}/model_d.py:factory"), load_subject(f"{name}.model_d:factory")]
    assert type(models[0].model) is type(models[1].model)
    assert type(models[0].model).__module__ == f"{name}.layers"
    assert models[0].name == f"{package}/model_d.py:factory"


def test_a_path_to_an_init_file_is_its_package(folder: Path) -> None:
    write(folder / "package_g" / "__init__.py", LINEAR + "from . import inner\n")
    write(folder / "package_g" / "inner.py", "")
    assert load_subject("package_g/__init__.py:factory").kind is Kind.FORWARD
    assert "package_g.inner" in sys.modules


def test_a_file_of_a_package_imports_its_siblings_and_hides_no_module(folder: Path) -> None:
    write(folder / "package_s" / "__init__.py", "")
    write(folder / "package_s" / "sibling_s.py", "")
    write(folder / "package_s" / "colorsys.py", "raise ValueError\n")
    write(folder / "package_s" / "model_s.py", "import sibling_s, colorsys\n" + LINEAR)
    sys.modules.pop("colorsys", None)
    assert load_subject("package_s/model_s.py:factory").kind is Kind.FORWARD


def test_packages_of_one_name_in_two_folders_are_two(folder: Path) -> None:
    for name, size in (("one", 1), ("two", 2)):
        write(folder / name / "package_t" / "__init__.py", "")
        write(folder / name / "package_t" / "m.py", LINEAR.replace("torch.ones(2, 3)", f"torch.ones({size}, 3)"))
    targets = [f"{name}/package_t/m.py:factory" for name in ("one", "two", "one")]
    assert [load_subject(target).calls[0].args[0].shape[0] for target in targets] == [1, 2, 1]


def test_a_file_of_a_package_that_does_not_import_is_a_usage_error_and_leaves_no_module(folder: Path) -> None:
    write(folder / "package_u" / "__init__.py", "")
    write(folder / "package_u" / "broken_u.py", "from .absent import A\n")
    assert complaint("package_u/broken_u.py:factory").startswith("cannot import package_u/broken_u.py: ModuleNotFound")
    assert "package_u.broken_u" not in sys.modules


def test_a_file_imports_its_siblings_as_when_python_runs_it(folder: Path) -> None:
    write(folder / "here" / "sibling_e.py", "import torch\nLayer = torch.nn.Linear\n")
    text = "import torch\nfrom sibling_e import Layer\ndef factory():\n    return Layer(3, 3), torch.ones(1, 3)\n"
    write(folder / "here" / "target_e.py", text)
    assert load_subject("here/target_e.py:factory").kind is Kind.FORWARD


def test_the_module_of_a_file_is_found_under_its_own_name(folder: Path) -> None:
    text = LINEAR + "class Model(torch.nn.Module):\n    def forward(self, x): return x\n"
    write(folder / "target_f.py", text + "def made(): return Model(), torch.ones(1)\n")
    model = load_subject("target_f.py:made").model
    assert getattr(sys.modules[type(model).__module__], "Model") is type(model)  # noqa: B009  # mypy knows no Model


@pytest.mark.parametrize("stem", ["json", "torch", "conftest", "ampcheck", "subject"])
def test_a_file_named_like_an_imported_module_hides_it_from_nobody(folder: Path, stem: str) -> None:
    before = sys.modules.get(stem)
    text = LINEAR + "class Model(torch.nn.Module):\n    def forward(self, x): return x\n"
    write(folder / f"{stem}.py", text + "def made(): return Model(), torch.ones(1)\n")
    model = load_subject(f"{stem}.py:made").model
    if before is not None:
        assert sys.modules[stem] is before
    assert vars(sys.modules[type(model).__module__])["Model"] is type(model)


def test_two_files_of_one_name_are_two_modules(folder: Path) -> None:
    for name, size in (("one", 1), ("two", 2)):
        write(folder / name / "same_g.py", LINEAR.replace("torch.ones(2, 3)", f"torch.ones({size}, 3)"))
    sizes = [load_subject(f"{name}/same_g.py:factory").calls[0].args[0].shape[0] for name in ("one", "two", "one")]
    assert sizes == [1, 2, 1]


def test_an_attribute_may_be_a_subject_a_shape_or_dotted(folder: Path) -> None:
    text = LINEAR + (
        "named = Subject(factory(), name='mine')\n"
        "unnamed = Subject(factory())\n"
        "shape = factory()\n"
        "class Zoo:\n    linear = staticmethod(factory)\n    class Inner:\n        shape = factory()\n"
        "def subject(): return Subject(factory(), name='made')\n"
        "step = {'step': lambda i: 0.0}\n"
    )
    write(folder / "target_h.py", text)
    names = {
        "named": "mine",
        "unnamed": "target_h.py:unnamed",
        "shape": "target_h.py:shape",
        "Zoo.linear": "target_h.py:Zoo.linear",
        "Zoo.Inner.shape": "target_h.py:Zoo.Inner.shape",
        "subject": "made",
    }
    for attribute, name in names.items():
        subject = load_subject(f"target_h.py:{attribute}")
        assert (subject.kind, subject.name) == (Kind.FORWARD, name)
    assert load_subject("target_h.py:step").kind is Kind.TRAINING


@pytest.mark.parametrize("target", ["", ":", "module", "module:", ":factory", "file.py", "file.py:"])
def test_what_is_no_target_says_what_one_is(target: str) -> None:
    assert "package.module:function" in complaint(target)


def test_a_missing_file_and_a_folder_are_usage_errors(folder: Path) -> None:
    (folder / "folder.py").mkdir()
    for name in ("absent.py", "folder.py"):
        assert complaint(f"{name}:factory") == f"there is no file {name}"


@pytest.mark.parametrize("name", ["no_such_module_i", "torch.no_such", "..up", ".", "a b", "folder/module"])
def test_a_module_that_is_not_there_is_a_usage_error(folder: Path, name: str) -> None:
    assert complaint(f"{name}:factory").startswith(f"cannot import {name}: ")


MISTYPED = {
    "transformer:LlamaForCausalLM": "; did you mean transformers:LlamaForCausalLM?",
    "torchvison:resnet18": "; did you mean torchvision:resnet18?",
    "diffuser:UNet2DConditionModel": "; did you mean diffusers:UNet2DConditionModel?",
    "my_own_package:factory": "No module named 'my_own_package'",
}


@pytest.mark.parametrize("target", MISTYPED)
def test_a_mistyped_library_of_architectures_is_asked_about(target: str) -> None:
    assert complaint(target).endswith(MISTYPED[target])


BROKEN = {
    "syntax error": ("def factory(:\n", "SyntaxError"),
    "import that fails": ("import no_such_package_j\n", "ModuleNotFoundError: No module named 'no_such_package_j'"),
    "raises in lines": ("raise ValueError('first\\nsecond')\n", "ValueError: first"),
    "raises nothing said": ("raise ValueError\n", "ValueError"),
    "exits": ("import sys\nsys.exit(0)\n", "SystemExit"),
    "removes itself": ("import sys\ndel sys.modules[__name__]\nraise ValueError('gone')\n", "ValueError: gone"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_import_is_a_usage_error_and_leaves_no_module(folder: Path, name: str) -> None:
    text, wanted = BROKEN[name]
    write(folder / "broken_k.py", text)
    said = complaint("broken_k.py:factory")
    assert said.startswith("cannot import broken_k.py: ")
    assert wanted in said
    assert "broken_k" not in sys.modules
    assert complaint("broken_k:factory").startswith("cannot import broken_k: ")


def test_a_file_can_be_loaded_once_it_is_mended(folder: Path) -> None:
    write(folder / "mended_l.py", "raise ValueError\n")
    complaint("mended_l.py:factory")
    write(folder / "mended_l.py")
    assert load_subject("mended_l.py:factory").kind is Kind.FORWARD


@pytest.mark.parametrize("attribute", ["absent", "factory.absent", "Absent.factory", "a..b", "factory.", "_"])
def test_a_missing_attribute_names_what_there_is(folder: Path, attribute: str) -> None:
    write(folder / "target_m.py")
    said = complaint(f"target_m.py:{attribute}")
    assert f"has no {attribute!r}" in said
    assert "factory" in said.partition("it has")[2]


FACTORIES = {
    "raises": ("def factory(): raise RuntimeError('no weights\\nat all')", "raised RuntimeError: no weights"),
    "exits": ("import sys\ndef factory(): sys.exit(0)", "raised SystemExit: 0"),
    "needs arguments": ("def factory(size): return size", "TypeError: factory() missing 1 required"),
    "gives nothing": ("def factory(): pass", "returned nothing"),
    "gives a module": ("import torch\ndef factory(): return torch.nn.Linear(1, 1)", "found Linear"),
    "is a module": ("import torch\nfactory = torch.nn.Linear(1, 1)", "raised TypeError"),
    "is a class": ("class factory: pass", "found factory"),
    "is a number": ("factory = 5", "found int"),
    "is None": ("factory = None", "found NoneType"),
    "is a wrong tuple": ("factory = (1, 2)", "first element of type int"),
    "has a property that raises": ("class A:\n  @property\n  def b(self): raise ValueError('dry')\na = A()", "dry"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_that_fails_or_gives_the_wrong_thing_is_a_usage_error(folder: Path, name: str) -> None:
    text, wanted = FACTORIES[name]
    write(folder / "target_n.py", text + "\n")
    attribute = "a.b" if "property" in name else "factory"
    said = complaint(f"target_n.py:{attribute}")
    assert f"target_n.py:{attribute}" in said
    assert wanted in said


def test_an_interrupt_is_not_swallowed(folder: Path) -> None:
    write(folder / "target_o.py", "def factory(): raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_subject("target_o.py:factory")


def test_the_working_directory_is_looked_in_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(folder))])
    write(folder / "target_p.py")
    for _ in range(2):
        assert load_subject("target_p:factory").kind is Kind.FORWARD
    assert sys.path.count(str(folder)) == 1


def test_what_has_no_name_is_called_by_its_class_and_blocks_by_theirs() -> None:
    assert name_of(nn.Linear(1, 1)) == "Linear"
    assert name_of(torch.relu) == "relu"
    assert name_of([nn.Linear(1, 1), nn.Linear(1, 1), nn.ReLU()]) == "Linear, ReLU (3 blocks)"


COLLECTIONS = """
import torch

def linear(): return torch.nn.Linear(4, 4), torch.ones(2, 4)
MODELS = {"a/linear": linear, "b:[x]": (torch.nn.Identity(), torch.ones(1))}
def pairs():
    for width in (1, 2):
        yield f"width {width}", (torch.nn.Linear(width, 1), torch.ones(3, width))
def mapping(): return MODELS
def twice(): return [("a", linear), ("a", linear)]
def empty(): return {}
def raises(): raise RuntimeError("no weights")
number = 3
"""


@pytest.fixture
def collections(folder: Path) -> Path:
    (folder / "models_k.py").write_text(COLLECTIONS)
    return folder


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("models_k.py:MODELS[a/linear]", "a/linear"),
        ("models_k.py:MODELS[b:[x]]", "b:[x]"),
        ("models_k:mapping[a/linear]", "a/linear"),
        ("models_k.py:pairs[width 2]", "width 2"),
    ],
)
def test_a_target_may_be_a_member_of_a_collection_and_has_its_name(collections: Path, target: str, name: str) -> None:
    subject = load_subject(target)
    assert subject.name == name
    assert subject.kind is Kind.FORWARD


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("models_k.py:MODELS[c]", "models_k.py:MODELS has no 'c'; it has a/linear, b:[x]"),
        ("models_k.py:twice[a]", "found 2 pairs with 1 different names"),
        ("models_k.py:empty[a]", "must be a mapping of names to subjects or functions that return one"),
        ("models_k.py:number[a]", "found int"),
        ("models_k.py:raises[a]", "the collection models_k.py:raises raised RuntimeError: no weights"),
        ("models_k.py:linear[a]", "the collection models_k.py:linear raised"),
    ],
)
def test_what_is_no_collection_is_a_usage_error(collections: Path, target: str, text: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_subject(target)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)
