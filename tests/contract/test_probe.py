"""Probing tells the rule of every overload with an autocast kernel, on any device, and leaves no trace."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from ampcheck import UsageError
from ampcheck.autocast import probe
from ampcheck.autocast.probe import measure_policy
from ampcheck.autocast.state import devices, nesting, raw_autocast, registered
from ampcheck.records.policy import APPEND_DTYPE, BANNED, FP32, LOWER, OTHER, PROMOTE, SET_DTYPE, Policy, release_of
from ampcheck.torchtools.source import op_name, overload

RELEASE = release_of(torch.__version__)
DEVICES = ("cpu", "cuda", "xpu", "mps")
OF_CUDA_BUILDS = {"aten::_cudnn_rnn"} if torch.version.cuda else set()
"""Its kernel computes with cuDNN before it calls the op, and cannot be asked without a driver."""
of_2_13 = pytest.mark.skipif(RELEASE != "2.13", reason=f"the counts are those of PyTorch 2.13, not of {RELEASE}")


# What it promises of PyTorch's own ops -----------------------------------------------------------------------------


@of_2_13
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("device", "counts"),
    [
        ("cpu", {LOWER: 24, FP32: 100, PROMOTE: 3}),
        ("cuda", {LOWER: 35, FP32: 59, SET_DTYPE: 11, APPEND_DTYPE: 2, PROMOTE: 11, BANNED: 1}),
        ("xpu", {LOWER: 33, FP32: 59, SET_DTYPE: 11, APPEND_DTYPE: 2, PROMOTE: 11, BANNED: 1}),
        ("mps", {LOWER: 26, FP32: 59, PROMOTE: 10}),
    ],
)
def test_the_policies_of_2_13_have_these_counts(device: str, counts: dict[str, int], dtype: torch.dtype) -> None:
    found = measure_policy(device, dtype).of("aten")
    held = {name: op for name, op in found.ops.items() if op.source == "ATen/autocast_mode.cpp"}  # not cuDNN's own
    assert Policy(device, found.torch, found.dtypes, held).counts() == counts


@pytest.mark.parametrize("device", DEVICES)
def test_every_registered_overload_of_pytorch_is_classified_with_its_facts(device: str) -> None:
    found = measure_policy(device).of("aten")
    assert found.registered > 90
    assert {*found.ops, *found.unprobed} == {name for name in registered(device) if name.startswith("aten::")}
    assert set(found.unprobed) <= OF_CUDA_BUILDS
    for name, op in found.ops.items():
        assert op.rule != OTHER, name
        assert {"float32", "low", "other", "float64"} <= op.facts.keys()
        assert op.source
        assert bool(op.raises) == (op.rule == BANNED)


@pytest.mark.parametrize("device", DEVICES)
def test_both_dtypes_of_autocast_follow_one_policy(device: str) -> None:
    half, brain = (measure_policy(device, dtype).of("aten") for dtype in ("float16", "bfloat16"))
    assert half.ops == brain.ops
    assert (half.dtypes, brain.dtypes) == (("float16",), ("bfloat16",))


@pytest.mark.parametrize("device", DEVICES)
def test_no_rule_touches_float64_and_the_facts_agree_with_the_label(device: str) -> None:
    for name, op in measure_policy(device).of("aten").ops.items():
        if name in OF_CUDA_BUILDS:
            continue
        if op.rule != BANNED:
            assert op.facts["float64"].startswith("float64"), name
        if op.rule in (LOWER, FP32):
            cast = "float32" if op.rule == FP32 else "low"
            assert {handed for given, handed in op.facts.items() if given != "float64"} == {cast}, name
        if op.rule in (SET_DTYPE, APPEND_DTYPE):
            assert op.facts["low"] == "low dtype=float32", name
        assert bool(op.redispatch) == (op.rule == APPEND_DTYPE), name


# The header that PyTorch installs --------------------------------------------------------------------------------

LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": LOWER,
    "AT_FORALL_FP32": FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": SET_DTYPE,
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": APPEND_DTYPE,
    "AT_FORALL_PROMOTE": PROMOTE,
}
"""The header's lists. They are those of CUDA, XPU and MTIA; the lists of CPU and MPS stand in a source file that no
wheel contains."""

BESIDE_THE_LISTS = {
    "aten::cudnn_convolution": "registered for CUDA alone, outside the lists that other devices share",
    "aten::cudnn_convolution_transpose": "registered for CUDA alone, outside the lists that other devices share",
    "aten::binary_cross_entropy": "banned: its kernel raises, and no list is of those",
    "aten::_cudnn_rnn": "CUDA builds compile ATen/cudnn/AutocastRNN.cpp, which registers a kernel of its own",
    "aten::linalg_matrix_sqrth": "2.14 and later register it; the header's lists were left as they were",
}
"""Every overload with a kernel that the header does not list, and why."""


def declared() -> dict[str, str]:
    """Overload to rule, as the header's macros say."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8").replace("\\\n", "\n")
    found = {}
    for macro, rule in LISTS.items():
        body = re.search(rf"#define {macro}\(_\)(.*?)(?=\n\s*\n|#define|#else|#endif|\Z)", text, re.DOTALL)
        assert body is not None, f"the header has no {macro}"
        if rule == APPEND_DTYPE:
            found |= {f"aten::{name}": rule for name in re.findall(r'"([\w.]+)"', body[1])}
        else:
            entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body[1])
            found |= {f"aten::{name}.{chosen}" if chosen else f"aten::{name}": rule for name, chosen in entries}
    return found


@pytest.mark.skipif(
    not hasattr(torch, "__file__") or not (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").exists(),
    reason="this PyTorch was installed without its headers",
)
@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_the_policy_is_what_the_installed_header_declares_and_each_disagreement_is_explained(device: str) -> None:
    listed = declared()
    assert len(listed) > 100, "this test no longer reads the header"
    found = {name: op.rule for name, op in measure_policy(device).of("aten").ops.items()}
    differing = {name for name in {*listed, *found} if listed.get(name) != found.get(name)}
    assert differing == {name for name in BESIDE_THE_LISTS if name in found}


# What it leaves behind -----------------------------------------------------------------------------------------------


def dispatcher() -> dict[str, Any]:
    """What the dispatcher and the Python dispatcher hold of every op, and the state of autocast."""
    names = torch._C._dispatch_get_all_op_names()
    held: dict[str, Any] = {name: torch._C._dispatch_dump(name) for name in names}
    for name in registered("cpu") + registered("cuda"):
        held[f"python {name}"] = dict(overload(name).py_kernels)
    for device in devices():
        if device != "privateuseone":
            held[f"autocast {device}"] = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    held["autocast"] = torch.is_autocast_cache_enabled(), nesting()
    return held


@pytest.mark.parametrize("device", DEVICES)
def test_the_dispatcher_is_after_probing_as_it_was_before(device: str) -> None:
    measure_policy(device)  # what PyTorch registers when a module is first imported is no trace of ours
    before = dispatcher()
    measure_policy(device, "bfloat16")
    assert dispatcher() == before


class Broken(BaseException):
    """As Ctrl-C would."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["_rule", "_ask", "_arguments", "_fact", "_source"])
def test_the_dispatcher_is_as_before_when_probing_is_broken_off(
    device: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_policy(device)
    before = dispatcher()
    calls = iter(range(10**9))
    real = getattr(probe, where)

    def breaks(*args: Any) -> Any:
        if next(calls) == 20:
            raise Broken
        return real(*args)

    monkeypatch.setattr(probe, where, breaks)
    with pytest.raises(Broken):
        measure_policy(device)
    assert dispatcher() == before
    monkeypatch.undo()
    assert measure_policy(device).of("aten").registered > 90  # and the lock is free


def test_autocast_of_the_caller_is_as_before() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False, dtype=torch.float16):
        measure_policy("cpu")
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (False, torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        measure_policy("cuda")
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


def meanwhile(work: Callable[[], Any], ops: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `work` gives in another thread while each of `ops` is being asked, on every device."""
    found: list[Any] = []
    real, asked = probe._ask, set()

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001  # the test shows it
            found.append(error)

    def ask(stage: Any, op: torch._ops.OpOverload, *args: Any) -> Any:
        if op_name(op) in ops and (stage.device, op) not in asked:
            asked.add((stage.device, op))
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        return real(stage, op, *args)

    monkeypatch.setattr(probe, "_ask", ask)
    for device in ("cpu", "cuda"):
        assert measure_policy(device).of("aten").ops.keys() >= set(ops)
    return found


def fake_ops() -> list[tuple[torch.dtype, torch.Size]]:
    with FakeTensorMode(), enable_python_dispatcher(), raw_autocast("cuda", torch.float16):
        found = []
        for device in ("cpu", "cuda"):
            x = torch.empty(4, 6, device=device)
            found += [torch.mm(x, x.T), torch.nn.functional.linear(x, x), torch.nn.functional.layer_norm(x, (6,))]
        return [(tensor.dtype, tensor.shape) for tensor in found]


OPS = ("aten::mm", "aten::linear")


def test_another_thread_with_fake_tensors_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fake_ops()
    assert meanwhile(fake_ops, OPS, monkeypatch) == [expected] * 2 * len(OPS)


def compiled_step() -> list[float]:
    torch._dynamo.reset()

    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = torch.nn.functional.linear(torch.mm(x, w), w)
            return torch.nn.functional.layer_norm(hidden, (4,)).softmax(-1).sum()

    x, w = torch.arange(16.0).reshape(4, 4), torch.eye(4).requires_grad_()
    loss = torch.compile(forward, backend="aot_eager")(x, w)
    loss.backward()
    assert w.grad is not None
    return [loss.item(), *w.grad.flatten().tolist()]


def test_another_thread_that_compiles_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compiled_step()
    assert meanwhile(compiled_step, OPS, monkeypatch) == [expected] * 2 * len(OPS)


@pytest.mark.parametrize("work", ["fake_ops", "compiled_step"])
def test_a_recorder_that_met_another_thread_would_be_seen(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = globals()[work]()
    monkeypatch.setattr(probe, "threading", SimpleNamespace(get_ident=lambda: 0))  # they pass for the probing thread
    assert meanwhile(globals()[work], OPS, monkeypatch) != [expected] * 2 * len(OPS)


def test_two_threads_may_probe_at_once() -> None:
    expected = {device: measure_policy(device) for device in DEVICES}
    found: list[tuple[str, Policy]] = []
    threads = [threading.Thread(target=lambda d=device: found.append((d, measure_policy(d)))) for device in DEVICES * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    assert all(policy == expected[device] for device, policy in found)


# Custom ops ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("ampcheck_probed", "FRAGMENT")
    yield made
    made._destroy()


def below(library: torch.library.Library, name: str, key: str, cast: torch.dtype, *, back: bool) -> None:
    """An autocast kernel as a package writes it: cast, call the op without autocast, cast the result back or not."""
    guard = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])

    def kernel(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(guard):
            out: torch.Tensor = getattr(torch.ops.ampcheck_probed, name)(x.to(cast), *rest)
        return out.to(x.dtype) if back else out

    library.impl(name, kernel, key)


@pytest.mark.needs_torch("2.7", "custom ops can be registered for autocast")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_custom_op_that_is_registered_with_a_dtype_has_it_fixed(device: str, dtype: torch.dtype) -> None:
    named = str(dtype).removeprefix("torch.")
    op = f"ampcheck_fixed::scaled_{named}"  # the finalizer of an earlier op of the same name would remove this one

    @torch.library.custom_op(op, mutates_args=())
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    scaled.register_autocast(device, dtype)
    try:
        found = {low: measure_policy(device, low).rule(op) for low in ("float16", "bfloat16")}
    finally:
        scaled._lib._destroy()
    fixed = FP32 if dtype is torch.float32 else f"fixed:{named}"
    assert found == {low: LOWER if low == named else fixed for low in found}


def test_a_kernel_that_casts_its_result_back_restores(library: torch.library.Library) -> None:
    for name, back in (("soft", True), ("hard", False)):
        library.define(f"{name}(Tensor x) -> Tensor")
        below(library, name, "AutocastCUDA", torch.float32, back=back)
    found = measure_policy("cuda")
    soft, hard = found.ops["ampcheck_probed::soft"], found.ops["ampcheck_probed::hard"]
    assert (soft.rule, soft.restores, soft.facts["low"]) == (FP32, True, "float32 -> low")
    assert (hard.rule, hard.restores, hard.facts["low"]) == (FP32, False, "float32")
    assert "ampcheck_probed::soft" not in measure_policy("cpu").ops


def test_an_op_of_another_backend_is_found(library: torch.library.Library) -> None:
    library.define("mine(Tensor x, Tensor? bias=None, int[] dims=[]) -> Tensor")
    below(library, "mine", "AutocastPrivateUse1", torch.bfloat16, back=False)
    found = measure_policy("privateuseone", "bfloat16")
    assert found.rule("ampcheck_probed::mine") == OTHER  # the bias is not cast
    assert found.ops["ampcheck_probed::mine"].facts["float32"] == "low float32"


def test_what_cannot_be_asked_is_named_with_the_reason(library: torch.library.Library) -> None:
    library.define("count(int n) -> int")
    library.impl("count", lambda n: n, "AutocastCUDA")
    library.define("picky(Tensor x) -> Tensor")

    def picky(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"picky wants three dimensions, not {x.dim()}\nand explains at length")

    library.impl("picky", picky, "AutocastCUDA")
    library.define("away(Tensor x) -> Tensor")
    library.impl("away", lambda x: x, "AutocastCUDA")
    found = measure_policy("cuda")
    ours = {name.partition("::")[2]: why for name, why in found.of("ampcheck_probed").unprobed.items()}
    assert ours == {
        "count": "it takes no tensor",
        "picky": "picky wants three dimensions, not 2",
        "away": "its kernel calls no overload of the op",
    }
    assert not found.of("ampcheck_probed").ops
    assert found.registered == len(registered("cuda"))


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["gpu", "", "cuda0", "CUDA", "meta"])
def test_an_unknown_device_lists_those_that_autocast_knows(device: str) -> None:
    with pytest.raises(UsageError, match="it has cpu, cuda, xpu") as caught:
        measure_policy(device)
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "", torch.float64, torch.float32])
def test_a_dtype_that_autocast_does_not_cast_to_is_refused(dtype: Any) -> None:
    with pytest.raises(UsageError, match="float16"):
        measure_policy("cpu", dtype)


@pytest.mark.parametrize("dtype", ["half", "fp16", "torch.float16", torch.half])
def test_a_dtype_may_be_named_by_an_alias(dtype: Any) -> None:
    assert measure_policy("cpu", dtype).dtypes == ("float16",)


def test_an_index_of_a_device_says_no_more_than_its_type() -> None:
    assert measure_policy("cuda:1") == measure_policy("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_the_policy_is_the_same_whatever_the_caller_has_switched_on(device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain = measure_policy(device)
    with torch.inference_mode():
        assert measure_policy(device) == plain
    with torch.device("meta"):
        assert measure_policy(device) == plain
    with FakeTensorMode():
        assert measure_policy(device) == plain
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert measure_policy(device) == plain
