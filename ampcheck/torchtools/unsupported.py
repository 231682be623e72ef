"""Attributes an exception of a compiled or low-precision run to this machine or to the model.

A missing compiler, a compiler that was killed, a broken file in a cache, a full disk, an instruction set that the CPU
lacks: none of these is a finding about the model. A model may raise the same messages about its own files and batches,
so that the code that raised is checked first. `ampcheck.autocast.missing.lacking` adds the kernels of an emulated
device; checks call that.
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
from ampcheck.torchtools.private import MissingNameError

_CAUSES = (
    (
        r"InvalidCxxCompiler|No working C\+\+ compiler|TritonMissing|working triton installation|GPUTooOldForTriton"
        r"|too old to be supported by the triton|torch\.compile is not supported on|Dynamo is not supported on",
        "nothing can be compiled: {line}",
    ),
    (
        r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error"
        r"|\[(?:ENOSPC|EDQUOT|EROFS|EIO)\]$",
        "the compiler cannot write ({line}): free space in {cache} and in the folder for temporary files, or set "
        "TORCHINDUCTOR_CACHE_DIR to a folder that can be written",
    ),
    (
        r"Killed signal terminated|[Kk]illed \(program cc1plus\)|died with <Signals\.|virtual memory exhausted"
        r"|Cannot allocate memory|out of memory allocating|BrokenProcessPool|terminated abruptly"
        r"|collect2: fatal error: ld terminated with signal|internal compiler error: (?:Killed|Segmentation|Bus)",
        "the compiler was killed, mostly because it ran out of memory ({line}): set TORCHINDUCTOR_COMPILE_THREADS=1",
    ),
    (
        r"(?i:file lock .* could not be acquired)",
        "another process keeps a lock on the cache ({line}): delete {cache}",
    ),
    (
        r"fatal error: \S+: No such file|cannot find -l\w+|cannot execute .*cc1plus|cannot find crt",
        "the C++ compiler is incomplete: {line}",
    ),
    (
        r"\AEOFError|file too short|invalid ELF header|cannot read file data|cannot open shared object file"
        r"|ELF load command|ELF file's phentsize|slice is not valid mach-o|pickle data was truncated|UnpicklingError"
        r"|Ran out of input|not a valid Win32 application",
        "Inductor's cache holds a broken file ({line}): delete {cache}",
    ),
    (
        r"\[(?:EACCES|EPERM|EEXIST|ENOTDIR)\]$",
        "Inductor's cache cannot be used ({error}): set TORCHINDUCTOR_CACHE_DIR to a folder that can be written",
    ),
)
"""Patterns of messages of PyTorch, compilers and loaders, behind which is the name of the error number of a file that
is the compiler's; the cause and what to do about it."""

_PRIMITIVE = re.compile(
    r"could not (?:create|execute|initialize) a (?:\w+ )?primitive|mkldnn_\w+: .*needs the cpu support", re.DOTALL
)
"""Messages of oneDNN and of PyTorch's `mkldnn_check_low_precision` for an op and dtype without a kernel on this CPU."""

_LIBRARY = sysconfig.get_path("stdlib")
_TORCH = os.path.dirname(torch.__file__)
_COMPILER = tuple(os.path.join(_TORCH, name) for name in ("_inductor", "_functorch", "_dynamo", "__init__.py"))
"""Code of `torch.compile`; it begins in `torch/__init__.py`."""


def machine_error(error: BaseException) -> str:
    """Return what this machine lacks, and what to do about it, where that is why the run raised; "" where the model is
    why."""
    if isinstance(error, MissingNameError):
        return str(error)
    cause = _innermost(error)
    message = message_of(cause)
    # "not implemented for 'Half'" is no such refusal: it is raised on every CPU, also on those of the model's users.
    if isinstance(cause, RuntimeError) and _PRIMITIVE.match(message):
        return f"oneDNN has no kernel on this CPU: {brief(error)}"
    if not _of_compiler(error):
        return ""  # the model's own code, about its own files and batches
    text, cache = f"{type(cause).__name__}: {message}", cache_folder()
    number = cause.errno if isinstance(cause, OSError) and _is_compilers(cause.filename) else None
    tag = f" [{errno.errorcode.get(number or 0)}]"
    for pattern, meaning in _CAUSES:
        if match := re.search(pattern, text + tag):
            return meaning.format(line=_line(text, match), cache=cache, error=brief(cause))
    if "CppCompileError" in text and (name := _broken_library()):
        return f"Inductor's cache holds a broken file ({name}): delete {cache}"
    return ""


def _innermost(error: BaseException) -> BaseException:
    """The exception that PyTorch's compiler wrapped into its own.

    An exception that a model was handling when it raised (`__context__`), or names as the cause, did not end the run.
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
    """Return whether the innermost exception was raised in the compiler's code, and not in the model's that it ran or
    traced.

    One without a traceback, as of another process, counts by the type of what wraps it.
    """
    cause = _innermost(error)
    kind = type(cause)
    if kind.__module__ == "torch._dynamo.exc" and kind.__name__ != "InternalTorchDynamoError":
        return False  # about the code that Dynamo traces, whose exceptions it quotes
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(cause.__traceback__))
    names = [name for name in files if not _is_helper(name)]
    if not names:
        return _is_compilers_type(cause) or type(error).__name__ in ("BackendCompilerFailed", "InductorError")
    triton = (folder + os.sep for folder in getattr(sys.modules.get("triton"), "__path__", ()))
    return names[-1].startswith((*_COMPILER, *triton))


def _is_compilers_type(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _is_helper(name: str) -> bool:
    """Return whether a file is of the standard library, or of the package with which the compiler locks its files."""
    installed = f"{os.sep}site-packages{os.sep}"
    if installed in name:
        return f"{installed}filelock{os.sep}" in name
    return name.startswith(("<frozen", _LIBRARY + os.sep))


def _is_compilers(filename: object) -> bool:
    """Return whether a file is in a cache or in the folder for temporary files, or unknown (errors of reading and
    writing)."""
    if filename is None:
        return True
    if not isinstance(filename, (str, bytes)):
        return False
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".triton")
    path = os.path.realpath(os.fsdecode(filename))
    folders = [os.path.realpath(folder) for folder in (cache_folder(), tempfile.gettempdir(), triton)]
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _line(text: str, match: re.Match[str]) -> str:
    """The line of a match, without the folders of paths in it."""
    line = (text[: match.end()].rpartition("\n")[2] + text[match.end() :].partition("\n")[0]).strip()
    return re.sub(r"(?:/[^/\s:]+)+/([^/\s:]+)", r"\1", line)[:200]


def _broken_library() -> str:
    """The name of a file in Inductor's cache that is no library, "" without one.

    A broken library with which vector instructions are probed makes the compiler write code that does not compile.
    """
    try:
        for path in Path(cache_folder()).rglob("*.so"):
            with path.open("rb") as file:
                if file.read(4) not in (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"):
                    return path.name
    except OSError:
        pass
    return ""
