"""The snapshots that ampcheck carries: one a release from 2.4 to 2.15, and between them the changes that there were."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ampcheck import UsageError
from ampcheck.autocast import policy as snapshots
from ampcheck.autocast.drift import compare
from ampcheck.autocast.policy import DATA, Snapshot, load_release, nearest, releases
from ampcheck.records.policy import APPEND_DTYPE, BANNED, FP32, LOWER, OTHER, PROMOTE, SET_DTYPE, Policy

ALL = tuple(f"2.{minor}" for minor in range(4, 16))


def test_there_is_a_snapshot_of_each_release_from_2_4_to_2_15() -> None:
    assert releases() == ALL


@pytest.mark.parametrize("release", ALL)
def test_a_snapshot_is_of_a_cuda_wheel_of_its_release(release: str) -> None:
    snapshot = load_release(release)
    assert snapshot.release == release
    assert snapshot.build.startswith("cuda ")
    assert snapshot.platform == "Linux x86_64"
    assert {"cpu", "cuda", "xpu"} <= set(snapshot.policies)


@pytest.mark.parametrize("release", ALL)
def test_a_snapshot_knows_the_rule_of_every_kernel_but_of_those_that_need_a_device(release: str) -> None:
    for device, held in load_release(release).policies.items():
        assert set(held) == {"float16", "bfloat16"}
        for policy in held.values():
            assert len(policy.ops) > 90
            assert OTHER not in policy.counts()
            assert set(policy.unprobed) <= ({"aten::_cudnn_rnn"} if device == "cuda" else set())
            assert all(name.startswith("aten::") and op.facts and op.source for name, op in policy.ops.items())


@pytest.mark.parametrize("release", ALL)
def test_a_snapshot_is_kept_as_the_program_writes_it(release: str, tmp_path: Path) -> None:
    load_release(release).save(tmp_path / "again.json")
    kept = DATA / f"torch-{release}.json"
    assert (tmp_path / "again.json").read_text(encoding="utf-8") == kept.read_text(encoding="utf-8")


def beside_cudnn(policy: Policy) -> dict[str, int]:
    own = {name: op for name, op in policy.ops.items() if name != "aten::_cudnn_rnn"}
    return Policy(policy.device, policy.torch, policy.dtypes, own).counts()


@pytest.mark.parametrize(
    ("device", "counts"),
    [
        ("cpu", {LOWER: 24, FP32: 100, PROMOTE: 3}),
        ("cuda", {LOWER: 35, FP32: 59, SET_DTYPE: 11, APPEND_DTYPE: 2, PROMOTE: 11, BANNED: 1}),
        ("xpu", {LOWER: 33, FP32: 59, SET_DTYPE: 11, APPEND_DTYPE: 2, PROMOTE: 11, BANNED: 1}),
        ("mtia", {LOWER: 33, FP32: 59, SET_DTYPE: 11, APPEND_DTYPE: 2, PROMOTE: 11, BANNED: 1}),
        ("mps", {LOWER: 26, FP32: 59, PROMOTE: 10}),
    ],
)
def test_the_shipped_policies_of_2_13_have_these_counts(device: str, counts: dict[str, int]) -> None:
    for dtype in ("float16", "bfloat16"):
        assert beside_cudnn(load_release("2.13").policy(device, dtype)) == counts


# What changed from release to release -----------------------------------------------------------------------------

NAMED_DIMENSIONS = (
    "cumprod.dimname cumsum.dimname log_softmax.Dimname prod.dim_Dimname softmax.Dimname sum.dim_DimnameList"
)
GONE_IN_2_13 = {
    **{f"-{op}": SET_DTYPE for op in NAMED_DIMENSIONS.split()},
    "-norm.names_ScalarOpt_dim": APPEND_DTYPE,
}
CHANGES = {
    ("2.6", "cpu"): {"+_addmm_activation": LOWER},
    ("2.6", "mps"): {"+scaled_dot_product_attention": LOWER},
    ("2.9", "mps"): {"+conv3d": LOWER, "+conv_transpose3d.input": FP32},
    ("2.12", "cuda"): {"+rms_norm": FP32},
    ("2.12", "xpu"): {"+rms_norm": FP32},
    ("2.12", "mtia"): {"+rms_norm": FP32},
    ("2.13", "cpu"): {"-index_copy.dimname": PROMOTE, "-prod.dim_Dimname": FP32},
    ("2.13", "cuda"): GONE_IN_2_13,
    ("2.13", "xpu"): GONE_IN_2_13,
    ("2.13", "mtia"): GONE_IN_2_13,
    ("2.13", "mps"): {f"-{op}": FP32 for op in NAMED_DIMENSIONS.split()},
    ("2.14", "cpu"): {"+linalg_matrix_sqrth": FP32, "-cholesky": FP32, "-qr": FP32},
    ("2.14", "cuda"): {"+linalg_matrix_sqrth": FP32},
}
"""Release and device to the overloads that came (+) and went (-), with their rule. There is no other change."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("before", "after"), list(pairwise(ALL)))
def test_between_two_releases_these_overloads_changed_and_no_others(before: str, after: str, dtype: str) -> None:
    one, other = load_release(before), load_release(after)
    for device in [device for device in other.policies if device in one.policies]:
        found = {}
        for change in compare(one.policy(device, dtype), other.policy(device, dtype)).changes:
            assert (change.before is None) != (change.after is None), f"{change.op} has another rule"
            for sign, op in (("-", change.before), ("+", change.after)):
                if op is not None:
                    found[sign + change.op.removeprefix("aten::")] = op.rule
        assert found == CHANGES.get((after, device), {}), f"{device}, {before} to {after}"


@pytest.mark.parametrize("release", ALL)
def test_no_device_is_lost_from_one_release_to_the_next(release: str) -> None:
    later = ALL[ALL.index(release) :]
    assert all(set(load_release(release).policies) <= set(load_release(next_one).policies) for next_one in later)


def test_bce_is_banned_on_cuda_and_xpu_fp32_on_the_cpu_and_left_alone_on_mps() -> None:
    found = {
        d: load_release("2.13").policy(d).rule("aten::binary_cross_entropy") for d in ("cuda", "xpu", "cpu", "mps")
    }
    assert found == {"cuda": BANNED, "xpu": BANNED, "cpu": FP32, "mps": ""}


def test_on_mps_a_convolution_in_three_dimensions_is_low_and_its_transpose_is_not() -> None:
    policy = load_release("2.13").policy("mps")
    assert (policy.rule("aten::conv3d"), policy.rule("aten::conv_transpose3d.input")) == (LOWER, FP32)


# Which one is taken -------------------------------------------------------------------------------------------------


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that stands for the shipped data, with the releases 2.9, 2.10 and 3.0."""
    held = {"cpu": {"float16": Policy("cpu", "", ("float16",), {})}}
    for release in ("2.9", "2.10", "3.0"):
        Snapshot(f"{release}.0", "cpu", "", "", held).save(tmp_path / f"torch-{release}.json")
    monkeypatch.setattr(snapshots, "DATA", tmp_path)
    for function in (releases, load_release):
        function.cache_clear()
    yield tmp_path
    for function in (releases, load_release):
        function.cache_clear()


@pytest.mark.usefixtures("few")
def test_releases_are_in_the_order_of_their_numbers() -> None:
    assert releases() == ("2.9", "2.10", "3.0")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.10.1+cu128", "2.10"),
        ("2.12.0", "2.10"),
        ("2.9", "2.9"),
        ("2.1.0", "2.9"),
        ("3.7.0.dev20300101", "3.0"),
        ("2.100.0", "2.10"),
    ],
)
def test_the_nearest_is_the_release_itself_else_the_one_before_it_else_the_oldest(version: str, release: str) -> None:
    assert nearest(version).release == release


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("release", ["2.8", "2", "", "latest", "2.11.0"])
def test_a_release_that_is_not_carried_lists_those_that_are(release: str) -> None:
    with pytest.raises(UsageError, match=r"it has 2\.9, 2\.10, 3\.0"):
        load_release(release)


@pytest.mark.parametrize("version", ["", "two", "v2.13"])
def test_what_is_no_version_has_no_nearest_release(version: str) -> None:
    with pytest.raises(UsageError, match=r"write one as 2\.13"):
        nearest(version)


def test_a_damaged_shipped_file_is_one_sentence(few: Path) -> None:
    (few / "torch-2.9.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=r"could be read from torch-2\.9\.json"):
        load_release("2.9")


def test_without_any_the_installation_is_said_to_be_broken(few: Path) -> None:
    for path in few.iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="install ampcheck again"):
        nearest(torch.__version__)
    with pytest.raises(UsageError, match="it has none"):
        load_release("2.13")
