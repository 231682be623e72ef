"""What is this machine's fault is told apart from what is the model's."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.codecache import DLLWrapper
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from ampcheck.audit import audit
from ampcheck.autocast.emulate import emulate
from ampcheck.autocast.missing import lacking
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.compiled.graph.judge import judge_graph
from ampcheck.compiled.options import CompileOptions
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.torchtools import dynamo
from ampcheck.torchtools.unsupported import machine_error


def of_inductor(inner: Exception) -> Exception:
    """An exception as Dynamo hands on those of its backend."""
    frame = (None,) * (BackendCompilerFailed.__init__.__code__.co_argcount - 3)  # PyTorch 2.7 and later
    return BackendCompilerFailed(torch.compile, inner, *frame)


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
    (of_inductor(RuntimeError("could not create a primitive")), "oneDNN"),
    (RuntimeError("could not execute a primitive"), "oneDNN"),
    (RuntimeError("mkldnn_linear: fp16 path needs the cpu support avx_ne_convert or avx512_fp16"), "oneDNN"),
    (RuntimeError("mkldnn_matmul: mkldnn_matmul bf16 path needs the cpu support avx512bw, avx512vl"), "oneDNN"),
]
MODEL = [
    RuntimeError("the fused path needs the cpu extension; got bf16"),
    RuntimeError("my kernel needs the cpu support of AMX"),
    RuntimeError("the cache could not create a primitive type"),
    RuntimeError("torch.compile is not supported on batches of odd size"),
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
    assert lacking(error) == machine_error(error)


@pytest.mark.parametrize("error", MODEL, ids=lambda one: str(one)[:40])
def test_what_the_model_raises_stays_the_models(error: Exception, tmp_path: Path) -> None:
    with dynamo.own_caches(str(tmp_path)):
        assert machine_error(error) == ""


def raised_by(function: Callable[..., object], *args: object) -> BaseException:
    try:
        function(*args)
    except BaseException as error:  # noqa: BLE001  # of any kind, as the model's own
        return error
    finally:
        torch.compiler.reset()
    raise AssertionError("nothing was raised")


def raises_in(file: str, error: BaseException) -> BaseException:
    """The error, raised by code of a file of PyTorch's."""
    path = Path(torch.__file__).parent / file
    namespace: dict[str, Callable[[], object]] = {}
    exec(compile("def run(error):\n    raise error", str(path), "exec"), namespace)
    return raised_by(namespace["run"], error)


OWN: dict[str, Callable[[], object]] = {
    "a broken file that it reads": lambda: pickle.loads(b""),
    "a lock of its own": lambda: os.open("/", os.O_CREAT | os.O_EXCL),
    "a full disk": lambda: raises(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "the words of a full disk": lambda: raises(RuntimeError("No space left on device")),
    "the words of PyTorch": lambda: raises(RuntimeError("torch.compile is not supported on batches of odd size")),
    "the words of a library": lambda: raises(ImportError("libmine.so: file too short")),
}


def raises(error: BaseException) -> object:
    raise error


@pytest.fixture(params=OWN)
def own(request: pytest.FixtureRequest) -> Callable[[], object]:
    return OWN[request.param]


def test_what_a_part_that_is_not_compiled_raises_is_the_models(own: Callable[[], object]) -> None:
    @torch.compiler.disable
    def part(x: torch.Tensor) -> torch.Tensor:
        own()
        return x

    error = raised_by(torch.compile(lambda x: part(x + 1), backend="eager"), torch.ones(2))
    assert machine_error(error) == ""


@pytest.mark.parametrize("good", [0, 1], ids=["while Dynamo traces", "while the backend traces"])
def test_what_the_shape_function_of_an_op_raises_is_the_models(own: Callable[[], object], good: int) -> None:
    calls = []

    def shape(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) > good:
            own()
        return torch.empty_like(x)

    with torch.library._scoped_library("ampcheck_tests_machine", "FRAGMENT") as library:
        library.define("lut(Tensor x) -> Tensor")
        library.impl("lut", torch.clone, "CPU")
        torch.library.register_fake("ampcheck_tests_machine::lut", shape, lib=library)
        op = torch.ops.ampcheck_tests_machine.lut.default
        error = raised_by(torch.compile(lambda x: op(x) + 1, backend="aot_eager"), torch.ones(2))
    assert machine_error(error) == ""


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_traced_code_raises_is_the_models(fullgraph: bool) -> None:
    def full(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 2:
            raise OSError(28, "No space left on device")
        return x

    error = raised_by(torch.compile(full, fullgraph=fullgraph, backend="eager"), torch.ones(2))
    assert machine_error(error) == ""


def test_what_a_models_own_fallback_raises_is_the_models_whatever_it_had_caught() -> None:
    def fallback(error: BaseException, named: bool) -> object:
        try:
            raise error
        except RuntimeError as caught:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied") from caught if named else None

    def unnamed(error: BaseException) -> object:
        try:
            raise error
        except RuntimeError:
            return torch.ones(2, 3) @ torch.ones(2, 3)

    refused = RuntimeError("could not create a primitive descriptor for the matmul primitive")
    for error in (
        raised_by(fallback, refused, True),
        raised_by(unnamed, refused),
        raised_by(unnamed, compile_error("x")),
    ):
        assert lacking(error) == ""


@pytest.mark.parametrize(
    ("file", "error", "why"),
    [
        ("_inductor/codecache.py", EOFError("Ran out of input"), "broken file"),
        ("_inductor/codecache.py", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "free space"),
        ("_inductor/runtime/runtime_utils.py", FileExistsError(errno.EEXIST, "File exists", "{cache}/ab"), "CACHE_DIR"),
        ("_inductor/codecache.py", FileExistsError(errno.EEXIST, "File exists", "/data/lut.lock"), ""),
        ("_inductor/codecache.py", OSError(errno.EROFS, "Read-only", "/data/lut.lock"), ""),
        ("__init__.py", RuntimeError("torch.compile is not supported on Python 3.15+"), "nothing can be compiled"),
        ("_dynamo/eval_frame.py", RuntimeError("Dynamo is not supported on Python 3.15+"), "nothing can be compiled"),
        ("nn/modules/module.py", EOFError("Ran out of input"), ""),
    ],
    ids=lambda one: str(one)[:30],
)
def test_what_the_compiler_raises_is_the_machines_and_of_files_only_its_own(
    file: str, error: BaseException, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    with dynamo.own_caches(str(tmp_path)):
        if isinstance(error, OSError) and error.filename:
            error.filename = error.filename.format(cache=tmp_path)
        found = machine_error(raises_in(file, error))
        assert why in found
        assert bool(found) is bool(why)


def test_a_kernel_that_the_emulated_device_has_is_lacking_and_one_that_no_device_has_is_not() -> None:
    def refused(name: str) -> RuntimeError:
        return RuntimeError(f"\"{name}\" not implemented for 'Half'")

    assert lacking(refused("weight_sqrt_relu_cpu")) == ""
    assert "weight_sqrt_relu_cpu" in lacking(refused("weight_sqrt_relu_cpu"), kernels=True)
    with emulate("cuda"):
        assert "weight_sqrt_relu_cpu" in lacking(refused("weight_sqrt_relu_cpu"))
        assert lacking(refused("cholesky_cpu")) == ""
        assert lacking(refused("lu_factor_cpu")) == ""


def test_a_library_that_is_none_explains_code_that_does_not_compile(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "cab.so").touch()
    with dynamo.own_caches(str(tmp_path)):
        assert "broken file (cab.so)" in machine_error(compile_error("error: 'at::vec' has not been declared"))


def test_an_error_of_the_c_compiler_is_read_and_not_the_exit_code_that_caused_it() -> None:
    def failed(error: Exception) -> None:
        raise error from subprocess.CalledProcessError(1, ["g++"])

    inner = raised_by(failed, CppCompileError(["g++"], "c.cpp:1:10: fatal error: Python.h: No such file or directory"))
    assert isinstance(inner, Exception)
    assert "incomplete" in machine_error(of_inductor(inner.with_traceback(None)))


LAUNCH = """
import torch
from ampcheck.autocast.missing import lacking
try:
    torch.compile(lambda x: (x.sin() + 1).sum())(torch.randn(100))
except Exception as error:
    print("lacking:", lacking(error))
else:
    print("ran")
"""


def test_a_real_failure_to_compile_is_the_machines(tmp_path: Path) -> None:
    def launch(**settings: str) -> str:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), **settings}
        return subprocess.run(
            [sys.executable, "-c", LAUNCH], env=environment, capture_output=True, text=True, check=True
        ).stdout

    (tmp_path / "file").touch()
    assert "cannot be used" in launch(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "file"))
    assert "nothing can be compiled" in launch(CXX=str(tmp_path / "no compiler"))
    if launch() == "ran\n":
        for library in (tmp_path / "cache").rglob("*.so"):
            library.write_bytes(b"")
        assert "broken file" in launch()


def test_no_path_of_the_machine_stands_in_the_reason_but_the_folder_to_clear(tmp_path: Path) -> None:
    error = of_inductor(ImportError("/home/somebody/cache/hb/chb.main.so: file too short"))
    with dynamo.own_caches(str(tmp_path)):
        assert "/home/somebody" not in machine_error(error)
        assert str(tmp_path) in machine_error(error)


@pytest.mark.parametrize(
    "judge",
    [
        lambda subject, backend: judge_accuracy(Plan.of(subject), options=CompileOptions(backend)),
        lambda subject, backend: judge_graph(Subject(subject), options=CompileOptions(backend)),
        lambda subject, backend: judge_graph(Subject((torch.compile(subject[0], backend=backend), subject[1]))),
    ],
    ids=["accuracy", "graphs", "compiled already"],
)
def test_a_broken_file_in_the_cache_is_a_skip_wherever_code_is_compiled(
    judge: Callable[..., Run], tmp_path: Path
) -> None:
    (library := tmp_path / "chb.main.so").touch()

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        return DLLWrapper(str(library))

    run = judge((lambda x: x.sin() + 1, [(torch.randn(4),)]), backend)
    said = {f.check: (f.verdict, f.message) for f in run.findings}
    assert said["compiled-exception"][0] is Verdict.SKIP
    assert "broken file (OSError: chb.main.so: file too short): delete" in said["compiled-exception"][1]
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
