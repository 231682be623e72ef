"""Where policies differ is told, op by op; what the installed PyTorch does is held against the shipped snapshot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck import UsageError, assert_policy
from ampcheck.autocast import drift, judge
from ampcheck.autocast import policy as snapshots
from ampcheck.autocast.drift import compare, history, judge_drift, since, spans
from ampcheck.autocast.policy import Snapshot
from ampcheck.autocast.probe import measure_policy
from ampcheck.core.run import Finding, Verdict, collect
from ampcheck.records.policy import FP32, LOWER, PROMOTE, OpPolicy, Policy

HEADER = "ATen/autocast_mode.cpp"
lower, fp32 = OpPolicy(LOWER, {"low": "low"}, source=HEADER), OpPolicy(FP32, {"low": "float32"}, source=HEADER)
cudnn = OpPolicy(LOWER, {"low": "low"}, source="ATen/cudnn/AutocastRNN.cpp")


def policy(torch: str = "2.13.0", unprobed: dict[str, str] | None = None, **ops: OpPolicy) -> Policy:
    """A policy of CUDA; `mm=...` is of aten::mm and `mine__mm=...` of mine::mm."""
    named = {name.replace("__", "::") if "__" in name else f"aten::{name}": op for name, op in ops.items()}
    return Policy("cuda", torch, ("float16",), named, unprobed or {})


def snapshot(held: Policy, of_build: str = "cuda 13.0") -> Snapshot:
    return Snapshot(held.torch, of_build, "Linux", "2026-01-31", {held.device: {"float16": held}})


def judged(found: Policy, held: Policy, builds: tuple[str, str] = ("cpu", "cuda 13.0")) -> list[Finding]:
    return list(judge_drift(found, snapshot(held, builds[1]), build=builds[0]).findings)


def verdicts(findings: list[Finding]) -> list[tuple[Verdict, str]]:
    return [(finding.verdict, finding.where.op) for finding in findings]


# The difference of two policies -----------------------------------------------------------------------------------

rules = st.sampled_from([LOWER, FP32, PROMOTE])
held_ops = st.dictionaries(st.sampled_from(["aten::a", "aten::b", "aten::c"]), st.builds(OpPolicy, rules))
policies = st.builds(lambda ops: Policy("cuda", "2.13.0", ("float16",), ops), held_ops)


@given(policies)
def test_a_policy_does_not_differ_from_itself(one: Policy) -> None:
    assert compare(one, one).changes == ()


@given(policies, policies)
def test_the_changes_lead_from_one_policy_to_the_other_and_back(one: Policy, other: Policy) -> None:
    changed = dict(one.ops)
    for change in compare(one, other).changes:
        assert changed.get(change.op) == change.before
        changed.pop(change.op, None)
        if change.after is not None:
            changed[change.op] = change.after
    assert changed == other.ops
    assert [(c.op, c.after, c.before) for c in compare(other, one).changes] == [
        (c.op, c.before, c.after) for c in compare(one, other).changes
    ]


@pytest.mark.parametrize(
    "after",
    [
        OpPolicy(FP32, {"low": "float32"}),
        OpPolicy(LOWER, {"low": "low"}, redispatch="aten::other"),
        OpPolicy(LOWER, {"low": "low"}, restores=True),
        OpPolicy(LOWER, {"low": "low", "float64": "low"}),
    ],
    ids=["rule", "redispatch", "restores", "facts"],
)
def test_another_behaviour_is_a_change(after: OpPolicy) -> None:
    (change,) = compare(policy(mm=lower), policy(mm=after)).changes
    assert (change.op, change.before, change.after) == ("aten::mm", lower, after)


def test_where_the_kernel_stands_and_what_it_says_is_no_change() -> None:
    moved = OpPolicy(LOWER, {"low": "low"}, source="elsewhere.cpp", raises="in other words")
    assert compare(policy(mm=lower), policy(mm=moved)).changes == ()


def test_what_one_of_them_could_not_probe_cannot_be_compared() -> None:
    one, other = policy(mm=lower, unprobed={"aten::x": "why"}), policy(x=lower, unprobed={"aten::mm": "no"})
    assert compare(one, other).changes == ()
    assert compare(one, other).unclear == {"aten::mm": "no", "aten::x": "why"}


def test_what_only_one_registers_is_a_change_even_where_it_was_not_probed() -> None:
    (change,) = compare(policy(unprobed={"aten::x": "why"}), policy()).changes
    assert change.before is not None
    assert (change.before.rule, change.after) == ("unknown", None)
    assert compare(policy(unprobed={"aten::x": "why"}), policy()).unclear == {}


# The judgement ------------------------------------------------------------------------------------------------------


def test_a_policy_as_the_snapshot_has_it_passes_and_says_how_many_overloads_were_compared() -> None:
    (finding,) = judged(policy(mm=lower, exp=fp32), policy(mm=lower, exp=fp32))
    assert finding.verdict is Verdict.PASS
    assert finding.message == "2 overloads are treated as in the snapshot of PyTorch 2.13.0"


def test_each_op_that_changed_appeared_or_is_gone_is_one_failure_that_names_it() -> None:
    findings = judged(policy(mm=fp32, exp=fp32, new=lower), policy(mm=lower, exp=fp32, old=lower))
    assert verdicts(findings) == [(Verdict.FAIL, f"aten::{name}") for name in ("mm", "new", "old")]
    texts = {finding.where.op: finding.message for finding in findings}
    assert f"{LOWER}; it is: {FP32}, by a kernel of {HEADER}" in texts["aten::mm"]
    assert f"left alone; it is: {LOWER}" in texts["aten::new"]
    assert f"{LOWER}; it is: left alone" in texts["aten::old"]
    assert all("PyTorch 2.13.0" in text for text in texts.values())
    assert all(f"ampcheck policy explain {finding.where.op}" in finding.hint for finding in findings)


def test_a_change_under_the_same_rule_is_shown_by_its_facts() -> None:
    (finding,) = judged(policy(mm=OpPolicy(LOWER, {"low": "low -> float32"})), policy(mm=lower))
    assert "lower_precision (low → low); it is: lower_precision (low → low -> float32)" in finding.message


@pytest.mark.parametrize("builds", [("cpu", "cuda 13.0"), ("cuda 12.4", "cpu"), ("rocm 6.2", "cuda 13.0")])
def test_a_kernel_that_only_one_build_compiles_is_no_drift_between_builds_and_is_named(
    builds: tuple[str, str],
) -> None:
    with_it, without = policy(mm=lower, _cudnn_rnn=cudnn), policy(mm=lower)
    found, held = (with_it, without) if builds[0].startswith("cuda") else (without, with_it)
    (finding,) = judged(found, held, builds)
    assert finding.verdict is Verdict.PASS
    assert f"only one of the builds ({builds[1]} and {builds[0]}) has it: aten::_cudnn_rnn" in finding.message
    coverage = judge_drift(found, snapshot(held, builds[1]), build=builds[0]).coverage
    assert coverage.seen["overloads compared"] == 1
    assert coverage.unseen == {"overloads that only one of two builds registers": 1}


@pytest.mark.parametrize("builds", [("cpu", "cpu"), ("cuda 12.4", "cuda 13.0")])
def test_between_builds_of_one_sort_they_are_drift(builds: tuple[str, str]) -> None:
    findings = judged(policy(mm=lower), policy(mm=lower, _cudnn_rnn=cudnn), builds)
    assert verdicts(findings) == [(Verdict.FAIL, "aten::_cudnn_rnn")]


def test_the_build_explains_no_changed_rule_and_no_kernel_that_every_build_has() -> None:
    changed = judged(policy(_cudnn_rnn=fp32), policy(_cudnn_rnn=cudnn))
    gone = judged(policy(mm=lower), policy(mm=lower, exp=fp32))
    assert verdicts(changed) == [(Verdict.FAIL, "aten::_cudnn_rnn")]
    assert verdicts(gone) == [(Verdict.FAIL, "aten::exp")]


def test_a_kernel_that_the_snapshot_could_not_probe_is_left_to_the_build_on_the_accelerators_side_only() -> None:
    of_cuda = judged(policy(mm=lower), policy(mm=lower, unprobed={"aten::x": "no driver"}))
    assert verdicts(of_cuda) == [(Verdict.PASS, "")]
    assert "aten::x" in of_cuda[0].message
    planted = judged(policy(mm=lower, unprobed={"aten::x": "it raised"}), policy(mm=lower))
    assert verdicts(planted) == [(Verdict.FAIL, "aten::x")]


def test_an_overload_that_can_no_longer_be_probed_is_a_warning_with_the_reason() -> None:
    findings = judged(policy(mm=lower, unprobed={"aten::exp": "it raised"}), policy(mm=lower, exp=fp32))
    assert [finding.verdict for finding in findings] == [Verdict.WARN, Verdict.PASS]
    assert "aten::exp (it raised)" in findings[0].message
    assert findings[1].message.startswith("1 overload")


def test_an_overload_of_which_the_snapshot_knows_no_rule_is_told_and_not_counted() -> None:
    held = policy(mm=lower, unprobed={"aten::x": "no driver"})
    (finding,) = judged(policy(mm=lower, x=lower), held, ("cuda 13.0", "cuda 13.0"))
    assert finding.verdict is Verdict.PASS
    assert "of aten::x the snapshot knows no rule" in finding.message
    coverage = judge_drift(policy(mm=lower, x=lower), snapshot(held), build="cuda 13.0").coverage
    assert coverage.seen == {"overloads probed": 2, "overloads compared": 1}
    assert coverage.unseen == {"overloads of which the snapshot knows no rule": 1}


def test_custom_ops_are_counted_and_not_compared() -> None:
    found = policy(mm=lower, mine__scaled=fp32, unprobed={"mine::odd": "why"})
    (finding,) = judged(found, policy(mm=lower))
    assert "2 custom ops of other namespaces not compared" in finding.message
    coverage = judge_drift(found, snapshot(policy(mm=lower)), build="cpu").coverage
    assert coverage.unseen["custom ops, which no snapshot holds"] == 2


def test_another_release_is_said_to_be_the_nearest_in_every_message() -> None:
    held = policy("2.15.0+cu132", mm=lower, exp=fp32)
    for found in (policy("2.16.1", mm=lower, exp=fp32), policy("2.16.1", mm=fp32)):
        for finding in judged(found, held):
            assert "the snapshot of PyTorch 2.15.0+cu132 (the nearest: PyTorch 2.16 has none)" in finding.message


def test_nothing_compared_is_no_pass() -> None:
    assert verdicts(judged(policy(), policy(mm=lower))) == [(Verdict.FAIL, "")]
    both = {"aten::mm": "why"}
    assert verdicts(judged(policy(unprobed=both), policy(unprobed=both))) == [(Verdict.FAIL, "")]
    other = Policy("mps", "2.13.0", ("float16",), {"aten::mm": lower})
    assert verdicts(judged(other, policy(mm=lower))) == [(Verdict.WARN, "")]
    assert verdicts(judged(Policy("mps", "2.13.0", ("float16",), {}), policy(mm=lower))) == [(Verdict.SKIP, "")]


# The installed PyTorch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
def test_the_installed_pytorch_does_what_its_snapshot_says(device: str, dtype: str | torch.dtype) -> None:
    with collect() as runs:
        run = assert_policy(device=device, dtype=dtype)
    assert runs == [run]
    assert [finding.verdict for finding in run.findings] == [Verdict.PASS]
    assert run.coverage.seen["overloads compared"] > 90
    assert run.environment["torch"] == torch.__version__


def planted(kernel: str) -> str:
    """What `assert_policy` says in a process where a library has put a kernel on an op of PyTorch's own."""
    program = f"""
import torch, ampcheck
library = torch.library.Library("aten", "IMPL")
{kernel}
try:
    print(ampcheck.assert_policy(device="cuda").findings)
except AssertionError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


def test_a_planted_kernel_on_an_op_of_pytorch_is_found_and_named() -> None:
    said = planted("""
off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
def exp(x):
    with torch._C._ExcludeDispatchKeyGuard(off):
        return torch.ops.aten.exp.default(x.to(torch.get_autocast_dtype("cuda")))
library.impl("exp", exp, "AutocastCUDA", allow_override=True)
library.impl("relu", lambda x: torch.ops.aten.relu.default(x.float()), "AutocastCUDA")
""")
    assert said.count("[policy-drift] fail") == 2
    assert "aten::exp should be treated as in" in said
    assert "fp32; it is: lower_precision" in said
    assert "aten::relu should be treated as in" in said


def test_without_a_planted_kernel_that_process_passes() -> None:
    assert "Verdict.PASS" in planted("")


def test_without_snapshots_the_policy_is_probed_and_the_verdict_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "DATA", tmp_path)
    monkeypatch.setattr(judge, "releases", snapshots.releases.__wrapped__)
    run = assert_policy(device="cuda")
    (finding,) = run.findings
    assert finding.verdict is Verdict.WARN
    assert "no snapshot was shipped" in finding.message
    assert run.coverage.total == len(measure_policy("cuda").ops) > 90


def test_a_release_that_was_not_shipped_is_held_against_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with collect() as runs, suppress(AssertionError):  # whether 2.99 would be the same is not what is asked here
        assert_policy(device="mps")
    (run,) = runs
    assert run.findings
    assert all("(the nearest: PyTorch 2.99 has none)" in finding.message for finding in run.findings)


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_an_unknown_device_lists_the_devices(device: str) -> None:
    with pytest.raises(UsageError, match="it has cpu, cuda, xpu"):
        assert_policy(device=device)


# History ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Releases 2.8 to 2.11 of our own making; `mps` appears in 2.10."""
    for release, ops in {
        "2.8": {"a": lower, "old": fp32},
        "2.9": {"a": lower, "b": fp32, "old": fp32},
        "2.10": {"a": fp32, "b": fp32},
        "2.11": {"a": lower, "b": fp32},
    }.items():
        held = policy(f"{release}.0", **ops)
        devices = {"cuda": {"float16": held}}
        if release in ("2.10", "2.11"):
            devices["mps"] = {"float16": Policy("mps", held.torch, held.dtypes, held.ops, {"aten::odd": "why"})}
        Snapshot(held.torch, "cpu", "", "", devices).save(tmp_path / f"torch-{release}.json")
    monkeypatch.setattr(snapshots, "DATA", tmp_path)
    for function in (snapshots.releases, snapshots.load_release):
        function.cache_clear()
    monkeypatch.setattr(drift, "releases", snapshots.releases)
    yield
    for function in (snapshots.releases, snapshots.load_release):
        function.cache_clear()


@pytest.mark.usefixtures("shipped")
def test_the_history_is_the_rule_of_each_release_in_their_order() -> None:
    assert history("aten::a", "cuda") == (("2.8", LOWER), ("2.9", LOWER), ("2.10", FP32), ("2.11", LOWER))
    assert history("aten::old", "cuda") == (("2.8", FP32), ("2.9", FP32), ("2.10", ""), ("2.11", ""))
    assert history("aten::a", "mps") == (("2.10", FP32), ("2.11", LOWER))
    assert history("aten::odd", "mps") == (("2.10", "unknown"), ("2.11", "unknown"))
    assert spans("aten::a", "cuda") == (("2.8", "2.9", LOWER), ("2.10", "2.10", FP32), ("2.11", "2.11", LOWER))


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize(
    ("op", "device", "rule", "said"),
    [
        ("b", "cuda", FP32, "since 2.9; before: none"),
        ("a", "cuda", LOWER, f"since 2.11; before: {FP32}"),
        ("a", "cuda", FP32, f"since 2.10; before: {LOWER}; until 2.10"),
        ("old", "cuda", "", f"since 2.10; before: {FP32}"),
        ("old", "cuda", FP32, "since 2.8 or before; until 2.9"),
        ("never", "cuda", "", "since 2.8 or before"),
        ("b", "mps", FP32, "since 2.10; before: no autocast on mps"),
        ("b", "cuda", PROMOTE, "in no release from 2.8 to 2.11"),
    ],
)
def test_since_when_an_op_has_a_rule_is_said_in_words(op: str, device: str, rule: str, said: str) -> None:
    assert since(f"aten::{op}", device, rule) == said


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize(
    ("under", "said"),
    [
        ("2.9", "since 2.8 or before; until 2.9"),
        ("2.10", f"since 2.11; before: {FP32}"),  # it has another rule there
        ("2.11", f"since 2.11; before: {FP32}"),
        ("3.1", f"since 2.11; before: {FP32}"),
    ],
)
def test_of_several_stretches_with_a_rule_the_one_with_the_release_counts(under: str, said: str) -> None:
    assert since("aten::a", "cuda", LOWER, under=under) == said


@pytest.mark.usefixtures("shipped")
def test_a_device_that_no_release_knows_lists_those_that_they_know() -> None:
    with pytest.raises(UsageError, match="no shipped policy is about 'tpu'; there are cuda, mps"):
        history("aten::mm", "tpu")
