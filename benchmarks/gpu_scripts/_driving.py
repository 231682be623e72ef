"""What the drivers share: a public script runs as `python SCRIPT ARGUMENTS` would run it, in its own folder, on random
data of the shape that it reads. The working directory is the folder of the script in a copy of its repository."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def run_script(path: str, *arguments: str) -> dict[str, Any]:
    """Run a script as `__main__` with these arguments; its names at the end."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    return runpy.run_path(str(Path(path).resolve()), run_name="__main__")


def run_with_constants(path: str, constants: Mapping[str, object]) -> None:
    """Run a script that takes no arguments, with other values of constants that it assigns at its top level.

    Its lines stay where they are.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for name, value in constants.items():
        (number,) = [number for number, line in enumerate(lines) if line.startswith(f"{name} = ")]
        lines[number] = f"{name} = {value!r}"
    file = str(Path(path).resolve())
    sys.path.insert(0, str(Path(file).parent))
    exec(compile("\n".join(lines), file, "exec"), {"__name__": "__main__", "__file__": file})


def write_images(
    folder: str, count: int, size: int, *, suffix: str = ".png", high: int = 256, channels: int = 3
) -> None:
    """Random images: `count` of `size` by `size` pixels, values below `high`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(len(folder))
    for number in range(count):
        shape = (size, size, channels) if channels > 1 else (size, size)
        Image.fromarray(random.integers(0, high, shape, dtype=np.uint8)).save(Path(folder, f"{number}{suffix}"))


def write_classes(folder: str, *, classes: int = 2, count: int = 8, size: int = 64) -> None:
    """Random images, `count` of each class in a folder of its own."""
    for number in range(classes):
        write_images(f"{folder}/class_{number}", count, size, suffix=".jpeg")
