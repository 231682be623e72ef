"""The commands of a process of a sweep: the members of a collection; the audit of one target, or its compilation."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.core.settings import Target
from ampcheck.core.subject import load_attribute, load_collection
from ampcheck.target import audit_target, load_placed


def members(collection: str) -> list[tuple[str, str]]:
    """The names of a collection and their families: by name, {"family": ...} in a mapping `META` beside it."""
    names = load_collection(collection)
    meta = None
    with suppress(UsageError):
        meta = load_attribute(f"{collection.rpartition(':')[0]}:META")
    return [(name, _family(meta, name)) for name in names]


def audit(target: Mapping[str, Any], scratch: str) -> tuple[Run | None, str]:
    """The run of a target; or None and the traceback of a defect of ampcheck. scratch: for temporary files."""
    return _guarded(audit_target, target, scratch)


def compilation(target: Mapping[str, Any], scratch: str) -> tuple[Run | None, str]:
    """The same of what compilation and autocast are worth."""
    from ampcheck.speed.gains.measure import measure_compilation

    def measured(asked: Target) -> Run:
        device = asked.device or "cpu"
        subject = load_placed(asked.target, device, arguments=asked.arguments)
        return measure_compilation(subject, asked.target, device)

    return _guarded(measured, target, scratch)


def _family(meta: object, name: str) -> str:
    entry = meta.get(name) if isinstance(meta, Mapping) else None
    family = entry.get("family") if isinstance(entry, Mapping) else None
    return family if isinstance(family, str) else ""


def _guarded(judge: Callable[[Target], Run | None], target: Mapping[str, Any], scratch: str) -> tuple[Run | None, str]:
    warnings.simplefilter("ignore")  # of the packages of a hundred models
    try:
        _use_scratch(scratch)
        return judge(Target(**target)), ""
    except UsageError:
        raise
    except Exception:  # noqa: BLE001  # a crash of ampcheck must not end the sweep
        return None, traceback.format_exc()


def _use_scratch(folder: str) -> None:
    """Put temporary files of this process and its children into a folder that outlives them, to be removed."""
    from ampcheck.torchtools.dynamo import cache_folder, default_cache_folder

    cache_folder()  # Inductor's cache, which targets share, stays where it is: torch notes its place
    shared = Path(default_cache_folder())  # with precompiled headers, even where the cache has another place
    with suppress(OSError):  # without it, headers are compiled for each target
        shared.mkdir(parents=True, exist_ok=True)
        Path(folder, shared.name).symlink_to(shared, target_is_directory=True)
    os.environ.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder))
    tempfile.tempdir = None  # the next call reads these variables
