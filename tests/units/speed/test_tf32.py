"""TF32 is switched for a while, whichever interface the program uses, and every flag is then as it was.

The flags exist without a GPU; what they do on one is tested where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ampcheck import UsageError
from ampcheck.speed.steps import tf32

NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def flags() -> list[object]:
    """Every flag that TF32 depends on, by both interfaces; "refused" where PyTorch does not let it be read."""

    def read(flag: Callable[[], object]) -> object:
        try:
            return flag()
        except RuntimeError:
            return "refused"

    backends = torch.backends
    old = [read(torch.get_float32_matmul_precision), read(lambda: backends.cuda.matmul.allow_tf32)]
    old.append(read(lambda: backends.cudnn.allow_tf32))
    if NEWER:
        parts = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        old += [part.fp32_precision for part in parts]
    return old


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    if NEWER:
        torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("start", ["untouched", "highest", "high", "medium", "cudnn off"])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_a_program_of_the_old_interface_can_read_its_flags_inside_and_finds_them_as_they_were(
    start: str, precision: str
) -> None:
    if start == "cudnn off":
        torch.backends.cudnn.allow_tf32 = False
    elif start != "untouched":
        torch.set_float32_matmul_precision(start)
    before = flags()
    with tf32(precision, "cuda")():
        wanted = precision == "tf32"
        assert torch.get_float32_matmul_precision() == ("high" if wanted else "highest")
        assert torch.backends.cuda.matmul.allow_tf32 is wanted
        assert torch.backends.cudnn.allow_tf32 is wanted
    assert flags() == before


@pytest.mark.skipif(not NEWER, reason="fp32_precision is of PyTorch 2.9 and later")
@pytest.mark.parametrize("whole", ["tf32", "none"])
@pytest.mark.parametrize("start", ["tf32", "ieee"])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_a_program_of_the_new_interface_runs_as_asked_and_finds_its_flags_as_they_were(
    start: str, precision: str, whole: str
) -> None:
    torch.backends.fp32_precision = whole
    torch.backends.cuda.matmul.fp32_precision = start
    torch.backends.cudnn.conv.fp32_precision = start
    before = flags()
    with tf32(precision, "cuda")():
        wanted = precision == "tf32"
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is wanted
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is wanted
        assert (torch.backends.cudnn.rnn.fp32_precision == "tf32") is wanted
    assert flags() == before


def test_an_exception_inside_leaves_the_flags_as_they_were() -> None:
    before = flags()
    with pytest.raises(ValueError, match="inside"), tf32("tf32", "cuda")():
        raise ValueError("inside")
    assert flags() == before


def test_other_precisions_and_devices_change_nothing() -> None:
    before = flags()
    with tf32("bfloat16", "cuda")(), tf32("float32", "cpu")():
        assert flags() == before


def test_tf32_without_tensor_cores_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="leave tf32 out"):
        tf32("tf32", "cpu")
