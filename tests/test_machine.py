"""What is this machine's fault is told apart from what is the model's."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from ampcheck import compiler
from ampcheck.audit import audit
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.machine import machine_error
from ampcheck.numerics.measure import missing_tool
from ampcheck.record import Finding, Run, Verdict
from ampcheck.subject import Subject


def of_inductor(inner: Exception) -> Exception:
    """An exception as Dynamo hands on those of its backend."""
    return BackendCompilerFailed(torch.compile, inner, None)


def compile_error(said: str) -> Exception:
    return of_inductor(CppCompileError(["g++", "main.cpp"], said))


MACHINE = [
    (of_inductor(ImportError("/tmp/x/cabc.main.so: file too short")), "broken file"),
    (of_inductor(ImportError("/tmp/x/cabc.main.so: invalid ELF header")), "broken file"),
    (of_inductor(ImportError("/tmp/x/cabc.main.so: cannot read file data")), "broken file"),
    (of_inductor(OSError("cabc.so: cannot open shared object file: No such file or directory")), "broken file"),
    (of_inductor(EOFError("Ran out of input")), "broken file"),
    (of_inductor(pickle.UnpicklingError("pickle data was truncated")), "broken file"),
    (of_inductor(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), "free space"),
    (of_inductor(OSError(errno.EROFS, os.strerror(errno.EROFS))), "free space"),
    (of_inductor(PermissionError(errno.EACCES, os.strerror(errno.EACCES))), "TORCHINDUCTOR_CACHE_DIR"),
    (compile_error("fatal error: error writing to /tmp/c.s: No space left on device"), "free space"),
    (compile_error("g++: fatal error: Killed signal terminated program cc1plus"), "killed"),
    (compile_error("virtual memory exhausted: Cannot allocate memory"), "killed"),
    (compile_error("c.main.cpp:1:10: fatal error: Python.h: No such file or directory"), "incomplete"),
    (compile_error("/usr/bin/ld: cannot find -lgomp: No such file"), "incomplete"),
    (of_inductor(InvalidCxxCompiler()), "nothing can be compiled"),
    (of_inductor(RuntimeError("The file lock 'x.lock' could not be acquired.")), "lock"),
    (RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive"), "oneDNN"),
    (RuntimeError("could not create a primitive"), "oneDNN"),
]
MODEL = [
    RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),  # of a file that the model itself writes
    EOFError("Ran out of input"),
    ImportError("libmine.so: file too short"),
    compile_error("c.main.cpp:3:7: error: expected ';' before 'auto'"),
    of_inductor(AssertionError("unexpected stride")),
]


@pytest.mark.parametrize(("error", "why"), MACHINE, ids=lambda one: str(one)[:40])
def test_what_the_machine_lacks_is_told_with_what_to_do(error: Exception, why: str) -> None:
    assert why in machine_error(error)
    assert missing_tool(error) == machine_error(error)


@pytest.mark.parametrize("error", MODEL, ids=lambda one: str(one)[:40])
def test_what_the_model_raises_stays_the_models(error: Exception, tmp_path: Path) -> None:
    with compiler.own_caches(str(tmp_path)):
        assert machine_error(error) == ""


def test_a_model_that_reads_a_broken_file_of_its_own_is_not_excused(tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(b"")

    @torch.compiler.disable
    def table(x: torch.Tensor) -> torch.Tensor:
        with (tmp_path / "table").open("rb") as file:
            return x * pickle.load(file)

    with pytest.raises(EOFError) as raised:
        torch.compile(lambda x: table(x + 1), backend="eager")(torch.ones(2))
    torch.compiler.reset()
    assert machine_error(raised.value) == ""


def test_a_library_that_is_none_explains_code_that_does_not_compile(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "cab.so").touch()
    with compiler.own_caches(str(tmp_path)):
        assert "broken file (cab.so)" in machine_error(compile_error("error: 'at::vec' has not been declared"))


def test_no_path_of_the_machine_stands_in_the_reason_but_the_folder_to_clear(tmp_path: Path) -> None:
    error = of_inductor(ImportError("/home/somebody/cache/hb/chb.main.so: file too short"))
    with compiler.own_caches(str(tmp_path)):
        assert "/home/somebody" not in machine_error(error)
        assert str(tmp_path) in machine_error(error)


@pytest.mark.parametrize(
    "judge",
    [
        lambda subject, backend: judge_accuracy(subject, options={"backend": backend}),
        lambda subject, backend: judge_graph(Subject(subject), backend=backend),
        lambda subject, backend: judge_graph(Subject((torch.compile(subject[0], backend=backend), subject[1]))),
    ],
    ids=["assert_compiled", "assert_graph", "compiled already"],
)
def test_a_broken_file_in_the_cache_is_a_skip_wherever_code_is_compiled(judge: Callable[..., Run]) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        raise ImportError("chb.main.so: file too short")

    run = judge((lambda x: x.sin() + 1, [(torch.randn(4),)]), backend)
    said = {f.check: (f.verdict, f.message) for f in run.findings}
    assert said["compiled-exception"][0] is Verdict.SKIP
    assert "broken file (ImportError: chb.main.so: file too short): delete" in said["compiled-exception"][1]
    assert not run.failed


def test_an_op_for_which_this_cpu_has_no_kernel_is_a_skip_with_its_name_and_one_that_pytorch_lacks_a_failure() -> None:
    def run(said: str) -> Finding:
        class Raises(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = x @ x
                if y.dtype is torch.bfloat16:
                    raise RuntimeError(said)
                return y

        found = audit((Raises(), (torch.randn(4, 4),)), dtype="bfloat16", compile=False).findings
        return next(f for f in found if f.check == "low-precision-error")

    lacking = run("could not create a primitive descriptor for the LSTM forward propagation primitive")
    assert lacking.verdict is Verdict.SKIP
    assert "LSTM forward propagation" in lacking.message
    assert "bfloat16" in lacking.subject
    assert run("\"erfinv_cpu\" not implemented for 'BFloat16'").verdict is Verdict.FAIL
