"""Whether an exception of a compiled or low-precision run speaks of this machine or of the model.

A missing compiler, a compiler that was killed, a broken file in a cache, a full disk, an instruction set that the CPU
lacks: none of these is a finding about the model. A model may raise the same words about its own files and batches, so
that first of all it is asked who raised. `ampcheck.autocast.missing.lacking` adds the kernels of an emulated device; it
is what every part asks.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path

import torch

from ampcheck.core.errors import brief, message_of
from ampcheck.torchtools.dynamo import cache_folder

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
    r"could not (?:create|execute|initialize) a (?:\w+ )?primitive|mkldnn_\w+: .*needs the cpu support", re.DOTALL
)
"""How oneDNN's messages, and those of PyTorch's `mkldnn_check_low_precision`, begin for an op and dtype for which this
CPU's instruction set has no kernel."""

_LIBRARY = sysconfig.get_path("stdlib")
_TORCH = os.path.dirname(torch.__file__)
_COMPILER = tuple(os.path.join(_TORCH, name) for name in ("_inductor", "_functorch", "_dynamo", "__init__.py"))
"""Code of `torch.compile`; it begins in `torch/__init__.py`."""


def machine_error(error: BaseException) -> str:
    """What this machine lacks, and what to do about it, where that is why the run raised; "" where the model is why."""
    if lacks_primitive(error):
        return f"oneDNN has no kernel on this CPU: {brief(error)}"
    if not _of_compiler(error):
        return ""  # what the model's own code says of its own files and batches
    cause = _innermost(error)
    said = f"{type(cause).__name__}: {message_of(cause)}"
    if found := _TOOLS.search(said):
        return f"nothing can be compiled: {_line(said, found)}"
    number = cause.errno if isinstance(cause, OSError) and _is_compilers(cause.filename) else None
    if number in _DISK_ERRORS or _DISK.search(said):
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
    if isinstance(cause, EOFError) or (found := _BROKEN.search(said)):
        return f"Inductor's cache holds a broken file ({_line(said, found)}): delete {cache_folder()}"
    if number in _FORBIDDEN:
        return (
            f"Inductor's cache cannot be used ({brief(cause)}): set TORCHINDUCTOR_CACHE_DIR to a folder that can "
            "be written"
        )
    if "CppCompileError" in said and (name := _broken_library()):
        return f"Inductor's cache holds a broken file ({name}): delete {cache_folder()}"
    return ""


def cannot_run(lack: str) -> str:
    """The reason of every check that is skipped since the machine lacks something; lack: what `machine_error` says."""
    return f"this machine cannot run it: {lack}"


def lacks_primitive(error: BaseException) -> bool:
    """Whether oneDNN refused an op in this dtype, which it does where the CPU lacks the instruction set for it.

    An op that has no 16-bit kernel in PyTorch's CPU backend at all ("not implemented for 'Half'") is another matter: it
    raises on every CPU, and the model's users meet it.
    """
    cause = _innermost(error)
    return isinstance(cause, RuntimeError) and _PRIMITIVE.match(message_of(cause)) is not None


def _innermost(error: BaseException) -> BaseException:
    """The exception that PyTorch's compiler wrapped into those of its own.

    What a model was handling when it raised (`__context__`), and what it names as the cause of its own exception, is
    not why the run ended.
    """
    seen: set[int] = set()
    while _is_compilers_type(error) and id(error) not in seen:
        seen.add(id(error))
        inner = getattr(error, "inner_exception", None)
        if not isinstance(inner, BaseException) and type(error).__module__ == "torch._dynamo.exc":
            inner = error.__cause__  # a CppCompileError says more than the failed process that is its cause
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def _of_compiler(error: BaseException) -> bool:
    """Whether the innermost exception was raised in the compiler's code, and not in the model's that it ran or traced.

    One without a traceback, as of another process, counts by the type of what wraps it.
    """
    cause = _innermost(error)
    kind = type(cause)
    if kind.__module__ == "torch._dynamo.exc" and kind.__name__ != "InternalTorchDynamoError":
        return False  # what Dynamo says of the code that it traces, whose exceptions it quotes
    names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(cause.__traceback__)]
    names = [name for name in names if not _is_helper(name)]
    if not names:
        return _is_compilers_type(cause) or type(error).__name__ in ("BackendCompilerFailed", "InductorError")
    return names[-1].startswith((*_COMPILER, *_triton_folders()))


def _is_compilers_type(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _is_helper(name: str) -> bool:
    """Whether a file is of the standard library, or of the package with which the compiler locks its files."""
    installed = f"{os.sep}site-packages{os.sep}"
    if installed in name:
        return f"{installed}filelock{os.sep}" in name
    return name.startswith(("<frozen", _LIBRARY + os.sep))


def _triton_folders() -> list[str]:
    return [folder + os.sep for folder in getattr(sys.modules.get("triton"), "__path__", ())]


def _is_compilers(filename: object) -> bool:
    """Whether a file lies where the compiler writes: in a cache, or in the folder for temporary files.

    Also true of a missing name, which errors of reading and writing do not have.
    """
    if filename is None:
        return True
    if not isinstance(filename, (str, bytes)):
        return False
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".triton")
    path = os.path.realpath(os.fsdecode(filename))
    folders = [os.path.realpath(folder) for folder in (cache_folder(), tempfile.gettempdir(), triton)]
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


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
