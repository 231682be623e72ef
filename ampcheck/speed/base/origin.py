"""Where what was measured came from: a side that runs other code than its checkout's says nothing of the change."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ampcheck.core.errors import UsageError

_NAMED = 3
_OTHERS = frozenset(("third_party", "vendor", "vendored", "_vendor", "external", "extern", "submodules"))
"""Folders of code that is somebody else's: what is imported in its place may well be meant."""


def is_installed(place: Path, root: Path) -> bool:
    """Whether a path below `root` belongs to Python or to an environment, which may stand in the repository.

    Not by `sys.prefix`: a system's Python has /usr, and a repository may lie in /usr/src.
    """
    parts = place.relative_to(root).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    known = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    libraries = {Path(name).resolve() for name in known if name}
    return any(one.is_relative_to(root) and place.is_relative_to(one) for one in libraries)


def is_inside(origin: str, root: Path) -> bool:
    """Whether a module's file is one of the checkout's own."""
    if not os.path.isabs(origin):  # modules that PyTorch makes up, such as torch.ops
        return False
    path = Path(origin).resolve()
    return path.is_relative_to(root) and not is_installed(path, root)


def require_origin(target: str, root: Path, repository: Path) -> None:
    """Raise `UsageError` where the target, or anything of the repository, was imported from outside the checkout.

    A package that is installed in editable mode leads to the user's own checkout, and then the head would be compared
    with itself.
    """
    place = target.rpartition(":")[0]
    if not place.endswith(".py"):
        origin = getattr(sys.modules.get(place), "__file__", None)
        if origin is None or not is_inside(origin, root):
            raise UsageError(
                f"{place} must be imported from the checkout that is measured, and came from {origin or 'no file'}: "
                "put the folder that holds it on PYTHONPATH, or name a file of the repository, path/to/file.py:factory"
            )
    if root == repository:
        return
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if isinstance(origin, str) and name.partition(".")[0] != "ampcheck" and is_inside(origin, repository):
            raise UsageError(
                f"{name} must be imported from the checkout that is measured, and came from the working tree of the "
                f"head ({os.path.relpath(origin, repository)}): put the folder that holds it on PYTHONPATH"
            )


def loaded_modules(root: Path, names: Collection[str]) -> dict[str, str]:
    """Module to file: of this process what lies in the checkout, and what its top-level name is one of `names`."""
    found = {}
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if isinstance(origin, str) and (name.partition(".")[0] in names or is_inside(origin, root)):
            found[name] = origin
    return found


@dataclass(frozen=True, slots=True)
class Sources:
    """The Python files of a checkout, as git has them. tails: what an import may call them (`pack/inner.py`) to paths
    below the root."""

    tails: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Iterable[str]) -> Sources:
        """Of paths below the root of a checkout, `/` between their parts."""
        known = {name for name in files if name.endswith(".py")}
        tails: dict[str, tuple[str, ...]] = {}
        for name in sorted(known):
            parts = PurePosixPath(name).parts
            for number in range(len(parts)):
                # A folder in a package is no root of imports: pip/_vendor/six.py is never called `six`.
                if not number or "/".join((*parts[:number], "__init__.py")) not in known:
                    tail = "/".join(parts[number:])
                    tails[tail] = (*tails.get(tail, ()), name)
        return cls(tails)

    @property
    def names(self) -> list[str]:
        """Top-level names that an import of these files may have; ampcheck's own workers import it from elsewhere."""
        return sorted({tail.partition("/")[0].removesuffix(".py") for tail in self.tails} - {"ampcheck"})

    def strays(self, loaded: Mapping[str, str], root: Path, changed: Collection[str]) -> dict[str, str]:
        """Modules that were loaded from outside of the checkout though it holds their source: module to the path there.

        A name alone may be a coincidence, so that of a package half of what was loaded must be there, and a module
        without a package, or in somebody else's folder, must be one that `changed`.
        """
        packages: dict[str, dict[str, str]] = {}
        outside: dict[str, int] = {}
        for name, origin in loaded.items():
            top = name.partition(".")[0]
            if top == "ampcheck" or not origin.endswith(".py") or is_inside(origin, root):
                continue
            outside[top] = outside.get(top, 0) + 1
            if there := self._place(name, origin, changed):
                packages.setdefault(top, {})[name] = there
        found = {}
        for top, modules in packages.items():
            if 2 * len(modules) >= outside[top]:
                found.update(modules)
        return found

    def _place(self, name: str, origin: str, changed: Collection[str]) -> str:
        path = name.replace(".", "/")
        package = PurePosixPath(Path(origin).as_posix()).name == "__init__.py"
        there = self.tails.get(f"{path}/__init__.py" if package else f"{path}.py", ())
        likely = package or "." in name
        own = [one for one in there if one in changed or (likely and not _OTHERS.intersection(one.split("/")))]
        return next((one for one in own if one in changed), own[0] if own else "")


def told_strays(strays: Mapping[str, str], loaded: Mapping[str, str]) -> str:
    """One sentence on what came from elsewhere, and the folder that helps."""
    name, there = next(iter(sorted(strays.items())))
    more = f" and {len(strays) - 1} more of the repository's modules" if len(strays) > 1 else ""
    depth = name.count(".") + (2 if there.endswith("/__init__.py") else 1)
    folder = "/".join(there.split("/")[:-depth]) or "."
    return (
        f"{name}{more} must be imported from the checkout that is measured ({there}), and came from {loaded[name]}, "
        f"which is the same code on both sides: put the folder that holds it ({folder}) on PYTHONPATH"
    )


def own_files(loaded: Mapping[str, str], root: Path) -> set[str]:
    """Paths below the root of what was loaded from the checkout."""
    inside = (Path(origin).resolve() for origin in loaded.values() if is_inside(origin, root))
    return {path.relative_to(root).as_posix() for path in inside}


def told_idle(changed: Collection[str], loaded: Collection[str]) -> str:
    """What to say where nothing that differs was imported on either side; "" where something was."""
    if not changed or not set(changed).isdisjoint(loaded):
        return ""
    names = sorted(changed)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    files = "the file that differs" if len(names) == 1 else f"the {len(names)} files that differ"
    return f"neither side imported {files} ({', '.join(names[:_NAMED])}{more})"
