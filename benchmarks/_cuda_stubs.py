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

    A symbol without a version may be in any of the libraries that have none.
    """
    own = [*(torch / "lib").glob("*.so*"), *torch.glob("_C*.so")]
    needed = {name for path in own for name in re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", path))}
    missing = sorted(name for name in needed if not _SYSTEM.match(name) and not (torch / "lib" / name).exists())
    defined = {line.split()[-1].partition("@")[0] for path in own for line in symbols(path, "--defined-only")}
    undefined = {line.split()[-1].partition("@") for path in own for line in symbols(path, "--undefined-only")}
    names_by_version: dict[str, set[str]] = {}
    for name, _, version in undefined:
        if name not in defined:
            names_by_version.setdefault(version.lstrip("@"), set()).add(name)
    plain = {name for name in names_by_version.get("", ()) if _CUDA.match(name)}
    versions = {library: version for path in own for library, version in versions_of(path)}
    for library in missing:
        version = versions.get(library, "")
        make_stub(stubs / library, names_by_version[version] if version else plain, version)
    return missing


def versions_of(path: Path) -> list[tuple[str, str]]:
    """Libraries whose symbols have a version, and that version: of CUDA's, one each."""
    return re.findall(r"File: (\S+)  Cnt: 1\n.*?Name: (\S+)", output("readelf", "-VW", path))


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
