"""Load a PyTorch built for CUDA without CUDA's libraries: stand-ins for them, in which every call returns an error.

    python benchmarks/_cuda_stubs.py PATH/TO/site-packages/torch STUBS
    LD_LIBRARY_PATH=STUBS PIP_NO_DEPS=1 ampcheck bisect ... --torch 2.8..2.14

The libraries of a release need several gigabytes, and a machine without a GPU never calls them. Needs `readelf`, `nm`
and `cc`. One folder serves several releases, as a stand-in has the name of its library and of its version.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice."""

_SYSTEM = re.compile(r"^(ld-linux.*|lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+|gomp)\.so\.\d+)$")
_CUDA = re.compile(r"_?(cu|nv|nccl|pnccl)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", type=Path, help="the package of torch")
    parser.add_argument("stubs", type=Path, help="the folder of the stand-ins")
    options = parser.parse_args()
    for name in make_stubs(options.torch, options.stubs):
        print(name)


def make_stubs(torch: Path, stubs: Path) -> list[str]:
    """Write a stand-in for each library that PyTorch's need and do not bring; their names. Earlier ones are extended.

    CUDA's libraries name the version of each symbol as themselves; a symbol without one may be in any of the others.
    """
    own = [*(torch / "lib").glob("*.so*"), *torch.glob("_C*.so")]
    needed = {name for path in own for name in re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", path))}
    missing = sorted(name for name in needed if not _SYSTEM.match(name) and not (torch / "lib" / name).exists())
    defined = {line.split()[-1].partition("@")[0] for path in own for line in symbols(path, "--defined-only")}
    symbols_by_version: dict[str, set[str]] = {}
    for name, _, version in {
        line.split()[-1].partition("@") for path in own for line in symbols(path, "--undefined-only")
    }:
        if name not in defined:
            symbols_by_version.setdefault(version.lstrip("@"), set()).add(name)
    versioned = [library for library in missing if library in symbols_by_version]
    for library in missing:
        # Symbols of Python, and weak ones of the compiler, have no version either: they are found there first.
        names = symbols_by_version.get(library, set())
        if not names:
            names = {name for name in symbols_by_version.get("", ()) if _CUDA.match(name)}
        make_stub(stubs / library, names, library if library in versioned else "")
    return missing


def make_stub(path: Path, names: set[str], version: str) -> None:
    """A library with functions of these names and of the stand-in that is there now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = symbols(path, "--defined-only") if path.exists() else []
    names = names | {line.split()[-1].partition("@")[0] for line in before if " T " in line}
    code = "\n".join(_function(name) for name in sorted(names))
    script = path.with_suffix(".map")
    script.write_text(f"{version} {{ global: *; }};\n" if version else "{ global: *; };\n")
    command = ["cc", "-w", "-fno-builtin", "-nostdlib", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{path.name}"]
    subprocess.run([*command, f"-Wl,--version-script={script}", "-o", str(path)], input=code, text=True, check=True)
    script.unlink()


def _function(name: str) -> str:
    """A function that returns an error; one that describes an error returns a text."""
    if re.search("String|Name", name):
        return f'const char *{name}(void) {{ return "there is no CUDA here"; }}'
    return f"int {name}(void) {{ return {NO_DEVICE}; }}"


def symbols(path: Path, which: str) -> list[str]:
    return output("nm", "-D", which, path).splitlines()


def output(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
