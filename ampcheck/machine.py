"""Whether an exception of a compiled or low-precision run speaks of this machine or of the model.

A missing compiler, a compiler that was killed, a broken file in a cache, a full disk, an instruction set that the CPU
lacks: none of these is a finding about the model. Every part that runs compiled code asks `machine_error`.
"""

from __future__ import annotations

import errno
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from ampcheck.compiler import cache_folder
from ampcheck.errors import brief, message_of

_TOOLS = re.compile(
    r"InvalidCxxCompiler|No working C\+\+ compiler|TritonMissing|working triton installation|GPUTooOldForTriton"
    r"|too old to be supported by the triton|torch\.compile is not supported on|Dynamo is not supported on"
)
"""What PyTorch says of a compiler, a Triton, a GPU or a Python that cannot compile."""

_FILES = re.compile(r"fatal error: \S+: No such file|cannot find -l\w+|cannot execute .*cc1plus|cannot find crt")
"""What a C++ compiler says of headers, libraries and parts of its own that are not installed."""

_BROKEN = re.compile(
    r"file too short|invalid ELF header|cannot read file data|cannot open shared object file|ELF load command"
    r"|ELF file's phentsize|slice is not valid mach-o|pickle data was truncated|UnpicklingError|Ran out of input"
    r"|not a valid Win32 application"
)
"""What loaders say of a file that was written in part."""

_DISK = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error")
_DISK_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))
_FORBIDDEN = frozenset((errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR))

_KILLED = re.compile(
    r"Killed signal terminated|[Kk]illed \(program cc1plus\)|died with <Signals\.|virtual memory exhausted"
    r"|Cannot allocate memory|out of memory allocating|BrokenProcessPool|terminated abruptly|collect2: fatal error: ld"
    r" terminated with signal|internal compiler error: (?:Killed|Segmentation|Bus)"
)
_LOCKED = re.compile(r"file lock .* could not be acquired", re.IGNORECASE)

_PRIMITIVE = re.compile(
    r"could not create a primitive|could not execute a primitive|could not initialize.*primitive"
    r"|needs the cpu support|path needs the cpu"
)
"""What oneDNN says of an op and dtype for which this CPU's instruction set has no kernel."""

_LIBRARY = sysconfig.get_path("stdlib")
_COMPILER = re.compile(r"[/\\]torch[/\\](?:_inductor|_functorch|_dynamo)[/\\]|[/\\]triton[/\\]")


def machine_error(error: BaseException) -> str:
    """What this machine lacks, and what to do about it, where that is why the run raised; "" where the model is why."""
    chain = list(_chain(error))
    said = "\n".join(f"{type(one).__name__}: {message_of(one)}" for one in chain)
    if lacks_primitive(error):
        return f"oneDNN has no kernel on this CPU: {brief(error)}"
    if found := _TOOLS.search(said):
        return f"nothing can be compiled: {_line(said, found)}"
    if not any(_of_compiler(one) for one in chain):
        return ""  # what the model's own code says of its own files
    disk = any(isinstance(one, OSError) and one.errno in _DISK_ERRORS for one in chain)
    if disk or _DISK.search(said):
        return (
            f"the compiler cannot write ({_line(said, _DISK.search(said))}): free space in {cache_folder()} and in the "
            "folder for temporary files, or set TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        )
    if found := _KILLED.search(said):
        return (
            f"the compiler was killed, mostly for want of memory ({_line(said, found)}): "
            "set TORCHINDUCTOR_COMPILE_THREADS=1"
        )
    if found := _LOCKED.search(said):
        return f"another process keeps a lock on the cache ({_line(said, found)}): delete {cache_folder()}"
    if found := _FILES.search(said):
        return f"the C++ compiler is incomplete: {_line(said, found)}"
    if any(isinstance(one, EOFError) for one in chain) or (found := _BROKEN.search(said)):
        return f"Inductor's cache holds a broken file ({_line(said, found)}): delete {cache_folder()}"
    if any(isinstance(one, OSError) and one.errno in _FORBIDDEN for one in chain):
        return (
            f"Inductor's cache cannot be used ({brief(chain[-1])}): set TORCHINDUCTOR_CACHE_DIR to a folder that can "
            "be written"
        )
    if "CppCompileError" in said and (name := _broken_library()):
        return f"Inductor's cache holds a broken file ({name}): delete {cache_folder()}"
    return ""


def lacks_primitive(error: BaseException) -> bool:
    """Whether oneDNN refused an op in this dtype, which it does where the CPU lacks the instruction set for it.

    An op that has no 16-bit kernel in PyTorch's CPU backend at all ("not implemented for 'Half'") is another matter: it
    raises on every CPU, and the model's users meet it.
    """
    return any(
        isinstance(one, RuntimeError) and _PRIMITIVE.search(message_of(one)) is not None for one in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception with those that it wraps, from outside in."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "inner_exception", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__


def _of_compiler(error: BaseException) -> bool:
    """Whether an exception is one of the compiler's, or was raised in its code."""
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")):
        return True
    raised_in = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not name.startswith("<frozen") and not (name.startswith(_LIBRARY) and "site-packages" not in name):
            raised_in = name
    return _COMPILER.search(raised_in) is not None


def _line(said: str, found: re.Match[str] | None) -> str:
    """The line in which something was found, without the folders of a machine's paths in it."""
    if found is None:
        return said.strip().partition("\n")[0]
    start = said.rfind("\n", 0, found.start()) + 1
    line = said[start : said.find("\n", found.end()) if "\n" in said[found.end() :] else len(said)].strip()
    return re.sub(r"(?:/[^/\s:]+)+/([^/\s:]+)", r"\1", line)[:200]


def _broken_library() -> str:
    """The name of a library in Inductor's cache that is none, "" without one.

    One of those with which the vector instructions are probed makes the compiler write code that does not compile.
    """
    try:
        for path in Path(cache_folder()).rglob("*.so"):
            with path.open("rb") as file:
                if file.read(4) not in (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"):
                    return path.name
    except OSError:
        pass
    return ""
