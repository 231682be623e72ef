"""A folder of files: on this machine, or at a URL that fsspec reaches, such as `s3://bucket/sweep`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ampcheck.core.errors import UsageError, brief
from ampcheck.core.files import locked, write_atomically

_PACKAGES = "s3fs for s3://, gcsfs for gs://, adlfs for az://"


class Folder:
    """The files of a folder, which is created for the first one; at a URL the folder must exist, if the store has any.

    path: where it is on this machine; None elsewhere. Raises `UsageError` for a path of another kind and for a URL that
    fsspec does not know.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        if not os.fspath(place).strip():
            raise UsageError("--results must name a folder or a URL; found an empty name")
        self._place, self._files, self._root = os.fspath(place), LocalFileSystem(), os.path.abspath(place)
        if "://" in self._place:
            try:
                self._files, self._root = url_to_fs(self._place)
            except (ImportError, ValueError, OSError) as error:
                text = f"--results takes a folder or a URL of fsspec ({_PACKAGES}): {brief(error)}"
                raise UsageError(text) from error
        self.path = Path(self._root) if isinstance(self._files, LocalFileSystem) else None
        if self.path is not None and os.path.isfile(self.path):  # of a name that is too long a Path raises
            raise UsageError(f"the results of a sweep need a folder; {self} is a file")

    def __str__(self) -> str:
        return self._place

    def read(self, name: str) -> bytes:
        """The content of a file. Raises what its file system raises."""
        content: bytes = self._files.cat_file(f"{self._root}/{name}")
        return content

    @contextmanager
    def only_sweep(self) -> Iterator[None]:
        """Be the only sweep that writes here. Raises `UsageError` where there is another; a URL has no locks."""
        if self.path is None:
            yield
            return
        self._create()
        try:
            stream = open(self.path / ".lock", "ab")  # noqa: SIM115  # it stays: removed, it would be locked twice
        except OSError as error:
            raise UsageError(f"the folder {self} of results cannot be written: {error.strerror}") from error
        with stream, locked(stream.fileno(), 0.0) as acquired:
            if acquired is False:
                raise UsageError(
                    f"another sweep writes its results to {self}: wait until it has ended, or name another --results"
                )
            yield

    def _create(self) -> None:
        """Make a folder of this machine, which is usually in a repository."""
        assert self.path is not None
        try:
            if not os.path.isdir(self.path):
                self.path.mkdir(parents=True)
                (self.path / ".gitignore").write_text("*\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the folder {self} of results cannot be created: {error.strerror}") from error

    def write(self, name: str, text: str) -> None:
        """Write a file, as a whole or not at all."""
        if self.path is None:
            path = f"{self._root}/{name}"
            part = f"{path}.{secrets.token_hex(4)}.part"  # a server of files may keep half of one that is sent
            try:
                self._files.pipe_file(part, text.encode())
                self._files.mv(part, path)
            except Exception as error:  # each file system has its own
                raise UsageError(f"--results {self} cannot be written: {brief(error)}") from error
            return
        self._create()
        write_atomically(self.path / name, text)
