"""Virtual environments with one release of a package each; every other package is that of this environment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ampcheck.core.errors import UsageError
from ampcheck.core.files import cache_home, only_writer, write_atomically
from ampcheck.core.json_files import read_json
from ampcheck.core.worker import PATIENCE

_RECORD = "ampcheck.json"
"""In an environment that is complete: what it holds, and what it cost."""

_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
_LIBRARY = "import sysconfig; print(sysconfig.get_path('purelib'))"


@dataclass(frozen=True, slots=True)
class Environment:
    """A complete environment. release: of the package; python: its interpreter; size: bytes; seconds: to make it."""

    package: str
    release: str
    python: str
    size: int
    seconds: float


class Environments:
    """The environments of one package over this Python and its packages, which all searches share. folder: of all."""

    def __init__(self, package: str) -> None:
        self.package, self.folder = package, cache_home() / "environments"
        self._over = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        parts = [sys.version, sys.executable, *self._over]
        self._digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]

    def kept(self) -> dict[str, Environment]:
        """The complete environments, by release."""
        found: dict[str, Environment] = {}
        for path in sorted(self.folder.glob(f"{self.package}-*-{self._digest}/{_RECORD}")):
            with suppress(OSError, ValueError, TypeError):
                environment = Environment(**read_json(path))
                if environment.package == self.package:
                    found[environment.release] = environment
        return found

    def installed(self) -> str:
        """The release that is installed here, whose interpreter is this one; empty for none."""
        return next((Version(each.version).public for each in _installed(self.package)), "")

    def python(self, release: str) -> str:
        """The interpreter with a release, whose environment is made where there is none.

        Raises `UsageError` where the release cannot be installed, or another one would be imported.
        """
        if release == self.installed():
            return sys.executable
        kept = self.kept().get(release)
        return (kept or self._made(release)).python

    def remove(self, release: str) -> None:
        """Delete the environment of a release, if there is one."""
        shutil.rmtree(self._path(release), ignore_errors=True)

    def estimate(self) -> tuple[int, float]:
        """Bytes and seconds of another one: of the largest that is kept, else bytes of the installed release and 0."""
        if kept := self.kept().values():
            return max(each.size for each in kept), max(each.seconds for each in kept)
        pinned = (name for each in _installed(self.package) for name in _requirements(each))
        parts = (each for name in (self.package, *pinned) for each in _installed(name))
        return sum(file.size or 0 for each in parts for file in each.files or []), 0.0

    def free(self) -> int:
        """Bytes that are free where environments are made."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return shutil.disk_usage(there).free

    def _path(self, release: str) -> Path:
        return self.folder / f"{self.package}-{release}-{self._digest}"

    def _made(self, release: str) -> Environment:
        path, begin = self._path(release), time.perf_counter()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the folder {self.folder} of environments cannot be created: {error.strerror}") from error
        with only_writer(path, PATIENCE):
            if release in (kept := self.kept()):  # another search made it meanwhile
                return kept[release]
            try:
                python = self._install(path, release)
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
            size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_symlink())
            made = Environment(self.package, release, python, size, round(time.perf_counter() - begin, 1))
            write_atomically(path / _RECORD, json.dumps(asdict(made), indent=1) + "\n")
            return made

    def _install(self, path: Path, release: str) -> str:
        what = f"{self.package} {release}"
        try:
            venv.EnvBuilder(clear=True, symlinks=os.name != "nt").create(path)
        except (OSError, subprocess.SubprocessError) as error:
            raise UsageError(f"the environment of {what} cannot be made in {path}: {error}") from error
        python = str(path / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
        library = Path(_output([python, "-c", _LIBRARY], what).strip())
        # Behind its own packages; `addsitedir` also follows their editable installs.
        line = "import site; " + "; ".join(f"site.addsitedir({folder!r})" for folder in self._over)
        (library / "ampcheck_base.pth").write_text(line + "\n", encoding="utf-8")
        wanted = [f"{self.package}=={release}", *followers(self.package)]
        _output([*PIP, "--python", python, "install", "--quiet", *wanted], what)
        found = _output([python, "-c", _VERSION, self.package], what).strip()
        if Version(found).public != release:
            raise UsageError(f"{what} was installed, and {found} is imported: take its folder off PYTHONPATH")
        return python


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def published(package: str) -> list[str]:
    """The final releases that the package index has for this Python; empty where pip does not reach one."""
    done = _run([*PIP, "index", "versions", "--retries", "1", package])
    line = next((line for line in done.stdout.splitlines() if line.startswith("Available versions:")), "")
    return list(dict.fromkeys(Version(each).public for each in line.partition(":")[2].replace(",", " ").split()))


def followers(package: str) -> list[str]:
    """Installed packages that need one release of a package, such as torchvision: pip finds theirs for another."""
    return sorted(
        each.name for each in distributions() for wanted in _requirements(each) if wanted == canonicalize_name(package)
    )


def _installed(package: str) -> list[Distribution]:
    """The package as it is installed here, or nothing."""
    with suppress(PackageNotFoundError):
        return [distribution(package)]
    return []


def _requirements(of: Distribution) -> Iterator[str]:
    """The packages of which it needs exactly one release here."""
    for text in of.requires or []:
        with suppress(InvalidRequirement):
            wanted = Requirement(text)
            needed = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if needed and any(each.operator == "==" and "*" not in each.version for each in wanted.specifier):
                yield canonicalize_name(wanted.name)


def _output(command: list[str], what: str) -> str:
    done = _run(command)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        raise UsageError(f"{what} cannot be installed: {(errors or lines or ['pip gave no reason'])[-1]}")
    return done.stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False
        )
    except OSError as error:
        raise UsageError(f"{command[0]} could not be started: {error.strerror}") from error
