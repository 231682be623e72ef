"""What a model sends through autocast: each op, its rule, its dtypes before and after, and the place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampcheck import UsageError, demo
from ampcheck.autocast.calls import CallRecorder, measure_calls
from ampcheck.autocast.emulate import emulate
from ampcheck.autocast.state import registered
from ampcheck.core.subject import Subject, load_subject
from ampcheck.records.policy import OpCall, PolicyCalls
from ampcheck.torchtools.restore import restored

MODELS = Path(__file__).parents[2] / "transformers_models.py"


def of(calls: PolicyCalls, op: str) -> list[OpCall]:
    return [call for call in calls.calls if call.op == op]


@pytest.fixture(scope="module")
def demo_on_cuda() -> PolicyCalls:
    return measure_calls(demo.subject(), device="cuda", dtype="float16")


def test_each_op_is_told_with_its_rule_and_module_and_the_users_line(demo_on_cuda: PolicyCalls) -> None:
    norms = of(demo_on_cuda, "aten::layer_norm")
    assert {call.rule for call in norms} == {"fp32"}
    paths = ["blocks.0.norm_1", "blocks.0.norm_2", "blocks.1.norm_1", "blocks.1.norm_2", "norm"]
    assert [call.module for call in norms] == paths
    assert all(call.file.endswith("demo/model.py") and call.line for call in norms)


def test_dtypes_are_told_before_and_after_autocast(demo_on_cuda: PolicyCalls) -> None:
    (down,) = (call for call in of(demo_on_cuda, "aten::linear") if call.module == "blocks.0.down")
    assert down.dtypes == "float16 float32 float32 -> float16 float16 float16"
    (norm,) = (call for call in of(demo_on_cuda, "aten::layer_norm") if call.module == "norm")
    assert norm.dtypes == "float32 float32 float32 -> float32 float32 float32"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_told_dtypes_are_those_in_which_the_modules_compute(device: str, dtype: torch.dtype) -> None:
    """The dtypes of the modules' outputs, by hooks of their own, agree with what was recorded."""
    subject = load_subject(f"{MODELS}:gpt2")
    model, args, kwargs = subject.model, subject.calls[0].args, subject.calls[0].kwargs
    seen: dict[str, torch.dtype] = {}

    def hook(name: str) -> Any:
        def note(module: nn.Module, given: Any, out: Tensor) -> None:
            seen[name] = out.dtype

        return note

    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(hook(name))
    recorded = measure_calls((model, args, kwargs), device=device, dtype=dtype)
    seen.clear()
    with emulate(device, dtype):
        model(*args, **kwargs)
    got = {call.module: call.passed.split()[0] for call in of(recorded, "aten::layer_norm")}
    assert got == {name: str(d).removeprefix("torch.") for name, d in seen.items()}
    assert len(got) == 5


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_every_recorded_op_has_an_autocast_kernel_somewhere_and_the_rule_of_the_device(device: str) -> None:
    recorded = measure_calls(demo.subject(), device=device)
    anywhere = {op for kind in ("cpu", "cuda", "xpu", "mps", "mtia") for op in registered(kind)}
    assert recorded.calls
    for call in recorded.calls:
        assert call.op in anywhere
        assert call.rule == recorded.policy.rule(call.op)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.linear = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.linear, self.first(x), use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_recomputes_counts_again(reentrant: bool) -> None:
    recorded = measure_calls((Checkpointed(reentrant), (torch.ones(2, 4),)))
    counts = Counter({"first": 0, "linear": 0})
    for call in of(recorded, "aten::linear"):
        counts[call.module] += call.count
    assert counts == {"first": 1, "linear": 2}


def test_without_a_checkpoint_backward_adds_nothing() -> None:
    recorded = measure_calls((nn.Linear(4, 4), (torch.ones(2, 4),)))
    assert [(call.op, call.count) for call in recorded.calls] == [("aten::linear", 1)]


def test_the_line_of_a_call_is_the_models_never_that_of_the_caller() -> None:
    recorded = measure_calls((nn.Linear(4, 4), (torch.ones(2, 4),)))
    assert [(call.file, call.line) for call in recorded.calls] == [("", None)]
    recorded = measure_calls((Checkpointed(False), (torch.ones(2, 4),)))
    assert {call.file.rpartition("/")[2] for call in recorded.calls if call.module == "first"} == {"test_calls.py"}


def test_the_users_model_and_random_numbers_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    measure_calls((model, (torch.ones(3, 4),)))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Fickle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x if torch.rand(()) > 0.5 else x.softmax(-1)


def test_a_model_that_draws_is_recorded_the_same_every_time() -> None:
    first, *others = (measure_calls((Fickle(), (torch.ones(4, 4),))).calls for _ in range(8))
    assert first
    assert all(other == first for other in others)


def test_a_dtype_argument_that_autocast_sets_is_told_and_one_that_was_given_is_not() -> None:
    recorded = measure_calls((lambda x: (x @ x).softmax(-1), (torch.ones(4, 4),)))
    assert [call.passed for call in of(recorded, "aten::softmax.int")] == ["float16 dtype=float32"]
    recorded = measure_calls((lambda x: (x @ x).softmax(-1, dtype=torch.float16), (torch.ones(4, 4),)))
    assert [call.passed for call in of(recorded, "aten::softmax.int")] == ["float16"]


def test_lists_of_tensors_are_told_by_the_dtypes_in_them() -> None:
    recorded = measure_calls((lambda x: torch.stack([x, (x @ x).float(), x @ x]), (torch.ones(4, 4),)), device="cpu")
    (stack,) = of(recorded, "aten::stack")
    assert (stack.inputs, stack.passed) == ("[float16|float32]", "[float32]")


def test_successive_calls_and_blocks_are_all_recorded() -> None:
    linear = nn.Linear(4, 4)
    twice = measure_calls((linear, [(torch.ones(2, 4),), (torch.ones(3, 4),)]))
    assert [call.count for call in of(twice, "aten::linear")] == [2]
    blocks = measure_calls(([linear, nn.Linear(4, 2)], [(torch.ones(2, 4),)]))
    assert sorted(call.module for call in of(blocks, "aten::linear")) == ["0", "1"]


def test_what_a_call_leaves_behind_does_not_change_the_next_one() -> None:
    class Leaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x + torch.ones(4))  # on the default device
            torch.set_default_device("meta")
            return out

    with restored():
        calls = measure_calls((Leaks(4, 4), [(torch.ones(2, 4),), (torch.ones(3, 4),)]))
        left = torch.get_default_device()
    assert calls.raised is None
    assert [call.count for call in of(calls, "aten::linear")] == [2]
    assert left == torch.device("cpu")


def test_a_model_that_is_kept_in_16_bits_is_recorded_as_it_is() -> None:
    recorded = measure_calls((nn.Linear(4, 4).bfloat16(), (torch.ones(2, 4, dtype=torch.bfloat16),)), dtype="bfloat16")
    assert [call.dtypes for call in recorded.calls] == ["bfloat16 bfloat16 bfloat16 -> bfloat16 bfloat16 bfloat16"]


def test_the_policy_of_another_release_is_followed_where_it_is_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), (torch.ones(2, 4),)
    before, since = (measure_calls(model, release=release) for release in ("2.11", "2.12"))
    assert [call.rule for call in before.ruled if call.op == "aten::rms_norm"] == []
    assert [call.rule for call in since.ruled if call.op == "aten::rms_norm"] == ["fp32"]
    assert (before.torch[:4], since.torch[:4]) == ("2.11", "2.12")


# What raises -----------------------------------------------------------------------------------------------------


def bce(x: Tensor) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x))


def test_a_banned_op_is_named_with_its_place() -> None:
    recorded = measure_calls((bce, (torch.ones(4),)))
    assert recorded.raised is not None
    assert recorded.raised.op == "aten::binary_cross_entropy"
    assert recorded.raised.where.file.endswith("test_calls.py")
    assert [call.passed for call in of(recorded, "aten::binary_cross_entropy")] == ["raises"]
    assert measure_calls((bce, (torch.ones(4),)), device="cpu").raised is None


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out.index_add(0, torch.zeros(2, dtype=torch.int64), x)


def test_an_op_that_raises_is_named_and_what_ran_before_is_kept() -> None:
    recorded = measure_calls((Broken(), (torch.ones(2, 4),)))
    assert recorded.raised is not None
    assert recorded.raised.op.startswith("aten::index_add")
    assert of(recorded, "aten::linear")


def test_a_ban_that_the_model_caught_is_not_what_raised_later() -> None:
    def caught(x: Tensor) -> Tensor:
        try:
            return bce(x)
        except RuntimeError:
            raise KeyError("something else") from None

    recorded = measure_calls((caught, (torch.ones(4),)))
    assert recorded.raised is not None
    assert (recorded.raised.op, "KeyError" in recorded.raised.message) == ("", True)


def test_a_16_bit_kernel_that_only_the_cpu_lacks_does_not_end_the_recording_of_another_device() -> None:
    model = nn.Sequential(nn.Conv3d(1, 2, 1), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(2, 2))
    subject = model, (torch.ones(2, 1, 2, 2, 2),)
    there = measure_calls(subject, device="cuda")
    assert there.raised is None
    assert of(there, "aten::linear")
    here = measure_calls(subject, device="cpu")
    assert here.raised is None or here.raised.op == "aten::avg_pool3d"


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise NotImplementedError("no backward")


def test_a_backward_that_raises_is_told_and_forward_is_recorded_whole() -> None:
    linear = nn.Linear(4, 4)
    recorded = measure_calls((lambda x: linear(NoBackward.apply(linear(x))), (torch.ones(2, 4),)))
    assert recorded.raised is None
    assert "no backward" in recorded.no_backward
    assert sum(call.count for call in of(recorded, "aten::linear")) == 2


def test_an_op_that_the_model_caught_is_not_what_raised_later() -> None:
    def caught(x: Tensor) -> Tensor:
        try:
            return (x @ x).index_add(0, torch.zeros(1, dtype=torch.int64), x[:1])
        except RuntimeError:
            raise KeyError("something else") from None

    recorded = measure_calls((caught, (torch.ones(4, 4),)))
    assert recorded.raised is not None
    assert (recorded.raised.op, recorded.raised.where.line is not None) == ("", True)


# Custom ops ------------------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("ampcheck_calls", "FRAGMENT")
    made.define("scaled(Tensor x, Tensor w) -> Tensor")
    made.define("made_of_others(Tensor x) -> Tensor")
    made.define("counted(Tensor x) -> Tensor")
    made.impl("scaled", lambda x, w: x.mul(w) if x.dtype is w.dtype else x.dot(w), "CPU")
    made.impl("counted", lambda x: x + 1, "CPU")
    made.impl("made_of_others", lambda x: x @ x, "CompositeImplicitAutograd")
    yield made
    made._destroy()


def scaled(x: Tensor) -> Tensor:
    out: Tensor = torch.ops.ampcheck_calls.scaled(x @ x, x @ x)
    return out


def test_a_custom_op_without_an_autocast_kernel_is_told(library: torch.library.Library) -> None:
    recorded = measure_calls((scaled, (torch.ones(4, 4),)))
    assert [(call.op, call.inputs) for call in recorded.unregistered] == [("ampcheck_calls::scaled", "float16 float16")]


def test_a_custom_op_that_raises_on_mixed_dtypes_is_named(library: torch.library.Library) -> None:
    def mixed(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.ampcheck_calls.scaled((x @ x)[0], x[0])
        return out

    recorded = measure_calls((mixed, (torch.ones(4, 4),)))
    assert recorded.raised is not None
    assert recorded.raised.op == "ampcheck_calls::scaled"


@pytest.mark.needs_torch("2.7", "custom ops can be registered for autocast")
def test_a_registered_custom_op_follows_its_registration(library: torch.library.Library) -> None:
    torch.library.register_autocast("ampcheck_calls::scaled", "cuda", torch.float32, lib=library)
    recorded = measure_calls((scaled, (torch.ones(4, 4),)))
    assert recorded.unregistered == ()


def test_custom_ops_made_of_others_or_without_floats_are_not_told(library: torch.library.Library) -> None:
    def both(x: Tensor) -> Tensor:
        torch.ops.ampcheck_calls.counted(torch.ones(3, dtype=torch.int64))
        out: Tensor = torch.ops.ampcheck_calls.made_of_others(x)
        return out

    recorded = measure_calls((both, (torch.ones(4, 4),)))
    assert recorded.unregistered == ()
    assert of(recorded, "aten::matmul")[0].passed == "float16 float16"


# A block, and bad input ------------------------------------------------------------------------------------------


def test_a_recorder_keeps_the_calls_of_each_dtype_apart_and_none_outside_of_autocast() -> None:
    x = torch.ones(4, 4)
    recorder = CallRecorder("cuda")
    with recorder.recording():
        x @ x
        with torch.autocast("cuda", torch.bfloat16):
            x @ x
        with torch.autocast("cpu", torch.float16):
            x.softmax(-1)
    assert set(recorder.dtypes) == {torch.bfloat16, torch.float16}
    assert [call.op for call in recorder.calls("block", torch.bfloat16).calls] == ["aten::matmul"]
    assert [call.op for call in recorder.calls("block", torch.float16).calls] == ["aten::softmax.int"]


@pytest.mark.parametrize(
    ("subject", "options", "message"),
    [
        (Subject(lambda: None, name="a call"), {}, r"needs a model with its inputs, \(module, args\)"),
        (Subject({"step": lambda i: 0.0}, name="a loop"), {}, r"training loop.*@pytest.mark.ampcheck\(lock=True\)"),
        (Subject((nn.ReLU(), (torch.ones(1),))), {"device": "tpu"}, "cuda"),
        (Subject((nn.ReLU(), (torch.ones(1),))), {"dtype": "float32"}, "float16, bfloat16"),
        (Subject((nn.ReLU(), (torch.ones(1),))), {"release": "1.9"}, "2.13"),
    ],
)
def test_bad_input_is_refused_with_the_valid_choices(subject: Subject, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure_calls(subject, **options)
