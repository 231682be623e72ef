"""PyTorch's compiler as this house sees it: the one file that touches what is private in Dynamo, AOTAutograd, Inductor.

Everything private is named here and nowhere else, imported when it is used, and tested by
tests/torchtools/test_dynamo.py. `unsupported()` reports a release in which a name is missing or takes other arguments;
callers then skip with that reason.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import fx

from ampcheck.core.errors import UsageError

Runnable: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Compiled code of one graph: takes its inputs as a list, which it empties, and gives its outputs."""

FORWARD, BACKWARD, INFERENCE = "forward", "backward", "inference"


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """One functional ATen graph on its way into Inductor, after AOTAutograd, joint passes and partitioning.

    phase: `forward`, `backward` or `inference` (a forward that saves nothing). key: shared by a forward graph and its
    backward. sources: what each input is in the user's frame, `L['self'].blocks.0.up.weight`; "" where that is unknown.
    saved: positions of the outputs that are kept for backward; donated: of the inputs whose memory the graph may reuse.
    """

    module: fx.GraphModule
    phase: str
    key: int
    sources: tuple[str, ...]
    saved: tuple[int, ...]
    donated: frozenset[int]
    _lower: Callable[[fx.GraphModule], Runnable]

    def compiled(self) -> Runnable:
        """The graph as PyTorch would have compiled it. To be called once, after any `variant`."""
        return self._lower(self.module)

    def copied(self) -> fx.GraphModule:
        """The graph again, to be changed; tensors that it holds are shared."""
        held = [getattr(self.module, str(n.target), None) for n in self.module.graph.nodes if n.op == "get_attr"]
        if any(isinstance(one, fx.GraphModule) for one in held):  # Inductor's passes change branches and regions
            return copy.deepcopy(self.module)
        twin = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        twin.meta.update(self.module.meta)
        _output(twin).meta.update(_output(self.module).meta)
        return twin

    def variant(self, module: fx.GraphModule) -> tuple[Runnable, tuple[Any, ...]]:
        """A changed copy, compiled beside the graph itself so that it leaves donated inputs as they are; and the
        strides of its outputs, as Inductor tells them."""
        from torch._guards import TracingContext

        with _donating([]), TracingContext.report_output_strides() as strides:
            run = self._lower(module)
        return run, tuple(strides or ())

    def later(self, module: fx.GraphModule) -> Callable[[], Runnable]:
        """A changed copy that is compiled only when it is asked for, with the options that hold now."""
        from torch._guards import CompileContext, TracingContext, compile_context, tracing
        from torch._inductor import config

        traced, compiled, options = TracingContext.try_get(), CompileContext.try_get(), config.get_config_copy()

        def make() -> Runnable:
            with tracing(traced), compile_context(compiled), config.patch(options):
                return self.variant(module)[0]

        return make

    def strides(self) -> tuple[Any, ...]:
        """The strides of the graph's own outputs, once it is `compiled`."""
        from torch._guards import TracingContext

        context = TracingContext.try_get()
        return tuple((context.output_strides if context is not None else None) or ())


@contextmanager
def _donating(places: list[int]) -> Iterator[list[int]]:
    """Donate only these inputs of a backward graph inside; gives what was donated. `bw_donated_idxs` (2.6)."""
    from torch._guards import TracingContext

    metadata: Any = getattr(TracingContext.try_get(), "fw_metadata", None)
    before = getattr(metadata, "bw_donated_idxs", None)
    if before:
        metadata.bw_donated_idxs = places
    try:
        yield before or []
    finally:
        if before:
            metadata.bw_donated_idxs = before


Handler: TypeAlias = Callable[[LoweredGraph], Runnable]


def unsupported() -> str:
    """Why graphs cannot be intercepted in this PyTorch; "" where they can."""
    try:
        from torch._guards import TracingContext
        from torch._inductor import compile_fx

        outer = inspect.signature(compile_fx.compile_fx).parameters
        inner = inspect.signature(compile_fx.compile_fx_inner).parameters
        found = TracingContext.report_output_strides
    except (ImportError, AttributeError) as error:
        return f"PyTorch {torch.__version__} has other compiler internals than the ones known here: {error}"
    if "inner_compile" not in outer or list(inner)[:2] != ["gm", "example_inputs"] or not callable(found):
        return f"PyTorch {torch.__version__} compiles graphs through another interface than the one known here"
    return ""


@contextmanager
def intercepted(handler: Handler) -> Iterator[None]:
    """Give every graph that Inductor compiles inside to `handler`, and run what it returns in the graph's place.

    Holds for `torch.compile` with any options, since Inductor's entry point itself is replaced; a backward graph that
    is compiled later, after the block, still goes to the handler. Caches of whole AOTAutograd results are off
    meanwhile: what they give back has no graph any more. Uses `torch._inductor.compile_fx.compile_fx(inner_compile=)`
    (2.0 and later), `torch._guards.TracingContext.report_output_strides` (2.0),
    `torch._functorch.config.enable_autograd_cache` (2.5).
    """
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx as room

    compile_fx, default = room.compile_fx, room.compile_fx_inner

    def replaced(model: Any, inputs: Any, inner_compile: Any = default, *args: Any, **kwargs: Any) -> Any:
        if inner_compile is not default:  # compile_fx calls itself again, with options applied
            return compile_fx(model, inputs, inner_compile, *args, **kwargs)
        sources = _sources(model)

        def inner(module: fx.GraphModule, examples: Any, **options: Any) -> Any:
            phase = BACKWARD if options.get("is_backward") else INFERENCE if options.get("is_inference") else FORWARD

            def lower(graph: fx.GraphModule) -> Runnable:
                made: Runnable = default(graph, examples, **options)
                return made

            with _donating([]) as donated:
                pass
            graph = LoweredGraph(
                module=module,
                phase=phase,
                key=options.get("graph_id") or 0,
                sources=_inputs(module, sources),
                saved=_saved(module),
                donated=frozenset(donated if phase == BACKWARD else ()),
                _lower=lower,
            )
            run = handler(graph)
            run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks how the inputs are handed over
            return run

        return compile_fx(model, inputs, inner, *args, **kwargs)

    patch = {"enable_autograd_cache": False} if hasattr(functorch, "enable_autograd_cache") else {}
    room.compile_fx = replaced  # type: ignore[assignment]
    try:
        with functorch.patch(patch):
            yield
    finally:
        room.compile_fx = compile_fx


@contextmanager
def configured(settings: Mapping[str, Any]) -> Iterator[None]:
    """Settings of the compiler inside, by their full names, such as `torch._inductor.config.fallback_random`.

    Raises `UsageError` for one that this release lacks. `torch._inductor.config` and `torch._functorch.config` have
    `patch` since 2.0; `fallback_random` stands there since 2.0, `emulate_precision_casts` since 2.6,
    `backward_pass_autocast` since 2.8.
    """
    with ExitStack() as stack:
        for name, value in settings.items():
            place, _, setting = name.rpartition(".")
            module = importlib.import_module(place)
            if not hasattr(module, setting):
                raise UsageError(f"PyTorch {torch.__version__} has no {name}")
            stack.enter_context(module.patch({setting: value}))
        yield


def setting(name: str) -> Any:
    """What one of those settings is now."""
    place, _, short = name.rpartition(".")
    return getattr(importlib.import_module(place), short)


def backend(name: str) -> Callable[[fx.GraphModule, Any], Callable[..., Any]]:
    """The backend of this name, which takes a Dynamo graph and its examples. `torch._dynamo.lookup_backend` (2.0)."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def is_intercepted() -> bool:
    """Whether `intercepted` holds."""
    from torch._inductor import compile_fx as room

    return room.compile_fx.__name__ == "replaced"


def reset() -> None:
    """Forget everything that was compiled; functions are compiled again when they are next called."""
    torch.compiler.reset()


def _output(module: fx.GraphModule) -> fx.Node:
    found: fx.Node = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    return found


def _sources(model: Any) -> list[str]:
    """What each input of a Dynamo graph is in the user's frame. `_dynamo_source` of its node (2.7 and later)."""
    if not isinstance(model, fx.GraphModule):
        return []
    found = []
    for node in model.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node, "_dynamo_source", None)
            if source is None and (argument := node.meta.get("grapharg")) is not None:
                source = argument.source
            name = getattr(source, "name", "")
            found.append(_weight(str(name() if callable(name) else name)))
    return found


def _weight(source: str) -> str:
    """`L['self']._modules['up']._parameters['weight']` as `L['self'].up.weight`, the way module stacks write it; "" for
    what is no parameter or buffer."""
    return dotted(source) if re.search(r"[._'](?:parameters|buffers)(?:'\])?\['[^']*'\]$", source) else ""


def dotted(source: str) -> str:
    """A path through modules as module stacks write it; one with a `__getattr__` of its own is read by `__dict__`."""
    held = r"_(?:modules|parameters|buffers)"
    return re.sub(rf"\.(?:__dict__\['{held}'\]|{held})\['([^']*)'\]", r".\1", source)


def _inputs(module: fx.GraphModule, sources: Sequence[str]) -> tuple[str, ...]:
    """The source of each input of a lowered graph: its name, or `desc` (2.9), has its place in the Dynamo graph."""
    found = []
    # Where weights are lifted behind Dynamo's back, the numbers of the names are not those of its inputs.
    whole = sum(n.op == "placeholder" and n.name.startswith("primals") for n in module.graph.nodes) == len(sources)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            index = getattr(node.meta.get("desc"), "idx", None)
            if index is None and whole and (match := re.fullmatch(r"primals_(\d+)", node.name)):
                index = int(match[1]) - 1
            known = isinstance(index, int) and node.name.startswith(("primals", "arg")) and index < len(sources)
            found.append(sources[index] if known and isinstance(index, int) else "")
    return tuple(found)


def _saved(module: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the outputs that a forward graph keeps for its backward, from their descriptors (2.9)."""
    kinds = [type(one).__name__ for one in _output(module).meta.get("desc") or ()]
    return tuple(place for place, kind in enumerate(kinds) if kind == "SavedForBackwardsAOTOutput")


# What Dynamo tells while it compiles ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """One record of PyTorch's structured trace, the one that `TORCH_TRACE` writes to a folder.

    name: that of the record or artifact, such as `compilation_metrics` or `recompile_reasons`. compile_id: which
    compilation of which frame, `3/1`. fields: what came as data. text: what came as text or JSON.
    """

    name: str
    compile_id: str
    fields: Mapping[str, Any]
    text: str


TOLD = frozenset(
    "dynamo_start compilation_metrics bwd_compilation_metrics compilation_metrics_runtime dynamo_graph_break_reason "
    "recompile_reasons fx_graph_cache_hit fx_graph_cache_miss fx_graph_cache_bypass aotautograd_cache_hit "
    "aotautograd_cache_miss aotautograd_cache_bypass".split()
)
"""The records that are handed on."""

_MEASURED = tuple(
    "compile_id co_name co_filename co_firstlineno graph_op_count has_guarded_code fail_type fail_reason "
    "fail_user_frame_filename fail_user_frame_lineno recompile_reason".split()
)


def untold() -> str:
    """Why this PyTorch does not tell what it compiles in the way known here; "" where it does.

    The logger `torch.__trace` with its records stands since 2.3, `CompilationMetrics.recompile_reason` since 2.7.
    """
    try:
        from torch._dynamo.utils import CompilationMetrics
        from torch._logging._internal import trace_log
    except ImportError as error:
        return f"PyTorch {torch.__version__} has no structured trace of compilation as it is known here: {error}"
    missing = [name for name in _MEASURED if name not in getattr(CompilationMetrics, "__dataclass_fields__", {})]
    if missing or not isinstance(trace_log, logging.Logger):
        return f"PyTorch {torch.__version__} does not tell {', '.join(missing) or 'anything'} of what it compiles"
    return ""


@contextmanager
def compile_trace(listener: Callable[[Told], None]) -> Iterator[None]:
    """Hand every record of `TOLD` to `listener`, in the thread that compiles. Other handlers of the trace stay."""
    from torch._logging._internal import trace_log

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            data = getattr(record, "metadata", {})
            name = next((name for name in TOLD if name in data), "")
            fields = data.get(name)
            if "artifact" in data:
                fields = data["artifact"]
                name = str(fields.get("name"))
            if name in TOLD:
                identity = f"{data.get('frame_id')}/{data.get('frame_compile_id')}"
                listener(Told(name, identity, fields or {}, getattr(record, "payload", None) or ""))

    handler = Handler(logging.DEBUG)
    trace_log.addHandler(handler)
    try:
        yield
    finally:
        trace_log.removeHandler(handler)


def counters(group: str) -> Counter[str]:
    """Dynamo's counters of one group, such as `stats` with `unique_graphs`. `torch._dynamo.utils.counters` (2.0)."""
    from torch._dynamo.utils import counters

    return Counter({name: int(count) for name, count in counters[group].items()} if group in counters else {})


def compile_seconds() -> float | None:
    """Seconds that this process has spent compiling frames and backward graphs; None where PyTorch does not tell.

    `torch._dynamo.utils.calculate_time_spent` (2.1), whose total has `entire_backward_compile` since 2.4.
    """
    try:
        from torch._dynamo.utils import calculate_time_spent
    except ImportError:
        return None
    return float(calculate_time_spent().get("total_wall_time", 0))


def kernel_count() -> int | None:
    """Kernels that Inductor generated, those of cached graphs included. `torch._inductor.metrics` (2.0)."""
    try:
        from torch._inductor import metrics

        return int(metrics.generated_kernel_count)
    except (ImportError, AttributeError):
        return None


@contextmanager
def own_caches(folder: str) -> Iterator[None]:
    """Inductor and Triton keep what they compile in `folder` inside, and forget what they hold in memory besides.

    What Dynamo has compiled stays. `TORCHINDUCTOR_CACHE_DIR` (2.0); `torch._inductor.utils.clear_inductor_caches` (2.1;
    another name for `clear_caches` since 2.8).
    """
    from torch._inductor import utils

    forget: Callable[[], None] = getattr(utils, "clear_caches", None) or utils.clear_inductor_caches
    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    forget()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        forget()


def cache_folder() -> str:
    """Where Inductor keeps what it compiles. `torch._inductor.runtime.runtime_utils.cache_dir` (2.4)."""
    try:
        return str(importlib.import_module("torch._inductor.runtime.runtime_utils").cache_dir())
    except OSError:  # it makes the folder, which is what failed
        return os.environ.get("TORCHINDUCTOR_CACHE_DIR", "Inductor's cache folder")


def recompile_limit() -> str:
    """The setting that bounds how often one function is compiled: `recompile_limit`, before 2.6 `cache_size_limit`."""
    from torch._dynamo import config

    return "torch._dynamo.config." + ("recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit")


def is_compiled_code(code: CodeType) -> bool:
    """Whether a code object is one that Dynamo wrote: it calls a graph or resumes behind a break (names of 2.0)."""
    return any(name.startswith(("__compiled_fn", "__resume_at")) for name in code.co_names)


def resumed_at(code: CodeType) -> int | None:
    """The line behind a graph break at which Dynamo's function `torch_dynamo_resume_in_f_at_12` (2.1) goes on."""
    match = re.fullmatch(r"torch_dynamo_resume_in_.*_at_(\d+)", code.co_name)
    return int(match[1]) if match else None


def asked_for(frame: FrameType | None) -> bool:
    """Whether a frame runs inside what `torch.compile` wrapped, and not inside `torch.compiler.disable`.

    Both wrappers stand in `torch/_dynamo/eval_frame.py` and close over `self`, an object of a class named in 2.0.
    """
    while frame is not None:
        if frame.f_code.co_filename.endswith(_EVAL_FRAME) and frame.f_code.co_name in ("_fn", "compile_wrapper"):
            owner = type(frame.f_locals.get("self")).__name__
            return owner not in ("DisableContext", "RunOnlyContext")
        frame = frame.f_back
    return False


_EVAL_FRAME = os.path.join("torch", "_dynamo", "eval_frame.py")


def is_compiled(part: Any) -> bool:
    """Whether a module or function is a result of `torch.compile`, or a module on which `compile()` was called.

    `OptimizedModule` and `_torchdynamo_orig_callable` stand since 2.0, `Module._compiled_call_impl` since 2.2. What
    `torch.compiler.disable` gives is an `OptimizedModule` too, of another context (`dynamo_ctx`, 2.1).
    """
    if _is_wrapper(part):
        return type(getattr(part, "dynamo_ctx", None)).__name__ not in ("DisableContext", "RunOnlyContext")
    if getattr(part, "_compiled_call_impl", None) is not None or _own_forward(part) is not None:
        return True
    wrapped = hasattr(part, "_torchdynamo_orig_callable") and not getattr(part, "_torchdynamo_disable", False)
    return wrapped and not isinstance(part, torch.nn.Module)


def uncompiled(part: Any) -> Any:
    """The module or function that `torch.compile` was given; `_orig_mod` of a module since 2.0, and of a function
    `_torchdynamo_orig_callable`. Parts inside it stay compiled."""
    if not is_compiled(part):
        return part
    return getattr(part, "_orig_mod", None) or getattr(part, "_torchdynamo_orig_callable", part)


def stripped(part: Any) -> Any:
    """A module or function without `torch.compile`, in whole and in parts. Modules are changed: hand over a copy."""
    part = uncompiled(part)
    for module in list(part.modules()) if isinstance(part, torch.nn.Module) else ():
        module._compiled_call_impl = None
        if (forward := _own_forward(module)) is not None:
            plain = uncompiled(forward)  # bound to the original, which a copy shares
            module.forward = types.MethodType(getattr(plain, "__func__", plain), module)
        for name, child in _children(module):
            module._modules[name] = uncompiled(child)
    return part


class CompiledLike:
    """Compiles plain copies as their originals are, in whole and in parts, with the settings of each.

    They stand in the `OptimizeContext` that `torch.compile` made: `dynamo_ctx` of a module (2.1), a cell of a function.
    What is shared stays so: one object for all copies that stand for the same.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self._inside: dict[int, Any] = {}

    def of(self, original: Any, twin: Any) -> Any:
        """The copy as its original is: itself, or what compiles it."""
        if isinstance(original, torch.nn.Module) and id(twin) not in self._inside:
            self._inside[id(twin)] = twin
            self._compile_inside(uncompiled(original), twin)
        if not is_compiled(original) or _in_place(original):
            return twin
        key = id(original), id(twin)
        if key not in self._made:
            self._made[key] = _context(original)(twin), original, twin  # held: their numbers stay theirs
        return self._made[key][0]

    def _compile_inside(self, inner: torch.nn.Module, twin: torch.nn.Module) -> None:
        for name, module in _children(inner):
            twin._modules[name] = self.of(module, twin._modules[name])
        if getattr(inner, "_compiled_call_impl", None) is not None:
            twin._compiled_call_impl = _context(inner._compiled_call_impl)(twin._call_impl)
        if (forward := _own_forward(inner)) is not None:
            twin.forward = _context(forward)(twin.forward)


def _children(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """All children by name; `named_children` leaves out the second name of one."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _own_forward(part: Any) -> Any:
    """What `module.forward = torch.compile(module.forward)` left on a module."""
    forward = vars(part).get("forward") if isinstance(part, torch.nn.Module) else None
    return forward if hasattr(forward, "_torchdynamo_orig_callable") and not _is_wrapper(part) else None


def _is_wrapper(part: Any) -> bool:
    """An `OptimizedModule`; where nobody has imported Dynamo, which takes longer than PyTorch itself, there is none."""
    kind = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    return kind is not None and isinstance(part, kind)


def _in_place(part: Any) -> bool:
    return part is uncompiled(part)


def _context(part: Any) -> Callable[..., Any]:
    if hasattr(part, "dynamo_ctx"):
        context: Callable[..., Any] = part.dynamo_ctx
        return context
    cells = dict(zip(part.__code__.co_freevars, part.__closure__ or (), strict=True))
    found: Callable[..., Any] = cells["self"].cell_contents
    return found
