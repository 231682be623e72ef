"""CPU tensors follow another device's policy in eager mode, in backward, in threads, nested, and nothing stays behind.

Native autocast of the CPU is the oracle for the Python kernels: with an observer every op goes through one, and losses,
gradients and casts must be the same to the last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampcheck
from ampcheck.autocast.emulate import Emulation, active, emulate, emulated_policy
from ampcheck.autocast.probe import DTYPES
from ampcheck.autocast.state import devices, nesting, registered
from ampcheck.core.errors import UsageError
from ampcheck.demo import CharTransformer, batch
from ampcheck.records.policy import OTHER, OpPolicy, Policy

LOW = pytest.mark.parametrize("low", DTYPES, ids=str)


def seen_by(kernels: str, low: torch.dtype) -> Any:
    """The CPU's own policy by PyTorch's kernels or by ours."""
    if kernels == "native":
        return torch.autocast("cpu", low)
    return Emulation(emulated_policy("cpu", low), low, observe=lambda *call: None)


def bits(values: list[Tensor]) -> list[Tensor]:
    return [value.detach().clone() for value in values]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def everything() -> dict[str, Any]:
    """What an emulation touches: the dispatcher, `torch.autocast`, autocast's state and the switch of AOTAutograd."""
    from torch._functorch import config

    region = torch.amp.autocast_mode.autocast
    names = sorted({name for device in devices() for name in registered(device)})
    return {
        "dispatcher": [torch._C._dispatch_dump(name) for name in names],
        "methods": [getattr(region, name) for name in ("__init__", "__enter__", "__exit__")],
        "clear": torch.clear_autocast_cache,
        "state": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda", "xpu")],
        "cache": torch.is_autocast_cache_enabled(),
        "nesting": nesting(),
        "aot cache": config.enable_autograd_cache,
        "active": active(),
    }


@pytest.fixture
def restored() -> Iterator[None]:
    """All is as it was when the test is over."""
    with emulate("cuda", torch.float16):  # the first emulation imports and registers what later ones find
        pass
    before = everything()
    yield
    assert everything() == before


def product_and_exp(x: Tensor, w: Tensor) -> Tensor:
    """On CUDA `exp` runs in float32, on the CPU it stays in the low dtype of the product."""
    return (x @ w).exp()


# ---------------------------------------------------------------------------------------------------------------------
# the kernels do what PyTorch's own do


@LOW
def test_python_kernels_give_the_demo_the_loss_and_gradients_of_native_autocast_bit_by_bit(low: torch.dtype) -> None:
    torch.manual_seed(0)
    model, data = CharTransformer(layers=1, width=32), batch(4, 16)
    assert same(
        trained(lambda: model(*data)[1], model, "native", low), trained(lambda: model(*data)[1], model, "", low)
    )


@LOW
def test_python_kernels_give_a_gpt2_the_loss_and_gradients_of_native_autocast_bit_by_bit(low: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(50, (2, 12))

    def loss() -> Tensor:
        torch.manual_seed(1)  # dropout
        found: Tensor = model(tokens, labels=tokens).loss
        return found

    assert same(trained(loss, model, "native", low), trained(loss, model, "ours", low))


def trained(loss: Callable[[], Tensor], model: nn.Module, kernels: str, low: torch.dtype) -> list[Tensor]:
    """The loss of two passes in one region, whose gradients add up, and every gradient."""
    model.zero_grad(set_to_none=True)
    with seen_by(kernels, low):
        first, second = loss(), loss()
    first.backward()
    second.backward()
    return bits([first, second, *(p.grad for p in model.parameters() if p.grad is not None)])


class Casts(TorchDispatchMode):
    """The casts below autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernels", ["native", "ours"])
def test_a_weight_is_cast_once_a_region_and_anew_in_the_next(kernels: str) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4).bfloat16()
    with seen_by(kernels, torch.bfloat16), Casts() as casts:
        layer(x), layer(x)
    assert casts.made == 1
    if kernels == "ours":
        with emulate("cpu"), Casts() as casts:
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    layer(x), layer(x)
        assert casts.made == 2


@pytest.mark.parametrize("kernels", ["native", "ours"])
def test_a_weight_that_changes_inside_the_region_is_seen_with_its_stale_cast(kernels: str) -> None:
    layer, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    with torch.no_grad():
        layer.weight.fill_(1)
    with seen_by(kernels, torch.bfloat16):
        layer(x)
        with torch.no_grad():
            layer.weight.fill_(2)
        assert layer(x).item() == 1
        torch.clear_autocast_cache()
        assert layer(x).item() == 2


@pytest.mark.parametrize("kernels", ["native", "ours"])
def test_without_the_cache_a_weight_is_cast_for_every_call(kernels: str) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4).bfloat16()
    with seen_by(kernels, torch.bfloat16), torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Casts() as casts:
        layer(x), layer(x)
    assert casts.made == 2


@pytest.mark.parametrize("kernels", ["native", "ours"])
def test_a_weight_first_cast_without_grad_has_the_gradient_that_native_autocast_gives(kernels: str) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with seen_by(kernels, torch.bfloat16):
        with torch.no_grad():
            layer(x)
        after = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        assert after.requires_grad == layer(x).requires_grad


@pytest.mark.parametrize("kernels", ["native", "ours"])
def test_regions_of_two_dtypes_that_share_a_weight_raise_as_on_native_autocast(kernels: str) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with seen_by(kernels, torch.bfloat16):
        layer(x)
        with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="same dtype"):
            layer(x)


# ---------------------------------------------------------------------------------------------------------------------
# the device's rules


def test_cpu_tensors_follow_cuda_in_forward_and_backward(restored: None) -> None:
    x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        assert product_and_exp(x, w).dtype is torch.float16
    with emulate("cuda", torch.float16):
        out = product_and_exp(x, w)
        assert out.dtype is torch.float32
        out.sum().backward()
    assert w.grad is not None
    assert w.grad.dtype is torch.float32
    with torch.autocast("cpu", torch.float16):
        assert product_and_exp(x, w).dtype is torch.float16


def test_a_region_for_the_device_or_for_the_cpu_is_a_region_of_the_emulated_device(restored: None) -> None:
    x = torch.ones(2, 2)
    with emulate("cuda"):
        assert product_and_exp(x, x).dtype is torch.float32
        assert (x @ x).dtype is torch.float32
        for region in (torch.autocast("cuda", torch.float16), torch.autocast("cpu", torch.float16)):
            with region:
                assert (x @ x).dtype is torch.float16
                assert torch.is_autocast_enabled("cuda")
                assert torch.get_autocast_dtype("cuda") is torch.float16
                with torch.autocast("cuda", enabled=False):
                    assert (x @ x).dtype is torch.float32
                    assert not torch.is_autocast_enabled("cuda")
            assert not torch.is_autocast_enabled("cuda")


def test_an_op_that_the_device_bans_raises_pytorchs_own_message() -> None:
    p = torch.rand(3)
    with emulate("cuda", torch.float16), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        torch.nn.functional.binary_cross_entropy(p, p)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_under_the_same_rules(reentrant: bool, restored: None) -> None:
    x, w = torch.randn(4, 4) / 8, torch.randn(4, 4, requires_grad=True)

    def gradient(run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        w.grad = None
        run(x, w).sum().backward()
        assert w.grad is not None
        return w.grad

    def by_checkpoint(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = checkpoint(product_and_exp, x, w, use_reentrant=reentrant)
        assert out.dtype is torch.float32
        return out

    with emulate("cuda", torch.float16):
        plain = gradient(product_and_exp)
        assert torch.equal(gradient(by_checkpoint), plain)


def test_a_thread_that_enters_a_region_itself_is_emulated_too(restored: None) -> None:
    x, found = torch.ones(2, 2), []

    def work() -> None:
        found.append(product_and_exp(x, x).dtype)
        with torch.autocast("cuda", torch.float16):
            found.extend([(x @ x).dtype, product_and_exp(x, x).dtype])

    with emulate("cuda", torch.float16):
        in_thread(work)
    assert found == [torch.float32, torch.float16, torch.float32]


def test_another_thread_cannot_begin_an_emulation_meanwhile(restored: None) -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with emulate("xpu"):
                pass
        except UsageError as error:
            raised.append(error)

    with emulate("cuda"):
        in_thread(work)
    assert "another thread emulates a device" in str(raised[0])


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.needs_torch("2.7", "custom ops can be registered for autocast")
def test_a_custom_op_follows_what_is_registered_for_the_emulated_device(double: Any, restored: None) -> None:
    x = torch.ones(2, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16):
        assert double(x).dtype is torch.float16
    with emulate("cuda", torch.float16):
        assert double(x).dtype is torch.float32


@pytest.fixture(scope="module")
def double() -> Any:
    """An op of a library, cast to float32 on CUDA alone. Autocast kernels of the library cannot be taken back."""
    library = torch.library.Library("ampcheck_emulated", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: 2 * x, "CPU")
    torch.library.register_autocast("ampcheck_emulated::double", "cuda", torch.float32, lib=library)
    yield torch.ops.ampcheck_emulated.double
    library._destroy()


# ---------------------------------------------------------------------------------------------------------------------
# nesting and restoring


def test_emulations_nest_and_each_end_brings_back_the_one_around_it(restored: None) -> None:
    x = torch.ones(2, 2)

    def rules() -> tuple[torch.dtype, ...]:
        """`_addmm_activation` is cast on the CPU, since 2.6; `exp` is cast on accelerators."""
        with torch.autocast("cpu", torch.float16):
            fused = torch.ops.aten._addmm_activation(x[0], x, x)
            return fused.dtype, torch.exp(x.half()).dtype

    own = (torch.float16, torch.float16)
    older = (torch.float32, torch.float16)
    accelerator = (torch.float32, torch.float32)
    assert rules() == own
    with emulate("cpu", release="2.4"):
        assert rules() == older
        with emulate("xpu"):
            assert rules() == accelerator
            with emulate("cuda"):
                assert rules() == accelerator
                with emulate("cpu"):
                    assert rules() == own
                assert rules() == accelerator
            assert rules() == accelerator
        assert rules() == older
    assert rules() == own


def test_nested_regions_show_the_state_of_both_devices_and_bring_it_back(restored: None) -> None:
    with emulate("xpu", torch.bfloat16), emulate("cuda", torch.float16):
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("xpu")
        with torch.autocast("xpu", torch.bfloat16):
            assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is torch.bfloat16


def test_an_exception_inside_leaves_nothing_behind(restored: None) -> None:
    with pytest.raises(ZeroDivisionError), emulate("cuda", torch.float16):
        1 / 0


def test_an_exception_on_entry_leaves_nothing_behind(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble() -> None:
        raise ZeroDivisionError

    emulation = emulate("cuda", torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr("ampcheck.torchtools.dynamo.reset", stumble)
        with pytest.raises(ZeroDivisionError), emulation:
            pass
    with emulation:
        assert product_and_exp(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


def test_an_emulation_can_be_entered_again_but_not_inside_itself(restored: None) -> None:
    emulation = emulate("cuda", torch.float16)
    for _ in range(2):
        with emulation, pytest.raises(UsageError, match="make another to nest it"), emulation:
            pass


def test_a_region_that_was_made_outside_works_inside(restored: None) -> None:
    region, x = torch.autocast("cpu", torch.float16), torch.ones(2, 2)
    with emulate("cuda"), region:
        assert product_and_exp(x, x).dtype is torch.float32


def test_who_records_hears_of_an_emulation_inside(restored: None) -> None:
    heard: list[tuple[str, str]] = []
    x = torch.ones(2, 2)
    with Emulation(emulated_policy("cpu"), observe=lambda op, rule, *_: heard.append((op, rule))):
        with emulate("cuda", torch.float16):
            x.exp()
        with torch.autocast("cpu", torch.float16):
            _ = x @ x
    assert heard == [("aten::exp", "fp32"), ("aten::matmul", "lower_precision")]


def test_ops_that_this_pytorch_lacks_are_named() -> None:
    with emulate("cpu", release="2.4") as emulation:
        known = set(torch._C._dispatch_get_all_op_names())
        assert set(emulation.unavailable) == {name for name in emulation.policy.ops if name not in known}


@pytest.mark.parametrize(
    ("asked", "told"),
    [({"device": "cud"}, "cuda"), ({"release": "1.0"}, "2.13"), ({"dtype": "float64"}, "float16, bfloat16")],
)
def test_what_cannot_be_emulated_is_told_with_what_can(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        ampcheck.emulate(**asked)


def test_a_policy_with_a_rule_that_nobody_knows_is_not_emulated() -> None:
    policy = Policy("cuda", "9.9", ("float16",), {"aten::mm": OpPolicy(OTHER)})
    with pytest.raises(UsageError, match="aten::mm"):
        Emulation(policy)
