"""Locks in a test session: the marker, `assert_policy`, `--ampcheck-update`; and `--ampcheck-guard`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugin_suite import Section, lines_of_source

import ampcheck
from ampcheck.autocast.locks.lock import measure_calls

NAME = "ampcheck.lock.json"

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), (torch.ones(2, 4),)

def attention():
    return (lambda x: (x @ x).softmax(-1)), (torch.ones(4, 4),)
"""

ASSERTS = """
import pytest
import ampcheck

@pytest.mark.parametrize("factory", ["net", "attention"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lock(factory, device):
    ampcheck.assert_policy(f"models.py:{factory}", device=device, dtype="float16")
"""

MARKED = """
import pytest
import torch

@pytest.mark.ampcheck(lock=True, device="cuda")
def test_body():
    x = torch.ones(4, 4)
    with torch.autocast("cuda", torch.float16):
        y = (x @ x).softmax(-1)
    assert y.dtype is torch.float32

@pytest.mark.ampcheck(lock=True)
@pytest.mark.parametrize("number", range(6))
def test_each(number):
    with torch.autocast("cpu", torch.bfloat16):
        torch.ones(4, 4) @ torch.ones(4, 4)
"""


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load what the sessions use: one in this process forgets its imports, and torch cannot be imported twice."""
    import torch
    import torch._dynamo
    import torch.distributed._functional_collectives

    for device in ("cpu", "cuda"):
        measure_calls((lambda x: x.softmax(-1), (torch.ones(2, 2),)), device=device)
    with ampcheck.watch():
        torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.fixture
def models(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(models=MODEL)
    return pytester


def entries(pytester: pytest.Pytester) -> set[str]:
    held: dict[str, object] = json.loads((pytester.path / NAME).read_text(encoding="utf-8"))["targets"]
    return set(held)


# assert_policy ----------------------------------------------------------------------------------------------


def test_an_update_makes_the_lock_and_the_next_session_passes(models: pytest.Pytester, spread: str) -> None:
    models.makepyfile(ASSERTS)
    models.runpytest(spread).assert_outcomes(failed=4)
    models.runpytest(spread, "--ampcheck-update").assert_outcomes(passed=4)
    held = json.loads((models.path / NAME).read_text(encoding="utf-8"))["targets"]
    assert {name: sorted(entry) for name, entry in held.items()} == {
        "models.py:attention": ["cpu/float16", "cuda/float16"],
        "models.py:net": ["cpu/float16", "cuda/float16"],
    }
    models.runpytest(spread).assert_outcomes(passed=4)


def test_the_bytes_are_the_same_however_the_tests_were_spread(models: pytest.Pytester) -> None:
    models.makepyfile(ASSERTS)
    written = []
    for spread in ("-n0", "-n2"):
        models.runpytest(spread, "--ampcheck-update").assert_outcomes(passed=4)
        written.append((models.path / NAME).read_bytes())
        (models.path / NAME).unlink()
    assert written[0] == written[1]


def test_the_summary_says_which_files_were_written(models: pytest.Pytester, spread: str, section: Section) -> None:
    models.makepyfile(ASSERTS)
    lines = section(models.runpytest(spread, "--ampcheck-update"))
    assert [line for line in lines if line.startswith("updated")] == [
        f"updated {models.path / NAME}: models.py:attention, models.py:net"
    ]


def test_an_update_without_a_lock_to_write_is_said(pytester: pytest.Pytester, section: Section) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    assert any("nothing was written" in line for line in section(pytester.runpytest("-n0", "--ampcheck-update")))


def test_the_ini_file_can_ask_for_it(models: pytest.Pytester) -> None:
    models.makepyfile(ASSERTS)
    models.makeini("[pytest]\nampcheck_update = true\n")
    models.runpytest("-n0").assert_outcomes(passed=4)
    assert (models.path / NAME).is_file()


def test_a_session_without_the_option_writes_nothing(models: pytest.Pytester) -> None:
    models.makepyfile(ASSERTS)
    models.runpytest("-n0", "--ampcheck-update").assert_outcomes(passed=4)
    before = (models.path / NAME).read_bytes()
    models.makepyfile(models=MODEL.replace("(x @ x).softmax(-1)", "x.softmax(-1)"))
    result = models.runpytest("-n0", "--ampcheck")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*policy-drift*aten::matmul*"])
    assert (models.path / NAME).read_bytes() == before


@pytest.mark.needs_torch("2.12", "rms_norm has a rule on CUDA")
def test_a_lock_of_another_release_fails_with_what_changed(models: pytest.Pytester) -> None:
    models.makepyfile(ASSERTS)
    models.runpytest("-n0", "--ampcheck-update").assert_outcomes(passed=4)
    path = models.path / NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    entry = data["targets"]["models.py:net"]["cuda/float16"]
    entry["torch"] = "2.11.0"
    del entry["ops"]["aten::rms_norm"]
    path.write_text(json.dumps(data), encoding="utf-8")
    result = models.runpytest("-n0", "-k", "net and cuda")
    result.assert_outcomes(failed=1, deselected=3)
    result.stdout.fnmatch_lines(["E*aten::rms_norm*2.11.0: left alone*fp32*since 2.12*1 module: 1*"])


def test_a_damaged_lock_is_told_under_the_tests_own_line_alone(models: pytest.Pytester) -> None:
    models.makepyfile("import ampcheck\n\ndef test_lock():\n    ampcheck.assert_policy('models.py:net')")
    (models.path / NAME).write_text("{", encoding="utf-8")
    for options in ((), ("--ampcheck-update",)):
        result = models.runpytest("-n0", *options)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"E*{NAME} is damaged*"])
        (line,) = lines_of_source(result)
        assert line.endswith(".py:4: UsageError")
        assert not line.startswith("ampcheck")
        result.stdout.no_fnmatch_line("*JSONDecodeError*")


def test_a_factory_that_raises_is_shown_with_its_own_line(models: pytest.Pytester) -> None:
    models.makepyfile(
        broken_model="def net():\n    raise KeyError('weights')",
        test_it="import ampcheck\n\ndef test_lock():\n    ampcheck.assert_policy('broken_model.py:net')",
    )
    result = models.runpytest("-n0")
    result.assert_outcomes(failed=1)
    assert any(line.startswith("broken_model.py:2: KeyError") for line in lines_of_source(result))


def test_a_marked_test_with_a_damaged_lock_shows_nothing_of_ampchecks_source(models: pytest.Pytester) -> None:
    models.makepyfile(test_it=MARKED)
    (models.path / NAME).write_text("{", encoding="utf-8")
    result = models.runpytest("-n0")
    result.assert_outcomes(failed=7)
    result.stdout.fnmatch_lines([f"E*{NAME} is damaged*"])
    assert {place.partition(":")[0] for place in lines_of_source(result)} == {"test_it.py"}


def test_a_damaged_lock_is_told_whatever_the_body_does(models: pytest.Pytester) -> None:
    models.makepyfile("import pytest\n@pytest.mark.ampcheck('overflow', lock=True)\ndef test_it(): raise ValueError")
    (models.path / NAME).write_text("{", encoding="utf-8")
    models.runpytest("-n0").stdout.fnmatch_lines([f"E*{NAME} is damaged*"])


def test_an_update_that_wrote_nothing_for_a_damaged_lock_says_what_is_true(
    models: pytest.Pytester, section: Section
) -> None:
    models.makepyfile(ASSERTS)
    (models.path / NAME).write_text("{", encoding="utf-8")
    said = "\n".join(section(models.runpytest("-n0", "--ampcheck-update")))
    assert "nothing was written" in said
    assert "no test compares" not in said
    assert (models.path / NAME).read_text(encoding="utf-8") == "{"


def test_a_target_is_found_from_every_folder_that_pytest_runs_in(
    models: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.makepyfile(ASSERTS)
    (models.path / "below").mkdir()
    monkeypatch.chdir(models.path / "below")
    for options in (("--ampcheck-update",), ()):
        models.runpytest("-n0", *options, "..").assert_outcomes(passed=4)
    assert entries(models) == {"models.py:net", "models.py:attention"}


@pytest.mark.parametrize("spoil", ["missing", "another entry", "another op"])
def test_a_marked_test_is_told_to_update_by_pytest_alone(pytester: pytest.Pytester, spoil: str) -> None:
    pytester.makepyfile(test_it=MARKED)
    if spoil != "missing":
        pytester.runpytest("-n0", "--ampcheck-update").assert_outcomes(passed=7)
    if spoil == "another entry":
        pytester.makepyfile(test_it=MARKED.replace("test_body", "test_renamed").replace("test_each", "test_other"))
    if spoil == "another op":
        pytester.makepyfile(test_it=MARKED.replace("softmax(-1)", "cumsum(-1)").replace("(4, 4)", "(4, 4).half()"))
    result = pytester.runpytest("-n0")
    result.assert_outcomes(failed=7)
    result.stdout.fnmatch_lines(["*pytest --ampcheck-update*"])
    result.stdout.no_fnmatch_line("*policy lock*")


# The marker ------------------------------------------------------------------------------------------------------


def test_the_marker_locks_what_the_body_sends_through_autocast(pytester: pytest.Pytester, spread: str) -> None:
    pytester.makepyfile(test_it=MARKED)
    pytester.runpytest(spread).assert_outcomes(failed=7)
    pytester.runpytest(spread, "--ampcheck-update").assert_outcomes(passed=7)
    assert entries(pytester) == {"test_it.py::test_body", *(f"test_it.py::test_each[{n}]" for n in range(6))}
    pytester.runpytest(spread).assert_outcomes(passed=7)


def test_a_body_that_does_otherwise_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=MARKED)
    pytester.runpytest("-n0", "--ampcheck-update").assert_outcomes(passed=7)
    pytester.makepyfile(test_it=MARKED.replace("torch.ones(4, 4) @ torch.ones(4, 4)", "torch.ones(4, 4).cumsum(0)"))
    result = pytester.runpytest("-n0")
    result.assert_outcomes(passed=1, failed=6)
    result.stdout.fnmatch_lines(["*policy-drift*test_each*"])
    result.stdout.no_fnmatch_line("*plugin*marker.py*")


def test_a_body_in_another_dtype_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=MARKED)
    pytester.runpytest("-n0", "--ampcheck-update").assert_outcomes(passed=7)
    pytester.makepyfile(test_it=MARKED.replace("torch.bfloat16", "torch.float16"))
    result = pytester.runpytest("-n0")
    result.assert_outcomes(passed=1, failed=6)
    result.stdout.fnmatch_lines(["*on cpu/bfloat16; it is used on cpu/float16*"])


def test_a_body_without_autocast_is_no_pass(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.ampcheck(lock=True)\ndef test_nothing(): pass")
    for options in ((), ("--ampcheck-update",)):
        result = pytester.runpytest("-n0", *options)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*none ran on tensors of the CPU inside a region of autocast*"])
    assert not (pytester.path / NAME).exists()


def test_the_lock_may_lie_elsewhere(pytester: pytest.Pytester) -> None:
    pytester.mkdir("locks")
    pytester.makepyfile(MARKED.replace("lock=True", "lock='locks/my.json'"))
    pytester.runpytest("-n0", "--ampcheck-update").assert_outcomes(passed=7)
    assert [path.name for path in (pytester.path / "locks").iterdir()] == ["my.json"]
    pytester.runpytest("-n0").assert_outcomes(passed=7)


def test_a_failure_of_the_body_comes_first_and_locks_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=MARKED.replace("assert y.dtype is torch.float32", "assert False, 'the body'"))
    result = pytester.runpytest("-n0", "--ampcheck-update", "-k", "test_body")
    result.assert_outcomes(failed=1, deselected=6)
    result.stdout.fnmatch_lines(["E*the body*"])
    assert not (pytester.path / NAME).exists()


def test_a_device_alone_runs_the_body_under_its_policy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import pytest, torch

@pytest.mark.ampcheck(device="cuda")
def test_as_on_cuda():
    with torch.autocast("cuda", torch.float16):
        assert torch.ones(4, dtype=torch.float16).softmax(-1).dtype is torch.float32

def test_as_on_the_cpu():
    with torch.autocast("cpu", torch.float16):
        assert torch.ones(4, dtype=torch.float16).softmax(-1).dtype is torch.float16

@pytest.mark.ampcheck(device="tpu")
def test_nowhere(): pass
"""
    )
    result = pytester.runpytest("-n0")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["E*UsageError*'tpu'*cpu, cuda*"])


def test_names_of_checks_and_a_lock_go_together(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import pytest, torch

@pytest.mark.ampcheck("overflow", lock=True, device="cuda")
def test_large():
    with torch.autocast("cuda", torch.float16):
        torch.full((4, 4), 6e4) @ torch.ones(4, 4)
"""
    )
    result = pytester.runpytest("-n0", "--ampcheck-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*[[]overflow[]] fail*"])


# Guards ----------------------------------------------------------------------------------------------------------

LEAKS = """
import torch

def test_clean():
    with torch.autocast("cpu", torch.bfloat16):
        torch.ones(2, 2) @ torch.ones(2, 2)

def test_leaks():
    torch.set_default_dtype(torch.float64)

def test_after():
    assert torch.get_default_dtype() is torch.float32
"""


def test_a_test_that_leaks_state_fails_under_the_guard_and_the_next_is_spared(
    pytester: pytest.Pytester, spread: str
) -> None:
    pytester.makepyfile(LEAKS)
    result = pytester.runpytest_subprocess(spread, "--ampcheck-guard")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*[[]autocast-state[]] fail*test_leaks*default dtype*"])


def test_without_the_option_nothing_is_guarded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(LEAKS)
    pytester.runpytest_subprocess("-n0").assert_outcomes(passed=2, failed=1)
    pytester.runpytest_subprocess("-n0", "-k", "leaks").assert_outcomes(passed=1, deselected=2)


def test_a_marked_test_is_guarded_by_the_checks_that_it_names(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n" + LEAKS.replace("def test_leaks", "@MARK\ndef test_leaks"), conftest="")
    path = next(pytester.path.glob("test_*.py"))
    path.write_text(path.read_text().replace("@MARK", "@pytest.mark.ampcheck('autocast-state')"), encoding="utf-8")
    result = pytester.runpytest_subprocess("-n0")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*[[]autocast-state[]] fail*"])


def test_a_guarded_session_that_does_not_use_torch_does_not_import_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import sys

def test_first():
    assert "torch" not in sys.modules

def test_second():
    assert "torch" not in sys.modules
"""
    )
    pytester.runpytest_subprocess("-n0", "--ampcheck-guard").assert_outcomes(passed=2)


def test_lock_files_are_named_by_the_test_file_in_folders_too(pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("deep")
    Path(folder, "test_deep.py").write_text(MARKED, encoding="utf-8")
    pytester.runpytest("-n0", "--ampcheck-update").assert_outcomes(passed=7)
    assert "test_deep.py::test_body" in (folder / NAME).read_text(encoding="utf-8")
