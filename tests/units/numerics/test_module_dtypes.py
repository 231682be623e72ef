"""`assert_dtypes`: right about what modules give, under whatever autocast the caller is in, and gone afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict, collect
from ampcheck.numerics.module_dtypes import assert_dtypes, measure_dtypes

X = torch.ones(2, 4)
LOW = (torch.bfloat16, torch.float16)


@dataclass
class Output:
    logits: Tensor
    extra: Any = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.idle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Gives(nn.Module):
    """Gives whatever `make` makes of its input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@pytest.fixture(autouse=True)
def state_is_as_it_was() -> Iterator[None]:
    """The autocast state and grad mode of the caller are the caller's."""

    def state() -> tuple[Any, ...]:
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
        )

    before = state()
    yield
    assert state() == before


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def failures(caught: pytest.ExceptionInfo[AssertionError]) -> str:
    return str(caught.value)


# Under autocast.


@pytest.mark.parametrize("low", LOW, ids=str)
def test_it_passes_where_modules_give_what_is_declared(low: torch.dtype) -> None:
    with torch.autocast("cpu", low):
        run = assert_dtypes(Model(), (X,), {"layers.*.up": low, "head": low, "": low, "layers.*": low, "**.up": low})
    assert isinstance(run, Run)
    assert not run.failed
    assert [finding.check for finding in run.findings] == ["dtype"] * 5


@pytest.mark.parametrize("low", LOW, ids=str)
def test_without_autocast_everything_is_float32(low: torch.dtype) -> None:
    assert not assert_dtypes(Model(), (X,), {"**": torch.float32}).failed
    with pytest.raises(AssertionError) as caught:
        assert_dtypes(Model(), (X,), {"head": low})
    assert "head must give" in failures(caught)
    assert "it gave float32" in failures(caught)


def test_every_module_that_differs_is_listed() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError) as caught:
        assert_dtypes(Model(), (X,), {"layers.*.up": torch.float32, "head": "float32", "**.up": torch.bfloat16})
    said = failures(caught)
    assert [name for name in ("layers.0.up", "layers.1.up", "head") if f"{name} must give float32" in said] == [
        "layers.0.up",
        "layers.1.up",
        "head",
    ]
    assert said.count("[dtype] fail") == 3
    assert "hint:" in said


def test_the_norm_of_the_installed_torch_is_told_as_it_is() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        given = nn.LayerNorm(4)(X.bfloat16()).dtype
        assert not assert_dtypes(nn.Sequential(nn.LayerNorm(4)), X.bfloat16(), {"0": given}).failed


def test_a_run_is_emitted_also_when_it_raises() -> None:
    with collect() as runs:
        assert_dtypes(Model(), (X,), {"head": torch.float32})
        with pytest.raises(AssertionError):
            assert_dtypes(Model(), (X,), {"head": torch.float16})
    assert [run.failed for run in runs] == [False, True]
    assert all(run.environment["torch"] == torch.__version__ for run in runs)


def test_the_run_says_how_much_was_looked_at() -> None:
    run = assert_dtypes(Model(), (X,), {"head": torch.float32})
    assert dict(run.coverage.seen) == {"modules": 8, "outputs": 8}  # 2 x (block, norm, up), head, root


# Outputs of every kind.


OUTPUTS = {
    "tuple": lambda x: (x.half(), 5),
    "list": lambda x: [None, x.half()],
    "dict": lambda x: {"a": {"b": x.half()}},
    "ordered": lambda x: OrderedDict(a=x.half()),
    "dataclass": lambda x: Output(x.half()),
    "inside a dataclass": lambda x: Output(torch.ones(1, dtype=torch.int64), [x.half()]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_followed(name: str) -> None:
    model = Gives(OUTPUTS[name])
    assert not assert_dtypes(model, X, {"": torch.float16}).failed
    with pytest.raises(AssertionError, match=r"\(the root\) must give float32 \(''\); it gave float16"):
        assert_dtypes(model, X, {"": torch.float32})


def test_a_model_output_is_followed() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model = Gives(lambda x: outputs.CausalLMOutputWithPast(logits=x.half(), hidden_states=(x.half(), x.half())))
    assert not assert_dtypes(model, X, {"": torch.float16}).failed
    assert measure_dtypes(model, (X,))[1] == 3


def test_a_transformer_under_autocast() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    inputs = {"input_ids": torch.arange(4)[None]}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        run = assert_dtypes(model, inputs, {"lm_head": "bfloat16", "transformer.wte": "float32", "**.c_attn": "bf16"})
    assert not run.failed
    assert hooks(model) == 0


def test_one_output_that_differs_among_several_fails() -> None:
    with pytest.raises(AssertionError, match="it gave float16, float32"):
        assert_dtypes(Gives(lambda x: (x.half(), x)), X, {"": torch.float16})


def test_two_calls_that_differ_fail() -> None:
    inner = nn.Identity()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.half()).float() + self.inner(x)

    with pytest.raises(AssertionError, match=r"inner must give float16 .* it gave float16, float32"):
        assert_dtypes(Twice(), X, {"inner": torch.float16})


# Patterns and what they match.


@pytest.mark.parametrize("pattern", ["haed", "layers.*.norm.*", "*.*.*.*", "layers", "layer*", "HEAD", "norm"])
def test_a_pattern_that_matches_nothing_fails(pattern: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_dtypes(Model(), (X,), {"head": torch.float32, pattern: torch.float32})
    assert f"{pattern!r} must match a module" in failures(caught)
    assert failures(caught).count("[dtype] fail") == 1


def test_a_module_that_never_ran_does_not_count() -> None:
    model = Model()
    assert "idle" in dict(model.named_modules())
    assert "idle" not in measure_dtypes(model, (X,))[0]
    with pytest.raises(AssertionError, match="'idle' must match"):
        assert_dtypes(model, (X,), {"idle": torch.float32})


def test_an_output_without_floats_does_not_count() -> None:
    with pytest.raises(AssertionError, match="'' must match"):
        assert_dtypes(Gives(lambda x: x.argmax()), X, {"": torch.float32})


def test_a_star_is_not_the_root() -> None:
    model = nn.Sequential(Gives(Tensor.half), Gives(Tensor.float))
    assert not assert_dtypes(nn.Sequential(Gives(Tensor.half)), X, {"*": torch.float16}).failed
    with pytest.raises(AssertionError, match="1 must give float16"):
        assert_dtypes(model, X, {"*": torch.float16})
    outer = Gives(lambda x: x)
    outer.inner = Gives(Tensor.half)
    outer.make = lambda x: outer._modules["inner"](x).float()
    assert not assert_dtypes(outer, X, {"*": torch.float16, "": torch.float32}).failed


def test_a_shared_module_answers_to_each_of_its_paths() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(OrderedDict(encoder=shared, act=nn.ReLU(), decoder=shared))
    dtypes, outputs = measure_dtypes(model, (X,))
    assert set(dtypes) == {"", "encoder", "act", "decoder"}
    assert outputs == 4
    assert not assert_dtypes(model, X, {"decoder": torch.float32, "encoder": torch.float32}).failed
    for name in ("encoder", "decoder"):
        with pytest.raises(AssertionError, match=f"{name} must give float16"):
            assert_dtypes(model, X, {name: torch.float16})


# Inputs and declarations.


def test_inputs_are_a_tuple_a_mapping_or_the_one_argument() -> None:
    for inputs in (X, (X,), {"input": X}):
        assert not assert_dtypes(nn.Linear(4, 4), inputs, {"": torch.float32}).failed


@pytest.mark.parametrize("declared", [torch.bfloat16, "bfloat16", "torch.bfloat16", "bf16"])
def test_a_dtype_may_be_named(declared: Any) -> None:
    assert not assert_dtypes(Gives(Tensor.bfloat16), X, {"": declared}).failed


def test_an_empty_declaration_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="at least one pattern"):
        assert_dtypes(Model(), (X,), {})


@pytest.mark.parametrize("declared", ["float12", torch.int64, None, torch.float32.to_complex()], ids=str)
def test_what_is_no_floating_dtype_is_a_usage_error_before_the_model_runs(declared: Any) -> None:
    ran = []
    with pytest.raises(UsageError, match="A floating-point format is one of"):
        assert_dtypes(Gives(ran.append), X, {"": declared})
    assert ran == []


@pytest.mark.parametrize("model", [lambda x: x, None, nn.Linear], ids=["function", "None", "class"])
def test_what_is_no_module_is_a_usage_error(model: Any) -> None:
    with pytest.raises(UsageError, match="needs a module"):
        assert_dtypes(model, X, {"": torch.float32})


def test_findings_carry_the_name() -> None:
    run = assert_dtypes(Model(), (X,), {"head": torch.float32}, name="mine")
    assert {finding.subject for finding in run.findings} == {"mine"}
    assert {f.subject for f in assert_dtypes(Model(), (X,), {"head": torch.float32}).findings} == {"Model"}
    assert {f.verdict for f in run.findings} == {Verdict.PASS}


# Nothing stays behind.


class Breaks(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise self.error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_hooks_are_gone_also_when_the_model_raises_what_it_likes(error: BaseException) -> None:
    model = Breaks(error)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(type(error)) as caught:
        assert_dtypes(model, (X,), {"": torch.float32})
    assert caught.value is error
    assert hooks(model) == 0


def test_hooks_are_gone_and_those_of_others_stay() -> None:
    model, heard = Model(), []
    model.head.register_forward_hook(lambda module, inputs, output: heard.append(output.dtype))
    assert_dtypes(model, (X,), {"head": torch.float32})
    with pytest.raises(AssertionError):
        assert_dtypes(model, (X,), {"head": torch.float16})
    assert hooks(model) == 1
    assert heard == [torch.float32] * 2


def test_the_model_runs_once_in_the_grad_mode_and_the_autocast_of_the_caller() -> None:
    seen: list[Any] = []

    def make(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return x

    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert_dtypes(Gives(make), X, {"": torch.float32})
    with torch.autocast("cpu", enabled=False):
        assert_dtypes(Gives(make), X, {"": torch.float32})
    assert [entry[:2] for entry in seen] == [(False, True), (True, False)]
    assert seen[0][2] is torch.float16


def test_weights_and_mode_are_left_as_they_were() -> None:
    model = Model().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert_dtypes(model, (X,), {"head": torch.bfloat16})
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_assertion_hides_its_frames(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch
        from ampcheck.numerics.module_dtypes import assert_dtypes
        def test_it():
            assert_dtypes(torch.nn.Linear(2, 2), torch.ones(1, 2), {"": torch.float16})
        """
    )
    result = pytester.runpytest("-p", "no:ampcheck", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_the_assertion_hides_its_frames.py:4: AssertionError"])
    result.stdout.no_fnmatch_line("*dtypes.py:*")


# Ops, and autocast that assert_dtypes enters itself -----------------------------------------------------------------


class Exponential(nn.Module):
    """exp has a rule on CUDA (float32), and none on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).exp()


@pytest.mark.parametrize(("device", "exp"), [("cpu", "bfloat16"), ("cuda", "float32")])
def test_ops_and_modules_are_declared_together_under_the_policy_of_a_device(device: str, exp: str) -> None:
    declared = {"aten::linear": "bfloat16", "aten::exp": exp, "inner": torch.bfloat16, "": exp}
    run = assert_dtypes(Exponential(), (torch.ones(2, 4),), declared, device=device, dtype="bfloat16")
    assert [finding.check for finding in run.findings] == ["dtype"] * 4 + ["compiled-dtype"]
    assert all(finding.verdict is Verdict.PASS for finding in run.findings)
    assert run.coverage.seen["ops under autocast"] == 2
    with pytest.raises(AssertionError, match="aten::exp must give float16"):
        assert_dtypes(Exponential(), (torch.ones(2, 4),), {"aten::exp": "float16"}, device=device)


def test_ops_follow_the_callers_autocast_and_bfloat16_without_one() -> None:
    assert_dtypes(torch.mm, (torch.ones(2, 2),) * 2, {"aten::mm": torch.bfloat16})
    with torch.autocast("cpu", torch.float16):
        assert_dtypes(torch.mm, (torch.ones(2, 2),) * 2, {"aten::mm": torch.float16})


def test_a_pattern_that_matches_no_op_fails_and_lists_those_there_are() -> None:
    with pytest.raises(AssertionError, match=r"'aten::softmax' must match an op .* it matches none \(aten::mm"):
        assert_dtypes(torch.mm, (torch.ones(2, 2),) * 2, {"aten::softmax": "float32", "aten::m*": None})
