"""`ampcheck policy show|diff|explain`: listings to read at 80 columns, as JSON, as Markdown; 2 for what is unknown."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch

from ampcheck.autocast.policy import load_release, releases
from ampcheck.autocast.probe import measure_policy
from ampcheck.cli.main import main
from ampcheck.records.policy import RULES, release_of

INSTALLED_IS_SHIPPED = release_of(torch.__version__) in releases()


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def words(self) -> list[str]:
        return self.out.split()


@pytest.fixture
def policy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> Said:
        code = main(["policy", *arguments])
        return Said(code, *capsys.readouterr())

    return run


def refused(said: Said, *words: str) -> None:
    assert said.code == 2
    assert said.out == ""
    assert said.err.startswith("ampcheck: ")
    assert said.err.count("\n") == 1
    assert all(word in said.err for word in words), said.err


# show ---------------------------------------------------------------------------------------------------------------


def test_show_lists_every_op_of_a_release_by_rule_and_says_how_many_were_probed(policy: Any) -> None:
    said = policy("show", "cuda", "--torch", "2.6")
    held = load_release("2.6").policy("cuda")
    assert said.code == 0
    assert {name.removeprefix("aten::") for name in held.ops} <= set(said.words)
    assert set(held.counts()) <= set(said.words)
    assert f"Probed {len(held.ops)} of {held.registered} registered overloads." in said.out
    for op in held.unprobed:
        assert f"Not probed on cuda: {op}: " in said.out
    positions = [said.out.index(f" {rule} ") for rule in held.counts()]
    assert positions == sorted(positions)
    assert [rule for rule in RULES if rule in held.counts()] == list(held.counts())


def test_show_asks_the_installed_pytorch_by_default_custom_ops_included(policy: Any) -> None:
    library = torch.library.Library("ampcheck_shown", "FRAGMENT")
    try:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: x, "AutocastCUDA")
        said = policy("show", "cuda")
        data = json.loads(policy("show", "cuda", "--json").out)
    finally:
        library._destroy()
    assert torch.__version__ in said.out
    assert "Not probed on cuda: ampcheck_shown::odd: its kernel calls no overload of the op" in " ".join(said.words)
    assert data["unprobed"]["ampcheck_shown::odd"]
    assert data["probed"] == data["registered"] - len(data["unprobed"])


def test_show_without_a_device_counts_the_rules_of_all(policy: Any) -> None:
    said = policy("show", "--torch", "2.13")
    data = json.loads(policy("show", "--torch", "2.13", "--json").out)
    assert set(data["devices"]) == set(load_release("2.13").policies) <= set(said.words)
    row = next(line.split() for line in said.out.splitlines() if line.split()[:1] == ["registered"])
    assert [int(cell) for cell in row[1:]] == [held["registered"] for held in data["devices"].values()]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_json_of_show_is_the_whole_policy(policy: Any, dtype: str) -> None:
    data = json.loads(policy("show", "mps", "--torch", "2.13", "--dtype", dtype, "--json").out)
    held = load_release("2.13").policy("mps", dtype)
    assert data["ops"] == {name: op.to_json() for name, op in held.ops.items()}
    assert (data["device"], data["dtype"], data["torch"]) == ("mps", dtype, held.torch)
    assert (data["probed"], data["registered"], data["counts"]) == (len(held.ops), held.registered, held.counts())


# diff ---------------------------------------------------------------------------------------------------------------


def test_diff_of_two_releases_names_what_changed(policy: Any) -> None:
    said = policy("diff", "2.11", "2.13", "--device", "cuda")
    assert said.code == 0
    lines = {line.split()[0]: line.split()[1:] for line in said.out.splitlines() if line.strip()}
    assert lines["overload"] == ["2.11", "2.13"]
    assert lines["rms_norm"] == ["–", "fp32"]
    assert lines["softmax.Dimname"] == ["fp32_set_opt_dtype", "–"]
    assert "mm" not in lines


def test_diff_of_two_releases_covers_each_device_that_both_know_and_names_the_others(policy: Any) -> None:
    said = policy("diff", "2.4", "2.15")
    old, new = load_release("2.4").policies, load_release("2.15").policies
    data = json.loads(policy("diff", "2.4", "2.15", "--json").out)
    assert [part["one"]["device"] for part in data["comparisons"]] == [device for device in old if device in new]
    for device in set(old) ^ set(new):
        assert f"{device}: PyTorch" in said.out


def test_diff_of_two_devices_names_what_they_treat_otherwise(policy: Any) -> None:
    said = policy("diff", "cpu", "cuda", "--torch", "2.13", "--json")
    (part,) = json.loads(said.out)["comparisons"]
    found = {change["op"]: (change["before"], change["after"]) for change in part["changes"]}
    snapshot = load_release("2.13")
    for op in {*snapshot.policy("cpu").ops, *snapshot.policy("cuda").ops}:
        rules = snapshot.policy("cpu").rule(op), snapshot.policy("cuda").rule(op)
        if rules[0] != rules[1]:
            assert tuple(held["rule"] if held else "" for held in found[op]) == rules
        else:
            assert op not in found
    assert found["aten::softmax.int"][1]["rule"] == "fp32_set_opt_dtype"


@pytest.mark.skipif(not INSTALLED_IS_SHIPPED, reason="the installed PyTorch has no shipped snapshot")
def test_the_installed_pytorch_differs_from_its_snapshot_by_its_build_alone(policy: Any) -> None:
    data = json.loads(policy("diff", release_of(torch.__version__), "installed", "--json").out)
    assert len(data["comparisons"]) >= 4
    for part in data["comparisons"]:
        assert part["changes"] == []
        assert set(part["of_another_build"]) <= {"aten::_cudnn_rnn"}


def test_diff_of_a_release_with_itself_says_that_nothing_differs(policy: Any) -> None:
    said = policy("diff", "2.13", "2.13", "--device", "mps")
    assert said.code == 0
    assert "0 of 95 overloads differ." in said.out


# explain ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", ["aten::layer_norm", "layer_norm", "torch.nn.functional.layer_norm", "F.layer_norm", "torch.layer_norm"]
)
def test_explain_tells_the_rule_on_every_device_however_the_op_is_written(policy: Any, op: str) -> None:
    said = policy("explain", op, "--torch", "2.13")
    snapshot = load_release("2.13")
    rows = {line.split()[0]: line for line in said.out.splitlines() if line.strip()}
    assert said.out.startswith("aten::layer_norm under PyTorch 2.13")
    for device in snapshot.policies:
        assert (snapshot.policy(device).rule("aten::layer_norm") or "–") in rows[device]
    assert "since 2.4 or before" in rows["cuda"]
    assert "fp32: floating inputs are cast to float32" in said.out
    assert "low → float32" in said.out


@pytest.mark.parametrize(
    ("written", "op"),
    [
        ("aten::norm.Scalar", ["aten::norm.Scalar"]),
        ("norm.Scalar", ["aten::norm.Scalar"]),
        ("aten::pow", ["aten::pow.Scalar", "aten::pow.Tensor_Scalar", "aten::pow.Tensor_Tensor"]),
        ("torch.linalg.vecdot", ["aten::linalg_vecdot"]),
        ("torch.nn.functional.gelu", ["aten::gelu"]),
        ("aten::mm.out", ["aten::mm.out"]),
    ],
)
def test_explain_finds_the_overloads_that_are_meant(policy: Any, written: str, op: list[str]) -> None:
    data = json.loads(policy("explain", written, "--torch", "2.13", "--json").out)
    assert list(dict.fromkeys(entry["op"] for entry in data["ops"])) == op


def test_explain_tells_since_which_release_and_what_was_before(policy: Any) -> None:
    said = policy("explain", "rms_norm", "--torch", "2.15")
    assert "since 2.12; before: none" in said.out
    assert "cuda over the releases: none 2.4 to 2.11, fp32 2.12 to 2.15" in " ".join(said.words)
    data = json.loads(policy("explain", "rms_norm", "--torch", "2.15", "--json").out)
    (cuda,) = [entry for entry in data["ops"] if entry["device"] == "cuda"]
    assert cuda["history"] == [
        {"from": "2.4", "to": "2.11", "rule": ""},
        {"from": "2.12", "to": "2.15", "rule": "fp32"},
    ]
    assert cuda["policy"]["rule"] == "fp32"


def test_explain_of_a_banned_op_gives_the_reason_of_pytorch(policy: Any) -> None:
    said = policy("explain", "binary_cross_entropy", "--torch", "2.13")
    assert "unsafe to autocast" in " ".join(said.words)
    assert "banned" in said.words


def test_explain_of_an_op_that_autocast_leaves_alone_says_so_on_every_device(policy: Any) -> None:
    said = policy("explain", "relu")
    assert said.code == 0
    assert "–: autocast leaves the op alone" in said.out
    data = json.loads(policy("explain", "relu", "--json").out)
    assert {entry["rule"] for entry in data["ops"]} == {""}
    assert {"cpu", "cuda", "xpu", "mps"} <= {entry["device"] for entry in data["ops"]}


@pytest.mark.parametrize(
    "command", ["explain aten::_cudnn_rnn --torch 2.13", "show cuda --torch 2.13", "diff 2.6 2.13 --device cuda"]
)
def test_an_op_that_a_snapshot_could_not_probe_is_no_fault_of_the_readers_machine(policy: Any, command: str) -> None:
    assert list(load_release("2.13").policy("cuda").unprobed) == ["aten::_cudnn_rnn"]
    said = policy(*command.split())
    assert "could not be probed on the machine that made the snapshot (it computes on the device" in " ".join(
        said.words
    )
    assert "driver" not in said.out + policy(*command.split(), "--json").out


def test_explain_of_an_op_that_could_not_be_probed_says_that_its_rule_is_unknown(policy: Any) -> None:
    assert "unknown" in policy("explain", "aten::_cudnn_rnn", "--torch", "2.13").words


@pytest.mark.parametrize("op", ["lstm", "gru", "torch.lstm", "aten::rnn_tanh.input"])
def test_explain_of_a_recurrent_layer_says_where_it_ends_on_cuda(policy: Any, op: str) -> None:
    said = " ".join(policy("explain", op, "--torch", "2.13").words)
    assert "ends in aten::_cudnn_rnn, which casts everything to autocast's dtype" in said
    assert "_cudnn_rnn" not in policy("explain", op, "--torch", "2.13", "--device", "cpu").out


@pytest.mark.parametrize("written", ["softmax", "F.softmax", "torch.softmax", "log_softmax", "cumsum", "norm", "sum"])
@pytest.mark.parametrize("release", releases())
def test_explain_begins_with_the_overload_that_has_a_rule_on_most_devices(
    policy: Any, written: str, release: str
) -> None:
    data = json.loads(policy("explain", written, "--torch", release, "--json").out)
    ruled: dict[str, int] = {}
    for entry in data["ops"]:
        ruled[entry["op"]] = ruled.get(entry["op"], 0) + bool(entry["rule"])
    by_names = [op for op in ruled if "name" in op.lower()]
    plain = [op for op in ruled if op not in by_names]
    assert ruled[plain[0]] == max(ruled[op] for op in plain) > 0
    assert list(ruled) == [*plain, *by_names]
    gone = [not ruled[op] for op in plain]
    assert gone == sorted(gone)


def test_explain_can_be_asked_about_one_device(policy: Any) -> None:
    data = json.loads(policy("explain", "layer_norm", "--torch", "2.13", "--device", "cuda", "--json").out)
    assert [entry["device"] for entry in data["ops"]] == ["cuda"]
    assert "mps" not in policy("explain", "layer_norm", "--torch", "2.13", "--device", "cuda").out


@pytest.mark.parametrize("command", ["show gpu", "explain mm --device gpu", "diff 2.4 2.6 --device gpu"])
@pytest.mark.parametrize("release", ["2.4", "2.13", "installed"])
def test_a_device_that_is_none_is_refused_with_those_that_the_data_has(policy: Any, command: str, release: str) -> None:
    asked = "2.4" if command.startswith("diff") else release
    options = [] if command.startswith("diff") else ["--torch", release]
    there = json.loads(policy("show", "--torch", asked, "--json").out)["devices"]
    said = policy(*command.split(), *options)
    refused(said, "'gpu'")
    assert said.err.rstrip().endswith(f"it has {', '.join(there)}")


def test_explain_of_an_op_that_was_dropped_tells_until_when(policy: Any) -> None:
    said = policy("explain", "aten::qr", "--torch", "2.15")
    assert "since 2.14; before: fp32" in said.out


# Forms --------------------------------------------------------------------------------------------------------------

COMMANDS = [
    ("show", "cuda", "--torch", "2.4"),
    ("show", "--torch", "2.15"),
    ("diff", "2.4", "2.15"),
    ("diff", "cpu", "cuda", "--torch", "2.13"),
    ("explain", "norm", "--torch", "2.4"),
    ("explain", "binary_cross_entropy", "--torch", "2.15"),
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@each_command
def test_nothing_is_wider_than_80_columns_and_no_name_is_cut(policy: Any, command: tuple[str, ...]) -> None:
    said = policy(*command)
    assert all(len(line) <= 80 for line in said.out.splitlines())
    assert "…" not in said.out
    table = json.loads(policy(*command, "--json").out)
    for op in named(table):
        assert op.removeprefix("aten::") in said.words or op in said.words, op


def named(data: Any) -> set[str]:
    """Every overload that the JSON tells of."""
    if isinstance(data, list):
        return {name for item in data for name in named(item)}
    if not isinstance(data, dict):
        return set()
    own = {data["op"]} if "op" in data else set(data.get("ops", ())) if isinstance(data.get("ops"), dict) else set()
    return own | {name for key, item in data.items() if key != "ops" or isinstance(item, list) for name in named(item)}


@each_command
def test_markdown_is_whole_tables(policy: Any, command: tuple[str, ...]) -> None:
    lines = policy(*command, "--markdown").out.splitlines()
    assert lines[0].startswith("### ")
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) > 3
    blocks = "\n".join(lines).split("\n\n")
    for block in (block.splitlines() for block in blocks if block.startswith("|")):
        assert set(block[1]) <= set("|-: ")
        assert len({line.count("|") for line in block}) == 1


@each_command
def test_what_is_known_of_releases_is_told_without_torch(command: tuple[str, ...]) -> None:
    program = (
        "import sys; from ampcheck.cli.main import main; "
        "assert main(sys.argv[1:]) == 0; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, "policy", *command], check=True, capture_output=True, timeout=120)


@pytest.mark.skipif(not INSTALLED_IS_SHIPPED, reason="the installed PyTorch has no shipped snapshot")
def test_explain_needs_no_torch_where_the_installed_release_is_shipped() -> None:
    test_what_is_known_of_releases_is_told_without_torch(("explain", "layer_norm"))


def test_the_help_of_diff_documents_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["policy", "diff", "--help"])
    assert caught.value.code == 0
    assert "exit code is 0 whether they do or not" in " ".join(capsys.readouterr().out.split())


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("show gpu", ["'gpu'", "cpu, cuda, xpu"]),
        ("show gpu --torch 2.13", ["'gpu'", "cpu, cuda, xpu, mps"]),
        ("show --torch 2.99", ["2.99", "2.4", "2.15"]),
        ("show --torch newest", ["newest", "2.4", "2.15"]),
        ("show cuda --dtype float32", ["float16, bfloat16", "float32"]),
        ("show cuda --torch 2.13 --dtype float32", ["float16 and bfloat16", "float32"]),
        ("diff 2.6 cuda", ["2.4", "2.15", "installed", "cpu, cuda", "2.6 and cuda"]),
        ("diff 2.6 2.99", ["2.99", "2.4", "2.15"]),
        ("diff 2.6 2.13 --device gpu", ["'gpu'", "cpu, cuda"]),
        ("diff 2.6 2.13 --torch 2.7", ["--torch"]),
        ("diff cpu cuda --device cpu", ["--device"]),
        ("diff cpu gpu --torch 2.13", ["'gpu'", "cpu, cuda"]),
        ("explain lyernorm", ["'lyernorm'", "aten::layer_norm"]),
        ("explain torch.nn.functional.cross_entropy", ["aten::cross_entropy_loss"]),
        ("explain qqqqqq", ["'qqqqqq'", "ampcheck policy show"]),
        ("explain aten::", ["'aten::'"]),
        ("explain mm --torch 1.0", ["1.0", "2.15"]),
    ],
)
def test_what_is_unknown_is_one_line_that_lists_what_there_is(policy: Any, command: str, words: list[str]) -> None:
    refused(policy(*command.split()), *words)


def test_an_empty_op_is_refused(policy: Any) -> None:
    refused(policy("explain", ""), "no op ''")


def test_json_and_markdown_are_one_or_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["policy", "show", "cuda", "--json", "--markdown"])
    assert caught.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_show_of_a_device_without_kernels_says_that_there_are_none(policy: Any) -> None:
    if measure_policy("privateuseone").registered:
        pytest.skip("a backend has registered kernels on privateuseone")
    said = policy("show", "privateuseone")
    assert "Probed 0 of 0 registered overloads." in said.out
