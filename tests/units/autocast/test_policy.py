"""Policies and snapshots are data: they count, they cut out a namespace, they survive the way through a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.autocast.policy import SCHEMA, Snapshot
from ampcheck.core.errors import UsageError
from ampcheck.records.policy import FIXED, RULES, OpPolicy, Policy, release_of

words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
rules = st.sampled_from([rule for rule in RULES if not rule.startswith(FIXED)] + ["fixed:float32", "fixed:bfloat16"])
ops = st.builds(
    OpPolicy,
    rules,
    st.dictionaries(words, words, max_size=3),
    redispatch=words,
    restores=st.booleans(),
    raises=words,
    source=words,
)
names = st.builds("{}::{}".format, st.sampled_from(["aten", "mine", "other"]), words)
DTYPES = ("float16", "bfloat16")


@st.composite
def policies(draw: st.DrawFn, device: str = "cuda", dtype: str = "float16") -> Policy:
    held = draw(st.dictionaries(names, ops, max_size=5))
    unprobed = draw(st.dictionaries(names, words, max_size=3))
    return Policy(device, "2.13.0", (dtype,), held, {k: v for k, v in unprobed.items() if k not in held})


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Some devices with both dtypes alike, some with two policies, some with one dtype."""
    held: dict[str, dict[str, Policy]] = {}
    for device in draw(st.sets(st.sampled_from(["cpu", "cuda", "mps"]), min_size=1)):
        dtypes = draw(st.sampled_from([DTYPES, DTYPES, DTYPES[:1]]))
        first = draw(policies(device))
        alike = draw(st.booleans())
        held[device] = {
            dtype: Policy(device, "2.13.0", (dtype,), first.ops, first.unprobed)
            if alike
            else draw(policies(device, dtype))
            for dtype in dtypes
        }
    return Snapshot("2.13.0", draw(words), draw(words), "2026-01-31", held)


@given(snapshots())
def test_a_snapshot_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, taken: Snapshot) -> None:
    path = tmp_path_factory.mktemp("snapshot") / "torch-2.13.json"
    taken.save(path)
    assert Snapshot.load(path) == taken
    assert json.loads(path.read_text(encoding="utf-8")) == taken.to_json()


@given(snapshots())
def test_each_op_has_a_line_of_its_own(tmp_path_factory: pytest.TempPathFactory, taken: Snapshot) -> None:
    path = tmp_path_factory.mktemp("snapshot") / "s.json"
    taken.save(path)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if '{"rule"' in line]
    assert all(line.count('{"rule"') == 1 for line in lines)
    devices = taken.to_json()["devices"].values()
    parts = [part for held in devices for part in (held, *held.get("differing", {}).values())]
    assert len(lines) == sum(len(part["ops"]) for part in parts)


def test_what_two_dtypes_share_stands_once() -> None:
    mm = {"aten::mm": OpPolicy("lower_precision", {"low": "low"})}
    alike = {dtype: Policy("cuda", "2.13.0", (dtype,), mm) for dtype in DTYPES}
    assert "differing" not in Snapshot("2.13.0", "cpu", "", "", {"cuda": alike}).to_json()["devices"]["cuda"]
    other = {**alike, "bfloat16": Policy("cuda", "2.13.0", ("bfloat16",), {}, {"aten::mm": "no"})}
    data = Snapshot("2.13.0", "cpu", "", "", {"cuda": other}).to_json()["devices"]["cuda"]
    assert data["differing"] == {"bfloat16": {"ops": {}, "unprobed": {"aten::mm": "no"}}}


@given(policies())
def test_counts_and_coverage_are_those_of_the_ops(policy: Policy) -> None:
    assert sum(policy.counts().values()) == len(policy.ops)
    assert list(policy.counts()) == [rule for rule in RULES if rule in policy.counts()]
    assert policy.registered == len({*policy.ops, *policy.unprobed})


@given(policies())
def test_the_parts_by_namespace_are_the_whole(policy: Policy) -> None:
    parts = [policy.of(namespace) for namespace in ("aten", "mine", "other")]
    assert {op for part in parts for op in (*part.ops, *part.unprobed)} == {*policy.ops, *policy.unprobed}
    assert sum(part.registered for part in parts) == policy.registered
    assert policy.of("ate").registered == 0


def test_an_op_that_autocast_leaves_alone_has_no_rule() -> None:
    policy = Policy("cuda", "2.13.0", ("float16",), {"aten::mm": OpPolicy("lower_precision")}, {"aten::x": "why"})
    assert (policy.rule("aten::mm"), policy.rule("aten::relu"), policy.rule("aten::x")) == ("lower_precision", "", "")


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", "2.13"), ("2.4.1", "2.4"), ("2.14.0.dev20250101+cu126", "2.14"), ("2.15.0a0+git1", "2.15")],
)
def test_a_version_belongs_to_a_release(version: str, release: str) -> None:
    assert release_of(version) == release
    assert Snapshot(version, "", "", "", {}).release == release


# Files that are no snapshot -----------------------------------------------------------------------------------------


def sound() -> dict[str, Any]:
    mm = OpPolicy("lower_precision", {"float32": "low"}, restores=True, source="ATen/autocast_mode.cpp")
    held = {dtype: Policy("cuda", "2.13.0", (dtype,), {"aten::mm": mm}, {"aten::x": "why"}) for dtype in DTYPES}
    return Snapshot("2.13.0", "cpu", "Linux", "2026-01-31", {"cuda": held}).to_json()


def refused(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        Snapshot.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_the_sound_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(sound()), encoding="utf-8")
    assert Snapshot.load(tmp_path / "s.json").policy("cuda").rule("aten::mm") == "lower_precision"


@pytest.mark.parametrize("text", ["", "{", "nothing", '{"schema": 1', "[" * 100_000, "\ufeff\x00"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    assert "no autocast snapshot could be read" in refused(tmp_path / "s.json", text)


@pytest.mark.parametrize("text", ["[]", "null", "3", "{}", '{"schema": "1"}', '{"schema": true}', '{"schema": 1.0}'])
def test_json_that_is_no_snapshot_is_refused(tmp_path: Path, text: str) -> None:
    assert "is no autocast snapshot" in refused(tmp_path / "s.json", text)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"could be read from torch-9\.9\.json"):
        Snapshot.load(tmp_path / "torch-9.9.json")


def test_a_newer_schema_asks_for_a_newer_ampcheck(tmp_path: Path) -> None:
    text = json.dumps({**sound(), "schema": SCHEMA + 1, "devices": "in another form"})
    assert "update ampcheck" in refused(tmp_path / "s.json", text)


@pytest.mark.parametrize("key", ["torch", "build", "platform", "date", "devices"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    data = sound()
    del data[key]
    message = refused(tmp_path / "s.json", json.dumps(data))
    assert "is damaged" in message
    assert key in message


@pytest.mark.parametrize("key", ["dtypes", "ops", "unprobed"])
def test_a_missing_key_of_a_device_is_named(tmp_path: Path, key: str) -> None:
    data = sound()
    del data["devices"]["cuda"][key]
    assert repr(key) in refused(tmp_path / "s.json", json.dumps(data))


def values(value: Any, at: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Everything in nested mappings, with the keys that lead to it."""
    items = value.items() if isinstance(value, dict) else ()
    return [(at, value), *(found for key, item in items for found in values(item, (*at, key)))]


WRONG = [
    (path, wrong)
    for path, value in values(sound())
    for wrong in (None, 7, True, "text", ["list"], [], {"key": 1})
    if path and path != ("schema",) and type(wrong) is not type(value)
]


@pytest.mark.parametrize(("path", "wrong"), WRONG, ids=[f"{'.'.join(path)}={wrong}" for path, wrong in WRONG])
def test_a_value_of_a_wrong_type_is_refused(tmp_path: Path, path: tuple[str, ...], wrong: Any) -> None:
    data = sound()
    part = data
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = wrong
    assert "is damaged" in refused(tmp_path / "s.json", json.dumps(data))


def test_a_snapshot_of_no_device_is_refused(tmp_path: Path) -> None:
    assert "names no device" in refused(tmp_path / "s.json", json.dumps({**sound(), "devices": {}}))


@pytest.mark.parametrize("rule", ["", "lower", "FP32", "fixed:"])
def test_a_rule_that_there_is_not_is_refused(tmp_path: Path, rule: str) -> None:
    data = sound()
    data["devices"]["cuda"]["ops"]["aten::mm"]["rule"] = rule
    assert "is damaged" in refused(tmp_path / "s.json", json.dumps(data))


def test_a_device_without_a_policy_lists_the_others() -> None:
    snapshot = Snapshot("2.13.0", "cpu", "", "", {"cpu": {"float16": Policy("cpu", "2.13.0", ("float16",), {})}})
    with pytest.raises(UsageError, match="has no autocast policy for 'mps'; it has cpu"):
        snapshot.policy("mps")
    with pytest.raises(UsageError, match="measured for float16, not for bfloat16"):
        snapshot.policy("cpu", "bfloat16")


def test_reading_policies_imports_no_torch() -> None:
    program = (
        "import sys, ampcheck.autocast.drift as drift, ampcheck.autocast.policy, ampcheck.autocast.views;"
        "from ampcheck.autocast.policy import releases, load_release, nearest;"
        "assert nearest('2.13').policy('cuda').ops and drift.history('aten::mm', 'cuda');"
        "drift.compare(nearest('2.4').policy('cuda'), nearest('2.15').policy('cuda'));"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
