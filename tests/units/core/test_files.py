"""Files that a user keeps: what was there stays what it was, a killed writer holds nobody up, JSON is read strictly."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.autocast.policy import Snapshot
from ampcheck.core.errors import UsageError
from ampcheck.core.files import locked, only_writer, write_atomically
from ampcheck.core.json_files import DEPTH, parse_json
from ampcheck.core.run import Run

POSIX = pytest.mark.skipif(os.name != "posix", reason="symlinks, modes and devices as POSIX has them")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refused(path: str | Path) -> str:
    with pytest.raises(UsageError, match="cannot write") as caught:
        write_atomically(path, "new")
    message = str(caught.value)
    assert "\n" not in message
    return message


# What stays -------------------------------------------------------


@POSIX
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_a_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    path.chmod(mode)
    Run().save(path)
    assert mode_of(path) == mode


@POSIX
def test_a_private_file_is_never_readable_by_others_not_even_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "run.json", []
    path.write_text("old")
    path.chmod(0o600)
    fdopen = os.fdopen

    def opened(handle: int, *args: str) -> object:
        seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return fdopen(handle, *args)

    monkeypatch.setattr(os, "fdopen", opened)
    write_atomically(path, "new")
    assert seen == [0o600]


@POSIX
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    os.chown(path, 12345, 54321)
    write_atomically(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


@POSIX
@pytest.mark.parametrize("way", ["file", "relative", "chain", "folder"])
def test_a_symlink_stays_and_the_file_that_it_names_is_replaced(tmp_path: Path, way: str) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "run.json"
    real.write_text("old")
    link = tmp_path / "run.json"
    if way == "folder":
        (tmp_path / "linked").symlink_to("real")
        link = tmp_path / "linked" / "run.json"
    elif way == "chain":
        (tmp_path / "between").symlink_to("real/run.json")
        link.symlink_to("between")
    else:
        link.symlink_to(real if way == "file" else "real/run.json")
    write_atomically(link, "new")
    assert real.read_text() == "new"
    assert not real.is_symlink()
    assert (tmp_path / "linked" if way == "folder" else link).is_symlink()
    assert os.listdir(tmp_path / "real") == ["run.json"]


# What is written to and never replaced -------------------------------------------------------


@POSIX
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "/dev/fd/{}", "/proc/self/fd/{}", "link", "far link"])
def test_an_open_file_gets_the_text_behind_what_was_printed(tmp_path: Path, name: str) -> None:
    if name.startswith("/proc") and not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc here")
    if name.startswith("/dev/std") and os.access("/dev", os.W_OK):
        pytest.skip("root's mistakes here would replace the device; the links stand for it")
    stream = "err" if name == "/dev/stderr" else "out"
    (tmp_path / "link").symlink_to("/dev/fd/1")
    (tmp_path / "far link").symlink_to("link")
    path = str(tmp_path / name) if "link" in name else name.format(1)
    code = (
        "import sys; from ampcheck.core.files import write_atomically as w\n"
        f"print('before', file=sys.std{stream}); w({path!r}, 'text\\n'); print('behind', file=sys.std{stream})"
    )
    kept = tmp_path / "kept.txt"
    for way in ("w", "a"):
        with kept.open(way) as file:
            subprocess.run([sys.executable, "-c", code], check=True, **{f"std{stream}": file}, timeout=60)
    assert kept.read_text() == "before\ntext\nbehind\n" * 2
    assert (tmp_path / "link").is_symlink()


@POSIX
@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_with_a_name_gets_the_text(tmp_path: Path, linked: bool) -> None:
    pipe, path = tmp_path / "pipe", tmp_path / ("link" if linked else "pipe")
    os.mkfifo(pipe)
    if linked:
        path.symlink_to(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    Run(title="through a pipe").save(path)
    reader.join(60)
    assert Run.from_json(json.loads(got[0])).title == "through a pipe"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@POSIX
def test_devices_take_the_text_and_stay(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(os.devnull)
    for path in (os.devnull, str(tmp_path / "link")):
        write_atomically(path, "new")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert (tmp_path / "link").is_symlink()


# What cannot be written -------------------------------------------------------


@POSIX
def test_what_cannot_be_written_is_one_sentence_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links" in refused(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to("gone/run.json")
    assert "which does not exist" in refused(tmp_path / "nowhere")
    assert "there is no folder" in refused(tmp_path / "absent" / "run.json")
    assert "irectory" in refused(tmp_path)
    assert "null" in refused("nul\0l")
    assert "descriptor" in refused("/dev/fd/999")
    (tmp_path / "file").write_text("a file")
    assert "folder" in refused(tmp_path / "file" / "run.json") or "irectory" in refused(tmp_path / "file" / "run.json")
    assert sorted(os.listdir(tmp_path)) == ["file", "loop", "nowhere"]


@POSIX
def test_a_full_disk_is_one_sentence() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    assert "No space left" in refused("/dev/full")


@POSIX
def test_a_folder_in_which_nothing_can_be_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "closed" / "run.json"
    path.parent.mkdir()
    path.write_text("old")
    path.parent.chmod(0o555)
    if os.access(path.parent, os.W_OK):  # root may write anywhere, but for the kernel's own files
        path = Path("/proc/self/comm")
        if not path.exists():
            pytest.skip("root may write anywhere")
    message = refused(path)
    assert "no file can be created in" in message
    assert str(path.parent.resolve()).rpartition("/")[2] in message or "/proc/" in message
    (tmp_path / "closed").chmod(0o755)


# One writer -------------------------------------------------------

HOLDS = """
import sys, time
from ampcheck.core.files import only_writer
with only_writer(sys.argv[1], 5):
    print("holds", flush=True)
    time.sleep(60)
"""


@POSIX
def test_the_next_writer_goes_on_at_once_when_one_was_killed_while_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    killed = subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE)
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"holds\n"
    with pytest.raises(UsageError, match=r"another process has been writing it for 0.1 s"), only_writer(path, 0.1):
        pass
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    killed.stdout.close()
    assert os.listdir(tmp_path) == [".lock.json.writing"]  # it had no time to take it away
    begin = time.monotonic()
    with only_writer(path, 30):
        pass
    assert time.monotonic() - begin < 5
    assert os.listdir(tmp_path) == []


ADDS = """
import sys
from pathlib import Path
from ampcheck.core.files import only_writer
from ampcheck.core.files import write_atomically
path = Path(sys.argv[1])
for _ in range(40):
    with only_writer(path, 60):
        write_atomically(path, str(int(path.read_text()) + 1))
"""


@POSIX
def test_writers_in_several_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")
    writers = [subprocess.Popen([sys.executable, "-c", ADDS, str(path)]) for _ in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert path.read_text() == "120"
    assert os.listdir(tmp_path) == ["count"]


@POSIX
def test_a_writer_that_raises_lets_the_next_one_in(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), only_writer(tmp_path / "a", 1):
        raise KeyboardInterrupt
    with only_writer(tmp_path / "a", 0):
        pass


@POSIX
def test_a_lock_says_who_holds_it(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w") as one, open(tmp_path / "a") as other:
        with locked(one.fileno(), 0) as first, locked(other.fileno(), 0.02) as second:
            assert (first, second) == (True, False)
        with locked(other.fileno(), 0) as again:
            assert again is True


# JSON -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 1}', "the key 'a' occurs twice"),
        ('[{"b": {"x": 1, "c\\n": 2, "c\\n": 3}}]', r"the key 'c\\n' occurs twice"),
        ('{\n<<<<<<< HEAD\n"a": 1\n=======\n"a": 2\n>>>>>>> main\n}', "line 2 is a conflict marker of git"),
        ('{"a": 1,\n||||||| base\n"a": 1}', "line 2 is a conflict marker of git"),
        ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), f"deeper than {DEPTH}"),
        ('{"a":' * 900 + "1" + "}" * 900, f"deeper than {DEPTH}"),
        ("[" * 100_000, f"deeper than {DEPTH}"),
        ("1" * 5000, "digits"),
        ("\ufeff{}", "BOM"),
        (b"\xff", "utf-8"),
        ("", "Expecting value"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_a_merge_or_an_accident_left_is_a_reason_in_one_clause(text: str | bytes, said: str) -> None:
    import re

    with pytest.raises(ValueError, match=said if "\\" in said else re.escape(said)) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)


def test_a_snapshot_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"schema": 1, "torch": "2.13", "torch": "2.4"}')
    with pytest.raises(UsageError, match="the key 'torch' occurs twice"):
        Snapshot.load(tmp_path / "s.json")
    with pytest.raises(UsageError, match="the key 'torch' occurs twice"):
        Run.load(tmp_path / "s.json")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(PLAIN, st.booleans())
def test_all_other_json_is_what_python_reads(value: object, as_bytes: bool) -> None:
    text = json.dumps(value)
    assert parse_json(text.encode() if as_bytes else text) == json.loads(text)
