"""`ampcheck known`: what is known of installed releases, and which code fails for using it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ampcheck.cli.main import main
from ampcheck.core import run as records
from ampcheck.core.environment import installed
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict
from ampcheck.tools import known as room
from ampcheck.tools.known import DATA, known, read_defects, used

SCHEMA = json.loads(Path(records.__file__).with_name("known.schema.json").read_text(encoding="utf-8"))
USE = "import torch\nfrom fakelib.losses import Sharp as Loss\n\nloss = Loss()(torch.ones(2))\n"


def measurement(release: str, *broken: str, torch: str = "2.13.0") -> dict[str, Any]:
    return {"release": release, "torch": torch, "python": "3.11.7", "date": "2026-11-30", "broken": list(broken)}


def defect(name: str = "fakelib-sharp", **changes: object) -> dict[str, Any]:
    """A defect of `fakelib.losses.Sharp` in 1.0 and 1.1, which 1.2 has mended, and which bfloat16 does not have."""
    return {
        "name": name,
        "title": "Sharp is NaN",
        "package": "fake-lib",
        "functions": [{"name": "fakelib.losses.Sharp", "names": ["fakelib.losses.Sharp"], "beside": []}],
        "way": "autocast",
        "dtypes": ["float16"],
        "severity": "nonfinite",
        "checks": ["overflow"],
        "measured": [measurement("1.0", "cpu"), measurement("1.1", "cpu", "cuda"), measurement("1.2")],
        "cure": "cast to float32",
        "repro": "raise SystemExit(1)\n",
        **changes,
    }


def write(path: Path, *defects: Mapping[str, object]) -> Path:
    data = {"schema": 1, "command": "a test", "defects": list(defects or [defect()])}
    Draft202012Validator(SCHEMA).validate(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose code uses fakelib, of which 1.1 is installed; the data are beside it."""
    install(tmp_path, "1.1", monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "use.py").write_text(USE)
    write(tmp_path / "data.json")
    return tmp_path


def install(folder: Path, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = folder / f"site-{release}"
    info = site / f"fake_lib-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-lib\nVersion: {release}\n")
    monkeypatch.syspath_prepend(str(site))
    installed.cache_clear()


def fails(folder: Path, source: str = USE, *options: str, data: str = "data.json") -> int:
    (folder / "src" / "use.py").write_text(source)
    return main(["known", "--fail-if-used", "src", "--data", data, *options])


# What is known -------------------------------------------------------------------------------------------------------


def test_the_data_of_the_wheel_have_the_published_schema_and_name_what_broke() -> None:
    data = json.loads(DATA.read_text(encoding="utf-8"))
    Draft202012Validator(SCHEMA).validate(data)
    for name, kind in (("Defect", room.Defect), ("Function", room.Function), ("Measurement", room.Measurement)):
        assert [field.name for field in fields(kind)] == SCHEMA["$defs"][name]["required"]
    defects = read_defects()
    assert len(defects) >= 85
    for one in defects:
        assert one.dtypes, one.name
        assert one.cure, one.name
        assert one.measured, one.name
        assert one.since, one.name


def test_torch_itself_is_listed_in_the_release_that_is_installed() -> None:
    every = {one.defect.name: one for one in known(["torch"])}
    one = every["torch-histc"]
    assert one.release == version("torch")
    measured = {row.release.partition("+")[0] for row in one.defect.measured}
    assert (one.state == "unmeasured") == (one.release.partition("+")[0] not in measured)


def test_neither_torch_nor_a_package_is_imported(folder: Path) -> None:
    code = (
        "import sys; from ampcheck.cli.main import main; main(['known']); main(['known', '--fail-if-used', 'src']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'torchmetrics')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "torch-histc" in done.stdout


@pytest.mark.parametrize(
    ("release", "state"),
    [("1.0", "broken"), ("1.1", "broken"), ("1.1+cpu", "broken"), ("1.2", "mended"), ("1.3", "unmeasured")],
)
def test_the_state_is_that_of_the_installed_release(
    folder: Path, monkeypatch: pytest.MonkeyPatch, release: str, state: str
) -> None:
    if release != "1.1":
        install(folder, release, monkeypatch)
    (one,) = known(data=folder / "data.json")
    assert (one.release, one.state) == (release, state)
    assert (one.defect.since, one.defect.mended) == ("1.0", "1.2")


def test_a_release_that_breaks_again_is_not_mended_before(folder: Path) -> None:
    rows = [measurement("1.0", "cpu"), measurement("1.1"), measurement("1.2", "cpu"), measurement("1.3")]
    (one,) = read_defects(write(folder / "again.json", defect(measured=rows)))
    assert one.mended == "1.3"
    (one,) = read_defects(write(folder / "again.json", defect(measured=rows[:3])))
    assert one.mended == ""


def test_one_pytorch_that_breaks_a_release_is_enough(folder: Path) -> None:
    rows = [measurement("1.1", torch="2.12.0"), measurement("1.1", "cpu", torch="2.13.0")]
    (one,) = known(data=write(folder / "two.json", defect(measured=rows)))
    assert one.state == "broken"


def test_a_package_that_is_not_installed_is_listed_where_it_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write(folder / "other.json", defect(package="never-installed")))
    assert main(["known", "--data", data]) == 0
    assert capsys.readouterr().out == "no defect of an installed package is known; that is no measurement\n"
    assert main(["known", "Never_Installed", "--data", data]) == 0
    assert "here:      not installed" in capsys.readouterr().out
    assert main(["known", "fake-lib", "--data", data]) == 0
    assert capsys.readouterr().out == "no defect of fake-lib is known; that is no measurement\n"
    assert main(["known", "never-instaled", "--data", data]) == 2
    assert "did you mean never-installed?" in capsys.readouterr().err


def test_a_page_has_function_dtype_releases_repro_and_cure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["known", "fake-lib", "--data", "data.json"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "fakelib-sharp: Sharp is NaN",
        "  functions: fakelib.losses.Sharp",
        "  breaks:    in float16, under autocast of the CPU and of CUDA, emulated (nonfinite)",
        "  here:      broken 1.1",
        "  measured:  1.0 broken, 1.1 broken, 1.2 mended, with torch 2.13.0",
        "  an audit:  reports it by overflow",
        "  repro:     ampcheck known --repro fakelib-sharp | python -",
        "  cure:",
        "    cast to float32",
    ]
    assert main(["known", "--repro", "fakelib-sharp", "--data", "data.json"]) == 0
    assert capsys.readouterr().out == "raise SystemExit(1)\n"
    assert main(["known", "--repro", "fakelib-shar", "--data", "data.json"]) == 2
    assert "did you mean fakelib-sharp?" in capsys.readouterr().err


def test_json_has_what_the_data_have_and_the_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["known", "--json", "--data", "data.json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one == {
        **defect(),
        "release": "1.1",
        "state": "broken",
        "since": "1.0",
        "mended": "1.2",
        "command": "ampcheck known --repro fakelib-sharp | python -",
    }


def test_the_list_is_of_what_matters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["known", "--data", "data.json"]) == 0
    assert "fakelib-sharp" in capsys.readouterr().out
    assert main(["known", "--data", "data.json", "--dtype", "bfloat16"]) == 0
    assert "fakelib-sharp" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["known", "--dtype", "float8"])


def test_a_line_of_the_list_has_package_function_dtype_state_and_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = [{"name": f"fakelib.f{i}", "names": [f"fakelib.f{i}"], "beside": []} for i in range(3)]
    write(
        folder / "data.json", defect(), defect("fakelib-some", functions=several), defect("fakelib-none", functions=[])
    )
    assert main(["known", "--data", "data.json"]) == 0
    met = "float16, under autocast of the CPU and of CUDA, emulated"
    assert capsys.readouterr().out.splitlines()[:-1] == [
        f"fake-lib 1.1: fakelib.f0, fakelib.f1 and 1 more in {met}: broken (fakelib-some)",
        f"fake-lib 1.1: fakelib.losses.Sharp in {met}: broken (fakelib-sharp)",
        f"fake-lib 1.1: Sharp is NaN in {met}: broken (fakelib-none)",
    ]


@pytest.mark.parametrize("alone", [["--schema"], ["--repro", "fakelib-sharp"], ["--repro", ""]])
@pytest.mark.parametrize("other", [["--fail-if-used", "src"], ["fake-lib"], ["--way", "half"]])
def test_what_is_printed_alone_is_no_answer_about_uses(
    folder: Path, capsys: pytest.CaptureFixture[str], alone: list[str], other: list[str]
) -> None:
    assert main(["known", *other, *alone]) == 2
    assert f"{alone[0]}" in capsys.readouterr().err


def test_an_empty_name_is_no_package(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["known", "", "--data", "data.json"]) == 2
    assert capsys.readouterr().err.startswith("ampcheck: '' is not installed, and no defect of it is known")


def test_a_binary_file_is_no_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "src" / "model.py").write_bytes(b"\x00\x01")
    assert main(["known", "--fail-if-used", "src/model.py", "--data", "data.json"]) == 2
    assert "known needs a file of Python" in capsys.readouterr().err


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["known", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "data.json is no list of known defects: a JSON object with an integer 'schema' was expected"),
        ('{"schema": 1, "x": 2}', "the list of known defects in data.json is damaged"),
        ('{"schema": 1, "command": "", "defects": [{"name": "x"}]}', "missing"),
        ('{"schema": 1, "command": "", "defects": [], "more": 1}', "more"),
        ('{"schema": 2, "command": "", "defects": []}', "has schema 2, newer than this ampcheck reads (1)"),
        ('{"schema": 1, "command": "", "defects": [], "defects": []}', "occurs twice"),
    ],
)
def test_damaged_data_are_no_clean_bill(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    (folder / "data.json").write_text(text)
    for options in ([], ["--fail-if-used", "src"]):
        assert main(["known", "--data", "data.json", *options]) == 2
        assert reason in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"cannot read the known defects in gone\.json"):
        known(data="gone.json")


# What code uses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        USE,
        "import fakelib.losses\nx = fakelib.losses.Sharp()\n",
        "import fakelib.losses as fl\nx = fl.Sharp()\n",
        "from fakelib import losses\nx = losses.Sharp.from_config({})\n",
        "from fakelib.losses import Sharp\nLOSSES = {'sharp': Sharp}\n",
        "from fakelib.losses import Sharp\nclass Mine(Sharp):\n    pass\n",
        "def train():\n    from fakelib.losses import Sharp\n    return Sharp()\n",
        "def Sharp():\n    pass\ndef train():\n    from fakelib.losses import Sharp\n    return Sharp()\n",
        "def Sharp():\n    pass\nfrom fakelib.losses import Sharp\nx = Sharp()\n",
        "try:\n    from fakelib.losses import Sharp\nexcept ImportError:\n    def Sharp(): ...\nx = Sharp()\n",
        "from fakelib.losses import Sharp\ndef f(Sharp):\n    return Sharp()\nx = Sharp()\n",
        "from fakelib.losses import Sharp\ndef f(x=Sharp()):\n    Sharp = 1\n",
    ],
)
def test_a_call_of_a_broken_function_fails(folder: Path, capsys: pytest.CaptureFixture[str], source: str) -> None:
    assert fails(folder, source) == 1
    assert "fail fakelib-sharp fakelib.losses.Sharp of fake-lib 1.1: Sharp is NaN" in capsys.readouterr().out


@pytest.mark.parametrize(
    "source",
    [
        "from fakelib.losses import Sharp\n",
        "from fakelib.losses import Soft\nx = Soft()\n",
        "from fakelib.losses import Sharp\ndef f(x: Sharp) -> Sharp:\n    return isinstance(x, Sharp)\n",
        "from otherlib.losses import Sharp\nx = Sharp()\n",
        "text = 'fakelib.losses.Sharp()'\n",
        "from fakelib.losses import Sharp\ndef Sharp():\n    pass\nx = Sharp()\n",
        "from fakelib.losses import Sharp\ndef f(Sharp):\n    return Sharp()\n",
        "from fakelib.losses import Sharp\nf = lambda Sharp: Sharp()\n",
        "from fakelib import losses\ndef f():\n    losses = make()\n    return losses.Sharp()\n",
    ],
)
def test_what_is_no_use_passes_and_says_what_was_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    assert fails(folder, source) == 0
    out = capsys.readouterr().out
    assert out == "0 uses of functions with a known defect; looked at 1 file, 1 defect\n"


def test_a_mended_release_passes_and_an_unmeasured_one_warns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(folder, "1.2", monkeypatch)
    assert fails(folder) == 0
    assert capsys.readouterr().out.startswith("0 uses")
    install(folder, "1.3", monkeypatch)
    assert fails(folder) == 0
    assert "src/use.py:4: warn fakelib-sharp fakelib.losses.Sharp of fake-lib 1.3, not measured" in (
        capsys.readouterr().out
    )


def test_a_package_that_is_not_installed_warns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "data.json", defect(package="never-installed"))
    assert fails(folder) == 0
    assert "warn fakelib-sharp fakelib.losses.Sharp of never-installed, not installed here" in capsys.readouterr().out


def test_a_comment_accepts_a_use_with_its_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comment = "  # ampcheck: ignore[fakelib-sharp] inputs are below 1\n"
    assert fails(folder, USE[:-1] + comment) == 0
    assert "0 uses of functions with a known defect, 1 accepted" in capsys.readouterr().out
    (finding,) = used(["src"], data="data.json").findings
    assert (finding.verdict, finding.accepted) == (Verdict.ACCEPTED, "inputs are below 1")
    assert fails(folder, USE[:-1] + comment.replace("fakelib-sharp", "overflow")) == 1


def test_what_does_not_matter_is_counted_and_does_not_fail(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(folder, USE, "--dtype", "bfloat16") == 2
    assert "none of 1 defect is met in the ways, dtypes and devices" in capsys.readouterr().err
    other = {"name": "other", "names": ["fakelib.other"], "beside": []}
    write(folder / "data.json", defect(), defect("fakelib-other", functions=[other], dtypes=["bfloat16"]))
    assert fails(folder, USE, "--dtype", "bfloat16") == 0
    assert "1 defect whose way, dtype or device does not matter" in capsys.readouterr().out
    write(folder / "data.json", defect(way="bfloat16", measured=[measurement("1.1", "cpu")]))
    assert fails(folder) == 2
    assert fails(folder, USE, "--way", "bfloat16", "--device", "cuda") == 1  # without autocast no device matters
    write(folder / "data.json", defect(measured=[measurement("1.1", "cpu")]))
    assert fails(folder) == 1
    assert fails(folder, USE, "--device", "cuda") == 2


def test_a_method_is_used_where_its_class_is_too(folder: Path) -> None:
    function = {"name": "fakelib.Plan.step", "names": ["fakelib.Plan"], "beside": [".step"]}
    write(folder / "data.json", defect(functions=[function]))
    both = "from fakelib import Plan\nplan = Plan()\nplan.step(3)\n"
    assert fails(folder, both) == 1
    assert fails(folder, both.replace("plan.step", "plan.stop")) == 0
    assert fails(folder, both.replace("fakelib", "otherlib")) == 0


def test_a_method_of_tensors_is_no_function_of_another_module(folder: Path) -> None:
    function = {"name": "torch.Tensor.nanmean", "names": [".nanmean", ".nanmean_"], "beside": ["torch"]}
    write(folder / "data.json", defect(functions=[function]))
    assert fails(folder, "import torch\nx = (torch.ones(2) + 1).nanmean()\n") == 1
    assert fails(folder, "import torch\ndef f(x: torch.Tensor):\n    return torch.ones(2) + x.nanmean()\n") == 1
    assert fails(folder, "import numpy as np, torch\nx = np.nanmean(torch.ones(2))\n") == 0
    assert fails(folder, "def f(x):\n    return x.nanmean()\n") == 0
    own = "import torch\nclass A:\n    def nanmean(self):\n        return torch.ones(2)\n    def f(self):\n"
    assert fails(folder, f"{own}        return self.nanmean()\n") == 0
    assert fails(folder, f"{own}        return self.x.nanmean()\n") == 1


def test_each_line_is_reported_once_in_the_order_of_the_files(folder: Path) -> None:
    (folder / "src" / "a.py").write_text("from fakelib.losses import Sharp\nx = Sharp() + Sharp()\ny = Sharp()\n")
    run = used(["src"], data="data.json")
    assert [(finding.where.file, finding.where.line) for finding in run.findings] == [
        ("src/a.py", 2),
        ("src/a.py", 3),
        ("src/use.py", 4),
    ]


def test_json_of_uses_is_a_run_and_github_has_annotations(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(folder, USE, "--json") == 1
    run = Run.from_json(json.loads(capsys.readouterr().out))
    assert run.findings == used(["src"], data="data.json").findings
    assert run.title == "known defects in src"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert fails(folder) == 1
    assert "file=src/use.py,line=4::fakelib.losses.Sharp of fake-lib 1.1" in capsys.readouterr().out


def test_where_nothing_can_be_read_nothing_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = USE + "def f(:\n"
    assert fails(folder, damaged) == 2
    assert "known needs a file of Python; found none in src/use.py" in capsys.readouterr().err
    (folder / "src" / "more.py").write_text("x = 1\n")
    assert fails(folder, damaged) == 0
    assert "1 file that cannot be parsed" in capsys.readouterr().out
    assert main(["known", "--fail-if-used", "gone", "--data", "data.json"]) == 2
    assert main(["known", "fake-lib", "--fail-if-used", "src", "--data", "data.json"]) == 2


def test_a_defect_has_functions_where_its_report_names_some() -> None:
    reports = Path(__file__).parents[3] / "reports" / "found"
    if not reports.is_dir():
        pytest.skip("the files of the repository are not in this copy of the tests")
    for one in read_defects():
        report = (reports / one.name / "report.md").read_text(encoding="utf-8")
        assert bool(one.functions) == ("functions:" in report.lower()), one.name


def test_each_repro_uses_its_functions() -> None:
    repros = Path(__file__).parents[3] / "reports" / "found"
    if not repros.is_dir():
        pytest.skip("the files of the repository are not in this copy of the tests")
    run = used([repros], ways=())
    uses = {finding.check for finding in run.findings if f"/{finding.check}/" in finding.where.file}
    unseen = {one.name for one in read_defects() if all(name.name.endswith("__") for name in one.functions)}
    assert {one.name for one in read_defects()} - unseen - uses == set()
