"""The contract with PyTorch's compiler: each private name that the adapter uses is there and does what it assumes."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict
from ampcheck.torchtools import dynamo, interception
from ampcheck.watch import watch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_this_release_is_supported() -> None:
    assert interception.unsupported() == ""
    assert dynamo.trace_unsupported() == ""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._inductor.compile_fx", "compile_fx"),
        ("torch._inductor.compile_fx", "compile_fx_inner"),
        ("torch._inductor.config", "patch"),
        ("torch._inductor.config", "get_config_copy"),
        ("torch._inductor.metrics", "generated_kernel_count"),
        ("torch._dynamo.utils", "calculate_time_spent"),
        ("torch._inductor.config", "post_grad_custom_pre_pass"),
        ("torch._inductor.config", "fx_graph_cache"),
        ("torch._functorch.config", "enable_autograd_cache"),
        ("torch._functorch.config", "patch"),
        ("torch._guards", "TracingContext"),
        ("torch._guards", "CompileContext"),
        ("torch._guards", "tracing"),
        ("torch._guards", "compile_context"),
        ("torch._dynamo", "OptimizedModule"),
        ("torch._dynamo", "lookup_backend"),
        ("torch._dynamo.utils", "counters"),
        ("torch._dynamo.eval_frame", "_callback_from_stance"),
        ("torch._logging._internal", "trace_log"),
    ],
)
def test_a_private_name_that_is_used_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", ["compile_fx", "compile_fx_inner"])
def test_a_release_that_lacks_a_name_is_told_with_its_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    monkeypatch.delattr(compile_fx, name)

    assert torch.__version__ in interception.unsupported()


def test_a_release_whose_entry_takes_other_arguments_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx", lambda model, inputs: None)

    assert "another interface" in interception.unsupported()


def test_an_unknown_release_is_a_skip_with_the_reason_and_leaves_the_users_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import compile_fx, config

    compiled = torch.compile(lambda x: x + 1, backend="eager")
    monkeypatch.delattr(compile_fx, "compile_fx_inner")
    real = dynamo.setting

    def without(name: str) -> Any:
        if name.endswith("post_grad_custom_pre_pass"):
            raise AttributeError(name)
        return real(name)

    monkeypatch.setattr(dynamo, "setting", without)
    entry = compile_fx.compile_fx

    with watch(compiled, fail_on="never") as seen:
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
        assert compile_fx.compile_fx is entry
    (finding,) = seen.run.findings

    assert (finding.check, finding.verdict) == ("coverage", Verdict.SKIP)
    assert torch.__version__ in finding.message
    assert config.post_grad_custom_pre_pass is None


class Recorder:
    """What is intercepted of each graph; every graph runs as it is."""

    def __init__(self) -> None:
        self.graphs: list[interception.LoweredGraph] = []
        self.inputs: list[list[Any]] = []
        self.strides: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []

    def __call__(self, graph: interception.LoweredGraph) -> interception.Runnable:
        self.graphs.append(graph)
        twin, strides = graph.variant(graph.copied())
        run = graph.compiled()
        self.strides.append((strides, graph.strides()))

        def recorded(inputs: list[Any]) -> Sequence[Any]:
            kept = [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs]
            twin(list(inputs))
            for before, after in zip(kept, inputs, strict=True):
                assert not isinstance(before, torch.Tensor) or torch.equal(before, after)
            self.inputs.append(list(inputs))
            outputs = run(inputs)
            assert not inputs, "compiled code empties the list that it is given"
            return outputs

        return recorded


@pytest.fixture(scope="module")
def recorded() -> tuple[Net, Recorder]:
    """A module's forward and backward, a call without gradients, and a backward that comes after the block."""
    model, seen = Net(), Recorder()
    dynamo.reset()
    compiled = torch.compile(model)
    with interception.intercepted(seen):
        with torch.no_grad():
            compiled(torch.ones(2, 4))
        out = compiled(torch.ones(2, 4))
    out.sum().backward()
    return model, seen


def test_each_graph_has_its_phase_and_a_backward_the_key_of_its_forward(recorded: tuple[Net, Recorder]) -> None:
    inference, forward, backward = recorded[1].graphs

    assert [graph.phase for graph in recorded[1].graphs] == ["inference", "forward", "backward"]
    assert forward.key == backward.key != inference.key
    assert all(isinstance(graph.module, fx.GraphModule) for graph in recorded[1].graphs)


def test_weights_are_named_as_the_users_frame_names_them_and_nothing_else_is(recorded: tuple[Net, Recorder]) -> None:
    model, seen = recorded
    for graph, inputs in zip(seen.graphs[:2], seen.inputs[:2], strict=True):
        named = dict(zip(graph.sources, inputs, strict=True))
        assert named["L['self'].inner.0.weight"].data_ptr() == model.inner[0].weight.data_ptr()
        assert named["L['self'].inner.0.bias"].data_ptr() == model.inner[0].bias.data_ptr()
        assert named.keys() - {""} == {f"L['self'].{name}" for name, _ in model.named_parameters()}


def test_what_is_saved_for_backward_is_what_backward_is_given(recorded: tuple[Net, Recorder]) -> None:
    _, forward, backward = recorded[1].graphs

    assert forward.saved
    assert not backward.saved
    outputs = next(iter(reversed(forward.module.graph.nodes))).args[0]
    given = {node.name for node in backward.module.graph.nodes if node.op == "placeholder"}
    assert {outputs[place].name for place in forward.saved} <= given


def test_a_variant_lies_in_memory_as_the_graph_does_and_leaves_donated_inputs_alone(
    recorded: tuple[Net, Recorder],
) -> None:
    """The last is asserted in every call, in `Recorder`; here, that there was an input whose memory could be reused."""
    assert all(one == other and one for one, other in recorded[1].strides[:2]), "of a backward graph PyTorch tells none"
    assert recorded[1].graphs[2].donated
    assert not recorded[1].graphs[1].donated


def test_the_entry_is_restored_and_a_setting_too() -> None:
    from torch._inductor import compile_fx, config

    entry, before = compile_fx.compile_fx, config.fallback_random
    with interception.intercepted(lambda graph: graph.compiled()):
        assert compile_fx.compile_fx is not entry
    with dynamo.configured({"torch._inductor.config.fallback_random": not before}):
        assert config.fallback_random is not before
        assert dynamo.setting("torch._inductor.config.fallback_random") is not before

    assert compile_fx.compile_fx is entry
    assert config.fallback_random is before


def test_a_setting_that_does_not_exist_is_a_usage_error() -> None:
    with (
        pytest.raises(UsageError, match=r"no torch\._inductor\.config\.nonsense"),
        dynamo.configured({"torch._inductor.config.nonsense": 1}),
    ):
        pass


def test_compiled_parts_are_recognised_and_given_back() -> None:
    model = Net()
    function = torch.compile(lambda x: x)
    wrapped = torch.compile(model)

    assert dynamo.uncompiled(wrapped) is model
    assert dynamo.is_compiled(wrapped)
    assert dynamo.is_compiled(function)
    assert not dynamo.is_compiled(model)
    assert not dynamo.is_compiled(dynamo.uncompiled(function))
    model.compile()
    assert dynamo.is_compiled(model)
    assert dynamo.uncompiled(model) is model


def test_the_entry_point_calls_itself_by_its_name_in_its_module() -> None:
    """`intercepted` replaces it there; a copy of the name, made when Inductor's backend was imported, would miss it."""
    from torch._dynamo.backends import inductor

    assert "from torch._inductor.compile_fx import compile_fx" in inspect.getsource(inductor.inductor)


def test_pytorch_tells_how_long_it_compiled_and_how_many_kernels_it_made() -> None:
    before = dynamo.compile_seconds(), dynamo.kernel_count()
    torch.compile(torch.sin, backend="eager")(torch.ones(3))
    seconds = dynamo.compile_seconds()
    assert before[0] is not None
    assert seconds is not None
    assert seconds > before[0]
    assert dynamo.kernel_count() == before[1]  # the backend is not Inductor


def test_caches_of_ones_own_take_what_is_compiled_and_are_left_again(tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    with dynamo.own_caches(str(tmp_path)):
        torch.compile(function)(torch.ones(7))
        kept = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert not any(str(tmp_path) in value for value in os.environ.values())
    assert kept, "what Inductor wrote must lie in the folder that was asked for"


@pytest.mark.parametrize("chosen", [True, False])
def test_the_folder_of_the_cache_is_inductors_own_and_inductor_is_not_imported_for_it(
    chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.runtime_utils import cache_dir

    def ask(function: Callable[[], str]) -> str:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", None)
        if chosen:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
        return function()

    expected = ask(cache_dir)
    monkeypatch.delitem(sys.modules, "torch._inductor")
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.runtime_utils", None)  # its import raises
    assert ask(dynamo.cache_folder) == expected


def test_the_bound_of_compilations_is_a_setting_of_this_pytorch() -> None:
    name = dynamo.recompile_limit()
    with dynamo.configured({name: 3}):
        assert dynamo.setting(name) == 3
