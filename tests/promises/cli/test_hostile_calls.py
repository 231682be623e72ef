"""Bad calls of the newer commands: each ends in one sentence and exit code 2, and leaves every file as it is."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import main

SUBJECTS = """
import time
import torch

X = torch.ones(2, 8)
class Raises(torch.nn.Module):
    def forward(self, x): raise ValueError("no such shape")
class Text(torch.nn.Module):
    def forward(self, x): return "text"

def good(): return torch.nn.Linear(8, 8), X
def text(): return Text(), X
def raises(): raise RuntimeError("no weights here")
def forward_raises(): return Raises(), X
def nothing(): return None
def number(): return 3
def exits(): raise SystemExit(0)
def needs_cuda(): return torch.nn.Linear(8, 8).cuda(), X.cuda()
def slow():
    open("started", "w").close()
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sp ace ü"
    folder.mkdir()
    (folder / "subjects.py").write_text(SUBJECTS, encoding="utf-8")
    (folder / "folder").mkdir()
    (folder / "list.txt").write_text("subjects.py:good\n", encoding="utf-8")
    for name, content in {
        "binary.py": b"\x7fELF\x00\x01",
        "binary.npz": b"\x93NUMPY\x00" * 9,
        "foreign.json": b'{"schema": 1, "x": 2}',
        "list.json": b"[]",
        "cut.json": b'{"schema": 2, "environment": {}, "fin',
        "empty.json": b"",
        "latin.json": b'{"schema": "\xe9"}',
    }.items():
        (folder / name).write_bytes(content)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "subjects", raising=False)
    return folder


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("lint missing.py", "there is no file or folder missing.py"),
        ("lint folder", "lint needs a file of Python; found none in folder"),
        ("lint binary.py", "lint needs a file of Python; found none in binary.py"),
        ("lint subjects.py --select AMP9", "'AMP9', which is no rule"),
        ("lint subjects.py --json folder", "cannot write folder: it is a folder"),
        ("known ''", "'' is not installed"),
        ("known --data missing.json", "missing.json: there is no such file"),
        ("known --data folder", "folder: it is a folder"),
        ("known --data cut.json", "cut.json: it is no JSON, or not all of it"),
        ("known --data latin.json", "latin.json: it is no text in UTF-8"),
        ("known --data list.json", "list.json is no list of known defects"),
        ("known --data foreign.json", "defects in foreign.json is damaged"),
        ("known --repro torch-histc --fail-if-used subjects.py", "--repro NAME prints nothing else"),
        ("known --schema torch", "--schema prints nothing else"),
        ("known --fail-if-used binary.py", "known needs a file of Python; found none in binary.py"),
        ("show missing.json", "missing.json: there is no such file"),
        ("show folder", "folder has no sweep: there is no sweep.manifest in it"),
        ("show ''", "could be read from an empty name"),
        ("show foreign.json", "foreign.json: this run of ampcheck is damaged"),
        ("show list.json", "list.json: this is no run of ampcheck"),
        ("show empty.json", "empty.json: it is no JSON, or not all of it"),
        ("explain amp199", "there is no check, rule or verdict 'amp199'"),
        ("baseline --from folder", "folder has no sweep"),
        ("whatif missing.py:good", "there is no file missing.py"),
        ("whatif subjects.py:raises", "subjects.py:raises raised RuntimeError: no weights here"),
        ("whatif subjects.py:forward_raises", "raised ValueError: no such shape"),
        ("whatif subjects.py:text", "must give gradients or floating outputs to compare; found neither"),
        ("whatif subjects.py:number", "subjects.py:number is no subject"),
        ("whatif subjects.py:exits", "subjects.py:exits raised SystemExit"),
        ("whatif subjects.py:good --recipe fp7", "recipes must be one of"),
        ("whatif subjects.py:good --steps 0", "--steps"),
        ("record subjects.py:nothing -o a.npz", "subjects.py:nothing returned nothing"),
        ("record subjects.py:forward_raises -o a.npz", "subjects.py:forward_raises raised ValueError: no such shape"),
        ("record subjects.py:text -o a.npz", "returns no tensor"),
        ("record subjects.py:good -o no/a.npz", "there is no folder no"),
        ("record kept.npz -o a.npz", "kept.npz is recorded already"),
        ("parity kept.npz missing.npz", "missing.npz: there is no such file"),
        ("parity kept.npz binary.npz", "binary.npz: it is no file of `ampcheck record`, or not all of it"),
        ("parity kept.npz cut.npz", "cut.npz: it is no file of `ampcheck record`, or not all of it"),
        ("parity kept.npz kept.npz --dtype float16", "A and B are recorded"),
        ("parity kept.npz kept.npz --module a=b", "A and B are recorded"),
        ("parity subjects.py:good subjects.py:good --clip 0.1", "--clip is about the ratios of --tokens"),
        ("parity subjects.py:good subjects.py:good --module head=head", "no 'head'; found none"),
        ("parity subjects.py:good subjects.py:raises", "raised RuntimeError: no weights here"),
        ("sweep ''", "found an empty name"),
        ("sweep folder", "folder must have a zoo.py"),
        ("sweep binary.npz", "must be a text file with a target a line"),
        ("sweep list.txt --results ''", "--results must name a folder or a URL"),
        ("sweep list.txt --results cut.json", "need a folder; cut.json is a file"),
        ("sweep list.txt --results nope://x", "Protocol not known: nope"),
        ("sweep list.txt --shard 2/1", "--shard takes k/n"),
        ("sweep list.txt --shard 1/1 --costs cut.json", "cut.json: it is no JSON"),
        ("sweep list.txt --shard 1/1 --costs foreign.json", "foreign.json: this run of ampcheck is damaged"),
        ("sweep list.txt --executor subjects:number", "must return a concurrent.futures.Executor; found int"),
        ("sweep list.txt --executor subjects:raises", "subjects:raises raised RuntimeError: no weights here"),
        ("sweep list.txt --executor dask://host:x", "--executor must be local, slurm, dask://HOST:PORT"),
        ("report folder", "folder has no sweep"),
        ("report ''", "could be read from an empty name"),
    ],
)
def test_a_bad_call_is_one_sentence_and_changes_no_file(
    folder: Path, capfd: pytest.CaptureFixture[str], call: str, said: str
) -> None:
    if "kept.npz" in call or "cut.npz" in call:
        assert main(["record", "subjects.py:good", "-o", "kept.npz"]) == 0
        (folder / "cut.npz").write_bytes((folder / "kept.npz").read_bytes()[:900])
        capfd.readouterr()
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    assert main([word.strip("'") for word in call.split()]) == 2
    out, err = capfd.readouterr()
    sentences = [line for line in err.splitlines() if not line.startswith(("ampcheck: 0 of", "ampcheck: loading"))]
    assert (out, len(sentences)) == ("", 1), err
    assert sentences[0].startswith("ampcheck: ")
    assert said in sentences[0]
    after = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*") if "__pycache__" not in str(path)}
    assert after == {path: content for path, content in before.items() if "__pycache__" not in str(path)}


def test_a_damaged_record_is_one_sentence_wherever_it_is_damaged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "subjects.py:good", "-o", "kept.npz"]) == 0
    whole, chance = Path("kept.npz").read_bytes(), random.Random(0)
    for _ in range(40):
        damaged = bytearray(whole)
        for place in chance.sample(range(len(whole)), 9):
            damaged[place] ^= 1 << chance.randrange(8)
        Path("damaged.npz").write_bytes(damaged)
        assert main(["parity", "kept.npz", "damaged.npz"]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="a signal interrupts it")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    "call",
    [
        "whatif subjects.py:slow --json new.json",
        "record subjects.py:slow -o new.npz",
        "parity subjects.py:slow subjects.py:slow --json new.json",
    ],
)
def test_an_interrupt_writes_nothing(folder: Path, call: str, number: signal.Signals, code: int) -> None:
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    command = [sys.executable, "-m", "ampcheck", *call.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (folder / "started").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1].endswith("nothing was written")
    assert not list(folder.glob("new*"))
