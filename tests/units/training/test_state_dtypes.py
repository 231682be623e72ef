from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampcheck
from ampcheck.checks import findings
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.records.state import DtypePolicy, Role, StateDtypeStats
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.state_dtypes.measure import (
    PRESETS,
    measure_state_dtypes,
    parse_policy,
    state_dtype_tables,
)

CHECKS = ("master-weights", "optimizer-state", "buffer-dtype", "loss-dtype")
LOW = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.lin(x), self.scale)


def make(dtype: torch.dtype = torch.float32, **parts: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, dtype=dtype)).float().sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return {"model": model, "optimizer": optimizer, "step": step, **parts}


def check_state_dtypes(stats: StateDtypeStats, losses: tuple[str, ...] = ()) -> list[Finding]:
    return findings(replace(stats, losses=losses), Limits())


def measured(shape: dict[str, Any], steps: int = 1) -> StateDtypeStats:
    loop = TrainingLoop(Subject(shape))
    with loop.preserved():
        before = measure_state_dtypes(loop, False)
        for i in range(steps):
            loop.take(i)  # a step that raises leaves what it made
        return measure_state_dtypes(loop, True, before=before)


def verdicts(found: list[Finding]) -> dict[str, Verdict]:
    order = list(Verdict)
    worst: dict[str, Verdict] = {}
    for one in found:
        if one.check not in worst or order.index(one.verdict) == order.index(Verdict.FAIL):
            worst[one.check] = one.verdict
    return worst


def test_every_tensor_of_the_loop_is_measured_once_with_its_bytes() -> None:
    shape = make()
    stats = measured(shape)
    model = shape["model"]
    names = {one.name: one for one in stats.tensors}
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(one.elements for one in stats.tensors if one.role is Role.PARAMETER) == parameters
    assert sum(one.bytes for one in stats.tensors if one.role is Role.GRADIENT) == 4 * parameters
    assert sum(one.elements for one in stats.tensors if one.role is Role.STATE) == 2 * parameters + 2
    assert names["lin.weight.exp_avg"].dtype == "float32"
    assert names["count"].bytes == 8
    assert not names["count"].floating


def test_tables_add_up() -> None:
    stats = measured(make())
    whole, tensors = state_dtype_tables(stats)
    assert sum(row[3] for row in whole.rows) == len(stats.tensors) == len(tensors.rows)  # type: ignore[misc]
    assert sum(row[5] for row in whole.rows) == sum(one.bytes for one in stats.tensors)  # type: ignore[misc]


@pytest.mark.parametrize("policy", ["amp", "fsdp2", "pure-bf16", None])
def test_a_loop_in_float32_passes_every_policy(policy: str | None) -> None:
    found = check_state_dtypes(measured(make(policy=policy)), ("float32",))
    assert verdicts(found) == dict.fromkeys(CHECKS, Verdict.PASS)


@pytest.mark.parametrize("dtype", LOW)
def test_a_cast_model_fails_amp_in_weights_gradients_state_and_buffers(dtype: torch.dtype) -> None:
    found = check_state_dtypes(measured(make(dtype, policy="amp")), ("float32",))
    assert verdicts(found) == {**dict.fromkeys(CHECKS, Verdict.FAIL), "loss-dtype": Verdict.PASS}
    told = [one.message for one in found if one.check == "master-weights"]
    assert any("lin.weight (" in one for one in told)
    assert any("lin.weight.grad" in one for one in told)
    assert all(one.hint for one in found if one.verdict is Verdict.FAIL)


def test_bfloat16_passes_pure_bf16_and_float16_does_not() -> None:
    good = check_state_dtypes(measured(make(torch.bfloat16, policy="pure-bf16")), ("bfloat16",))
    bad = check_state_dtypes(measured(make(torch.float16, policy="pure-bf16")), ("float16",))
    assert set(verdicts(good).values()) == {Verdict.PASS}
    assert set(verdicts(bad).values()) == {Verdict.FAIL}


@pytest.mark.parametrize("dtype", LOW)
def test_without_a_policy_low_tensors_are_told_and_not_judged(dtype: torch.dtype) -> None:
    found = check_state_dtypes(measured(make(dtype)), ("float32",))
    assert {one.verdict for one in found} == {Verdict.SKIP, Verdict.PASS}
    assert "policy=" in next(one.message for one in found if one.check == "master-weights")


def test_a_16_bit_loss_is_warned_of_and_fails_a_policy_against_it() -> None:
    stats, strict = measured(make()), measured(make(policy="amp"))
    assert verdicts(check_state_dtypes(stats, ("float32", "float16")))["loss-dtype"] is Verdict.WARN
    assert verdicts(check_state_dtypes(strict, ("bfloat16",)))["loss-dtype"] is Verdict.FAIL
    assert verdicts(check_state_dtypes(stats))["loss-dtype"] is Verdict.SKIP


def scaled(half: bool, enabled: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    if half:
        model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)

    def step(i: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(2, 4)).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def test_half_weights_with_a_scaler_fail_without_any_policy_even_though_the_step_raises() -> None:
    found = check_state_dtypes(measured(scaled(half=True)), ("float32",))
    (bad,) = [one for one in found if one.check == "master-weights"]
    assert bad.verdict is Verdict.FAIL
    assert "weight (float16)" in bad.message
    assert bad.observed == 2.0


@pytest.mark.parametrize(("half", "enabled"), [(False, True), (True, False)])
def test_float32_weights_with_a_scaler_and_half_weights_with_a_disabled_one_do_not_fail(
    half: bool, enabled: bool
) -> None:
    found = check_state_dtypes(measured(scaled(half, enabled)), ("float32",))
    assert Verdict.FAIL not in verdicts(found).values()


def with_masters(dtype: torch.dtype, synced: bool = True, scaler: Any = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    full = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(full, lr=0.1)

    def step(i: int) -> float:
        loss = model(torch.ones(2, 4, dtype=dtype)).float().sum()
        loss.backward()
        for master, weight in zip(full, model.parameters(), strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(full, model.parameters(), strict=True):
                weight.copy_(master if synced else master * 1.1)
        return float(loss.detach())

    return {"model": model, "optimizer": optimizer, "step": step, "scaler": scaler}


@pytest.mark.parametrize("dtype", LOW)
def test_float32_masters_that_an_optimizer_steps_satisfy_their_policy(dtype: torch.dtype) -> None:
    stats = measured({**with_masters(dtype), "policy": "master-weights-fp32"})
    assert all(one.master for one in stats.tensors if one.low and one.role is Role.COPY)
    assert Verdict.FAIL not in verdicts(check_state_dtypes(stats)).values()


@pytest.mark.parametrize("dtype", LOW)
def test_16_bit_weights_that_are_not_their_rounded_masters_fail(dtype: torch.dtype) -> None:
    stats = measured({**with_masters(dtype, synced=False), "policy": "master-weights-fp32"})
    assert verdicts(check_state_dtypes(stats))["master-weights"] is Verdict.FAIL


def test_16_bit_weights_without_masters_fail_their_policy() -> None:
    stats = measured(make(torch.bfloat16, policy="master-weights-fp32"))
    assert verdicts(check_state_dtypes(stats))["master-weights"] is Verdict.FAIL


def test_half_weights_with_masters_and_a_scaler_do_not_fail() -> None:
    stats = measured(with_masters(torch.float16, scaler=torch.amp.GradScaler("cpu")))
    assert Verdict.FAIL not in verdicts(check_state_dtypes(stats)).values()


class Work(TorchDispatchMode):
    """Counts the elements that ops compute."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.elements += result.numel()
        return result


def test_the_search_for_masters_among_equal_layers_grows_with_the_model_not_with_its_square() -> None:
    def cost(layers: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(layers))).bfloat16()
        full = [(p.detach().float() * (1 + 2.0**-10)).requires_grad_() for p in model.parameters()]
        optimizer = torch.optim.SGD(full[::-1], lr=0.1)
        loop = TrainingLoop(Subject({"model": model, "optimizer": optimizer, "step": lambda _: 0.0}))
        with Work() as work:
            stats = measure_state_dtypes(loop, after_step=False)
        named = [one.master for one in stats.tensors if one.low]
        assert len(set(named)) == layers
        assert all(named)
        return work.elements

    assert cost(24) < 6 * cost(6)


def with_copy(dtype: torch.dtype, follows: bool, through_data: bool = False) -> dict[str, Any]:
    shape = make()
    model, inner = shape["model"], shape["step"]
    ema = copy.deepcopy(model).to(dtype).requires_grad_(False)

    def step(i: int) -> float:
        loss: float = inner(i)
        if follows:
            with torch.no_grad():
                for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                    (mine.data if through_data else mine).lerp_(theirs.to(dtype) + 1.0, 0.5)
        return loss

    return {**shape, "step": step, "ema": ema, "policy": "amp"}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("through_data", [False, True])
def test_a_16_bit_copy_that_follows_the_weights_fails_amp(dtype: torch.dtype, through_data: bool) -> None:
    found = check_state_dtypes(measured(with_copy(dtype, follows=True, through_data=through_data)))
    bad = [one for one in found if one.verdict is Verdict.FAIL]
    assert [one.check for one in bad] == ["buffer-dtype"]
    assert "ema.lin.weight" in bad[0].message


def test_a_frozen_16_bit_teacher_and_a_float32_ema_do_not_fail_amp() -> None:
    for shape in (with_copy(torch.bfloat16, follows=False), with_copy(torch.float32, follows=True)):
        assert Verdict.FAIL not in verdicts(check_state_dtypes(measured(shape))).values()


def test_frozen_16_bit_weights_under_trained_float32_adapters_do_not_fail_amp() -> None:
    base, adapter = nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 4)
    optimizer = torch.optim.Adam(adapter.parameters())

    def step(i: int) -> float:
        optimizer.zero_grad()
        x = torch.ones(2, 4)
        loss = (base(x.bfloat16()).float() + adapter(x)).sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    model = nn.ModuleDict({"base": base, "adapter": adapter})
    stats = measured({"model": model, "optimizer": optimizer, "step": step, "policy": "amp"})
    assert Verdict.FAIL not in verdicts(check_state_dtypes(stats)).values()


def test_an_exception_by_pattern_is_allowed_and_a_stricter_one_is_held_to() -> None:
    shape = make(torch.bfloat16)
    names = {"parameter": "float32", "exceptions": {"lin.*": "bfloat16"}}
    found = verdicts(check_state_dtypes(measured({**shape, "policy": names}), ("float32",)))
    assert found["master-weights"] is Verdict.PASS
    strict = {"preset": "pure-bf16", "exceptions": {"**.bias": torch.float32}}
    found = check_state_dtypes(measured({**shape, "policy": strict}))
    bad = [one for one in found if one.verdict is Verdict.FAIL]
    assert [one.check for one in bad] == ["master-weights"]
    assert "lin.bias" in bad[0].message


def test_a_16_bit_state_of_a_float32_weight_is_found_by_amp() -> None:
    shape = make(policy="amp")
    loop = TrainingLoop(Subject(shape))
    with loop.preserved():
        loop.take(0)
        state = shape["optimizer"].state[shape["model"].lin.weight]
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
        found = check_state_dtypes(measure_state_dtypes(loop, True), ("float32",))
    bad = [one for one in found if one.verdict is Verdict.FAIL]
    assert [(one.check, one.where.module) for one in bad] == [("optimizer-state", "lin.weight.exp_avg_sq")]


def test_sparse_gradients_and_tied_weights_are_measured() -> None:
    model = nn.Embedding(100, 4, sparse=True)
    optimizer: Any = torch.optim.SparseAdam(list(model.parameters()))

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 2, 2])).sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    stats = measured({"model": model, "optimizer": optimizer, "step": step, "policy": "amp"})
    gradient = next(one for one in stats.tensors if one.role is Role.GRADIENT)
    assert gradient.elements == 8  # two rows of four
    assert gradient.bytes == 8 * 4 + 2 * 8
    assert Verdict.FAIL not in verdicts(check_state_dtypes(stats)).values()


def test_of_a_sharded_tensor_the_local_shard_is_counted() -> None:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore  # four ranks, of which only this one is there

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Linear(4, 8, bias=False)
        whole = DTensor.from_local(model.weight.detach()[:2], mesh, [Shard(0)], run_check=False)
        model.weight = nn.Parameter(whole)
        optimizer = torch.optim.SGD(model.parameters())
        stats = measure_state_dtypes(
            TrainingLoop(Subject({"model": model, "optimizer": optimizer, "step": lambda i: 0.0})), False
        )
    finally:
        dist.destroy_process_group()
    (weight,) = stats.tensors
    assert (weight.shape, weight.elements, weight.bytes) == ((8, 4), 8, 32)


def test_nothing_to_judge_is_skipped_never_passed() -> None:
    total = torch.zeros(3)
    stats = measured({"total": total, "step": lambda i: float(total.add_(1).sum())})
    assert set(verdicts(check_state_dtypes(stats)).values()) <= {Verdict.SKIP, Verdict.PASS}
    assert verdicts(check_state_dtypes(stats))["master-weights"] is Verdict.SKIP
    assert verdicts(check_state_dtypes(stats))["optimizer-state"] is Verdict.SKIP


@given(st.sampled_from(["float16", "bfloat16", "float32", "float64"]), st.sampled_from(sorted(PRESETS)))
def test_a_preset_allows_wider_formats_wherever_it_allows_float32(dtype: str, name: str) -> None:
    policy = PRESETS[name]
    for role in ("parameter", "gradient", "state", "buffer", "copy", "loss"):
        allowed = policy.allowed(role, "x")
        assert not allowed or {"float32", "float64"} <= set(allowed)
        assert not allowed or dtype != "float16" or dtype not in allowed


@pytest.mark.parametrize(
    "given",
    ["ampp", 3, {"parameter": "float31"}, {"paramter": "float32"}, {"preset": "x"}, {"exceptions": 3}],
)
def test_a_policy_that_means_nothing_is_refused_in_one_sentence(given: Any) -> None:
    with pytest.raises(UsageError):
        parse_policy(given)


def test_a_policy_reads_the_same_from_names_dtypes_and_lists() -> None:
    one = parse_policy({"parameter": torch.float32, "optimizer state": ["float32", "torch.bfloat16"]})
    assert one == DtypePolicy(parameter=("float32",), state=("float32", "bfloat16"))
    assert parse_policy(one) is one
    assert parse_policy(None) is None


class Tied(nn.Module):
    """A head on an embedding. untie: makes of the head's weight what a cast of it makes."""

    def __init__(self, untie: Callable[[nn.Parameter], nn.Parameter]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = untie(self.embed.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens).to(self.head.weight.dtype)).float()


def untied(untie: Callable[[nn.Parameter], nn.Parameter], *, steps_all: bool = False) -> Run:
    model = Tied(untie)
    stepped = model.parameters() if steps_all else model.embed.parameters()
    optimizer = torch.optim.SGD(stepped, 1.0)
    tokens = torch.arange(16)

    def train() -> None:
        for _ in range(4):
            F.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

    return ampcheck.audit(train, checks=["master-weights"])


def _cast(dtype: torch.dtype, requires_grad: bool = True) -> Callable[[nn.Parameter], nn.Parameter]:
    return lambda weight: nn.Parameter(weight.detach().to(dtype), requires_grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_that_a_cast_untied_and_that_no_optimizer_steps_fails(dtype: torch.dtype) -> None:
    (found,) = [f for f in untied(_cast(dtype)).findings if f.check == "master-weights"]

    assert found.verdict is Verdict.FAIL
    assert found.where.module == "head.weight"
    assert "embed.weight" in found.message


@pytest.mark.parametrize(
    ("untie", "steps_all"),
    [
        (lambda weight: weight, False),  # tied
        (_cast(torch.bfloat16), True),  # each is stepped
        (_cast(torch.bfloat16, requires_grad=False), False),  # frozen on purpose
        (_cast(torch.float32), False),  # a copy of the user's own: no cast
        (lambda weight: nn.Parameter(torch.randn(16, 8, dtype=torch.bfloat16)), False),  # other values
    ],
)
def test_other_weights_beside_an_embedding_do_not_fail(
    untie: Callable[[nn.Parameter], nn.Parameter], steps_all: bool
) -> None:
    assert not untied(untie, steps_all=steps_all).of(Verdict.FAIL)
