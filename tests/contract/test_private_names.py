"""The contract with PyTorch: its private names are there, one package uses them, and contract.md has each."""

from __future__ import annotations

import ast
import importlib
import inspect
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.version import Version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from ampcheck.torchtools import private
from ampcheck.torchtools.contract import WITHOUT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = runpy.run_path(str(BENCHMARKS / "contract.py"))
OBJECTS, SINCE = PAGE["OBJECTS"], PAGE["SINCE"]


@pytest.fixture
def contract(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("contract")


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_this_release_has_the_name(name: str) -> None:
    if Version(Version(torch.__version__).base_version) < Version(SINCE.get(name, "0")):
        pytest.skip(f"since torch {SINCE[name]}; this is {torch.__version__}")
    found, path = torch, "torch"
    for part in name.split("."):
        path = f"{path}.{part}"
        if path not in sys.modules and not hasattr(found, part):  # a module that nothing has imported
            importlib.import_module(path)
        found = sys.modules.get(path) or getattr(found, part)  # an op may have the name of its module


ALIVE = torch.ones(1).untyped_storage()
CALLS: dict[str, Callable[[], object]] = {
    "without_modes": lambda: private.without_modes().__enter__,
    "current_mode": lambda: private.current_mode() is None,
    "mode_stack": lambda: private.mode_stack() == [],
    "mode_of_kind": lambda: [private.mode_of_kind(kind) for kind in private.TRACERS] == [None, None, None],
    "has_kernel": lambda: private.has_kernel("aten::add.Tensor"),
    "has_kernel_for": lambda: private.has_kernel_for("aten::reshape", "CompositeImplicitAutograd"),
    "op_names": lambda: "aten::add.Tensor" in private.op_names(),
    "registrations": lambda: "aten::linear" in private.registrations("AutocastCPU"),
    "describe_kernels": lambda: "AutocastCPU" in private.describe_kernels("aten::linear"),
    "keys_below": lambda: private.keys_below(private.DispatchKey.AutocastCPU).has(private.DispatchKey.CPU),
    "function_modes": lambda: private.function_modes() == [],
    "renamed_backend": lambda: private.renamed_backend() == "privateuseone",
    "included_keys": lambda: not private.included_keys().has(private.DispatchKey.Python),
    "sequence_number": lambda: isinstance(private.sequence_number(), int),
    "backward_task": lambda: private.backward_task() == -1,
    "backward_node": lambda: private.backward_node() is None,
    "is_transformed_tensor": lambda: not private.is_transformed_tensor(torch.ones(1)),
    "transforms": lambda: private.transforms() is None,
    "is_traceable_subclass": lambda: not private.is_traceable_subclass(torch.ones(1)),
    "storage_users": lambda: private.storage_users(ALIVE._cdata) >= 1,
    "tree_leaves": lambda: private.tree_leaves({"a": [1, 2]}) == [1, 2],
    "CAST": lambda: private.CAST.default(torch.ones(1), dtype=torch.float16).dtype is torch.float16,
    "READ_NUMBER": lambda: private.READ_NUMBER(torch.ones(1)) == 1.0,
    "chunk_cat": lambda: private.chunk_cat([torch.ones(2, 2)], 0, 2).shape == (2, 2),
    "efficient_zeros": lambda: private.efficient_zeros(2)._is_zerotensor(),
    "negative_view": lambda: private.negative_view(torch.ones(1)).is_neg(),
    "foreach_norm": lambda: private.foreach_norm([torch.ones(4)])[0] == 2.0,
    "parse_to": lambda: private.parse_to("cpu")[0] == torch.device("cpu"),
    "xpu_is_compiled": lambda: isinstance(private.xpu_is_compiled(), bool),
    "MODULE_CALL": lambda: private.MODULE_CALL.co_name == "_call_impl",
    "scripted_op": lambda: private.scripted_op(torch.tensor) == "aten::tensor",
    "tracing_context": lambda: private.tracing_context() is None,
    "default_device": lambda: private.default_device() is None,
    **{
        name: lambda name=name: getattr(private, name)().__enter__  # type: ignore[misc]
        for name in "state_of_caller python_dispatcher below_autograd without_autocast without_torch_function "
        "without_subclass_function".split()
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_the_name_does_what_is_assumed(name: str) -> None:
    assert CALLS[name]()


def test_differences_are_written_into_the_first() -> None:
    private.foreach_subtract(first := [torch.ones(1)], [torch.ones(1)])
    assert first[0] == 0


def test_guards_of_dispatch_keys() -> None:
    autocast = private.DispatchKeySet(private.DispatchKey.AutocastCPU)
    with torch.autocast("cpu", torch.bfloat16):
        with private.excluding_keys(autocast):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
        with private.forcing_keys(private.included_keys(), private.excluded_keys() | autocast):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_backward_is_seen() -> None:
    seen: list[tuple[int, bool, object]] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append((private.backward_task(), private.backward_keeps_graph(), grad)))
    private.run_backward((y,), (torch.ones(1),), True, False, (), allow_unreachable=True, accumulate_grad=True)
    assert x.grad == 2
    ((task, keeps, _),) = seen
    assert task >= 0
    assert keeps is True


@pytest.fixture(scope="module")
def objects() -> dict[str, object]:
    tensor, weight = torch.ones(1), torch.ones(1, requires_grad=True)
    product = (weight * 2.0).grad_fn
    return {
        "DefaultDeviceType": checkpoint.DefaultDeviceType,
        "DistributedDataParallel": DistributedDataParallel,
        "FSDPModule": FSDPModule,
        "FSDPState": FSDPState,
        "Function": type("Own", (torch.autograd.Function,), {})._backward_cls,
        "GradScaler": torch.amp.GradScaler("cpu"),
        "Library": torch.library.Library,
        "Module": torch.nn.Module(),
        "MulBackward0": product,
        "Node": product,
        "OpOverload": torch.ops.aten.add.Tensor,
        "Optimizer": torch.optim.SGD([weight], 0.1),
        "Options": torch.distributed.ProcessGroupGloo._Options,
        "ProcessGroup": torch.distributed.ProcessGroup,
        "Tensor": tensor,
        "TypedStorage": torch.TypedStorage(),
        "UntypedStorage": tensor.untyped_storage(),
        "autocast": torch.autocast("cpu"),
        "checkpoint": checkpoint,
    }


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_objects_have_the_attribute(name: str, objects: dict[str, object]) -> None:
    kind, attribute = name.split(".")
    assert hasattr(objects[kind], attribute) or attribute in inspect.getsource(objects[kind])  # type: ignore[arg-type]


OTHERS = {
    *("_getframe", "_current_frames", "_shutdown", "_run_exitfuncs"),
    *("_GeneratorContextManager", "_AsyncGeneratorContextManager", "_negative_number_matcher"),
    *("_setupstate", "_fixtureinfo"),
}
"""Private attributes of Python and pytest."""


def test_every_private_attribute_that_another_package_asks_for_is_listed(contract: ModuleType) -> None:
    listed = {name.partition(".")[2] for name in OBJECTS}
    assert set(contract.attributes_outside()) - OTHERS <= listed


def test_no_other_package_uses_private_names(contract: ModuleType) -> None:
    assert contract.outside() == {}


def test_the_scan_finds_each_way_to_write_one(contract: ModuleType) -> None:
    source = """
import torch
import torch._dynamo
from torch import nn
from torch._C import DispatchKey as Key
from torch.utils import _pytree as pytree
aten = torch.ops.aten
aten._to_copy, nn.Module._call_impl, Key.CPU, torch.Tensor.__add__, pytree.tree_map
"""
    tree = ast.parse(source)
    assert set(contract.private_names(tree, contract.locals_of(tree), strings=False)) == {
        *("torch._dynamo", "torch._C.DispatchKey", "torch.utils._pytree", "torch.ops.aten._to_copy"),
        *("torch.nn.Module._call_impl", "torch._C.DispatchKey.CPU", "torch.utils._pytree.tree_map"),
    }


def test_each_name_has_its_line_and_each_line_its_name(contract: ModuleType) -> None:
    used = contract.inside()
    assert [name for name in used if not contract.entry_of(name, WITHOUT)] == []
    assert set(WITHOUT) == {contract.entry_of(name, WITHOUT) for name in used}
    assert contract.CONTRACT.read_text() == contract.contract(), "python benchmarks/contract.py writes it again"


GONE = """
import torch
del torch._C.{name}
import ampcheck
run = ampcheck.audit((torch.nn.Linear(4, 4), (torch.randn(2, 4),)), compile=False)
for finding in run.findings:
    print(finding.verdict.name, finding.check, finding.message)
"""


@pytest.mark.parametrize(
    ("name", "check", "judged"),
    [
        ("_dispatch_dump", "SKIP coverage", "PASS low-precision-error"),
        ("_current_autograd_node", "INCOMPLETE low-precision-error", "PASS policy-banned"),
    ],
)
def test_what_needs_a_name_that_is_gone_is_skipped_with_the_reason(name: str, check: str, judged: str) -> None:
    run = subprocess.run([sys.executable, "-c", GONE.format(name=name)], capture_output=True, text=True, check=True)
    findings = run.stdout.splitlines()
    reason = f"PyTorch {torch.__version__} has no torch._C.{name}: {WITHOUT[f'_C.{name}']}"
    assert any(finding.startswith(check) and reason in finding for finding in findings)
    assert any(finding.startswith(judged) for finding in findings)
    assert not any(finding.startswith("FAIL") for finding in findings)


WATCHED_WITHOUT = """
import torch
kept = torch.{name}
del torch.{name}
import ampcheck.torchtools.private
torch.{name} = kept  # PyTorch itself goes on using it
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
with ampcheck.watch({objects}) as seen:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    seen.step(float("nan")) if {stepped} else None
for finding in seen.run.findings:
    print(finding.verdict.name, finding.check, finding.message)
"""


@pytest.mark.parametrize("objects", ["", "model, optimizer"])
@pytest.mark.parametrize("name", [name for name in WITHOUT if WITHOUT[name].endswith("is followed in float64")])
def test_a_watch_leaves_out_what_needs_a_name_that_is_gone(name: str, objects: str) -> None:
    source = WATCHED_WITHOUT.format(name=name, objects=objects, stepped=bool(objects))
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    findings = run.stdout.splitlines()
    reason = f"the watch of ops was left out: PyTorch {torch.__version__} has no torch.{name}"
    assert any(finding.startswith("INCOMPLETE coverage") and reason in finding for finding in findings)
    assert any(finding.startswith("FAIL overflow") for finding in findings) == bool(objects)


def test_a_missing_name_raises_where_it_is_used() -> None:
    missing = private._Missing("_chunk_cat")
    with pytest.raises(private.MissingNameError, match=r"has no torch\._chunk_cat: casts in packed"):
        missing([], 0, 1)
    with pytest.raises(private.MissingNameError), missing():
        pass
    with pytest.raises(private.MissingNameError):
        _ = missing.attribute
    assert isinstance(private._optional("_no_such_name"), private._Missing)
