"""Build the recipe of conda-forge against a local channel of this machine's own Python: conda-forge is not needed.

    python .ci/conda.py                    a temporary folder; prints what the package holds
    python .ci/conda.py --json FILE.json   writes that as evidence, too

Needs py-rattler-build, and pip and setuptools beside this Python. The channel holds three packages that are made here:
`python`, which points to the interpreter that runs this, and its `pip` and `setuptools`. The package is without
compiled code, so that any Python gives the same. Its own tests are not run: they need conda packages of PyTorch. Its
files are compared with those that git has, instead. Exits with 1 where one is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

from rattler_build import Package, Stage0Recipe, ToolConfiguration

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from _evidence import write_evidence  # noqa: E402  # beside the scripts that write evidence

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = f"$PREFIX/lib/{PYTHON}/site-packages"
LEFT_OUT = {"ampcheck/torchtools/contract.md"}
"""What git has and no package: a page of the documentation."""

UNTESTED = ToolConfiguration(test_strategy="skip")


def build_tool(name: str, number: str, script: str, channel: Path) -> None:
    """Build a package of the local channel."""
    build = {"script": script, "dynamic_linking": {"binary_relocation": False}}
    recipe = Stage0Recipe.from_dict({"package": {"name": name, "version": number}, "build": build})
    recipe.run_build(output_dir=channel, tool_config=UNTESTED)


def build_channel(channel: Path) -> None:
    """Build the packages without which pip installs nothing: a virtual environment in parts."""
    interpreter, number = Path(sys.executable).resolve(), sys.version.split()[0]
    script = f"""
mkdir -p $PREFIX/bin {PACKAGES}
printf 'home = {interpreter.parent}\\nversion = {number}\\n' > $PREFIX/pyvenv.cfg
ln -s {interpreter} $PREFIX/bin/{PYTHON}
ln -s {PYTHON} $PREFIX/bin/python
"""
    build_tool("python", number, script, channel)
    site = sysconfig.get_path("purelib")
    for tool in ("pip", "setuptools"):
        files = f"{site}/{tool} {site}/{tool}-*.dist-info"
        build_tool(tool, version(tool), f"mkdir -p {PACKAGES}\ncp -r {files} {PACKAGES}", channel)


def main() -> int:
    """Build it, and print what it holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what the package holds as evidence")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        channel, output = Path(name, "channel"), Path(name, "output")
        build_channel(channel)
        recipe = Stage0Recipe.from_file(ROOT / ".ci" / "conda" / "recipe.yaml")
        recipe.run_build(output_dir=output, channels=[channel.as_uri()], tool_config=UNTESTED)
        (path,) = output.glob("noarch/*.conda")
        package, size = Package.from_file(path), path.stat().st_size
        files = package.files
    tracked = subprocess.run(["git", "ls-files", "ampcheck"], cwd=ROOT, capture_output=True, text=True, check=True)
    missing = sorted(
        {*tracked.stdout.splitlines()} - LEFT_OUT - {file.removeprefix("site-packages/") for file in files}
    )
    held = {
        "package": f"{package.name} {package.version}",
        "files": len(files),
        "bytes": size,
        "requires": package.depends,
        "missing": missing,
        "py-rattler-build": version("py-rattler-build"),
    }
    print(*(f"{key}: {value}" for key, value in held.items()), sep="\n")
    if options.json is not None:
        rows = [f"{held['package']}, {len(files)} files, {size:,} bytes; missing: {', '.join(missing) or 'none'}."]
        write_evidence(options.json, held, rows)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
