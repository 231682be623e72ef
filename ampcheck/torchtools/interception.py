"""Intercept the graphs that Inductor compiles: each is handed over after AOTAutograd, joint passes and partitioning.

With `dynamo` the only place that uses private interfaces of PyTorch's compiler; tests/contract/test_dynamo.py checks
each of them, and `unsupported()` reports a release in which one is missing or takes other arguments.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from ampcheck.torchtools.dynamo import DISABLED, without_autograd_cache
from ampcheck.torchtools.patching import attribute, observed, once_imported
from ampcheck.torchtools.pytree import tensors

Runnable: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Compiled code of one graph: takes its inputs as a list, which it empties, and returns its outputs."""

FORWARD, BACKWARD, INFERENCE = "forward", "backward", "inference"


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """One functional ATen graph that Inductor is about to compile.

    phase: `forward`, `backward` or `inference` (a forward that saves nothing). key: shared by a forward graph and its
    backward. sources: each input in the user's frame, `L['self'].blocks.0.up.weight`; "" where it is unknown.
    saved: positions of the outputs that are saved for backward; donated: of the inputs whose memory the graph may
    reuse.
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
        """A copy of the graph that may be changed; it shares the original's tensors."""
        constants = [getattr(self.module, str(n.target), None) for n in self.module.graph.nodes if n.op == "get_attr"]
        if any(isinstance(value, fx.GraphModule) for value in constants):  # Inductor's passes change branches
            return copy.deepcopy(self.module)
        duplicate = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        duplicate.meta.update(self.module.meta)
        duplicate.graph.output_node().meta.update(self.module.graph.output_node().meta)
        return duplicate

    def variant(self, module: fx.GraphModule) -> tuple[Runnable, tuple[Any, ...]]:
        """A changed copy, compiled so that it leaves donated inputs intact, and the strides of its outputs."""
        from torch._guards import TracingContext

        with _without_donation(), TracingContext.report_output_strides() as strides:
            run = self._lower(module)
        return run, tuple(strides or ())

    def later(self, module: fx.GraphModule) -> Callable[[], Runnable]:
        """A function that compiles a changed copy with the options of the moment at which `later` was called."""
        from torch._guards import CompileContext, TracingContext, compile_context, tracing
        from torch._inductor import config

        traced, compiled, options = TracingContext.try_get(), CompileContext.try_get(), config.get_config_copy()

        def lower() -> Runnable:
            with tracing(traced), compile_context(compiled), config.patch(options), _counting():
                return self.variant(module)[0]

        return lower

    def strides(self) -> tuple[Any, ...]:
        """The strides of the graph's own outputs, once it is `compiled`."""
        from torch._guards import TracingContext

        context = TracingContext.try_get()
        return tuple((context.output_strides if context is not None else None) or ())


Handler: TypeAlias = Callable[[LoweredGraph], Runnable]


def unsupported() -> str:
    """Why graphs cannot be intercepted in this PyTorch; "" where they can."""
    try:
        from torch._guards import TracingContext
        from torch._inductor import compile_fx

        outer = inspect.signature(compile_fx.compile_fx).parameters
        inner = inspect.signature(compile_fx.compile_fx_inner).parameters
        report = TracingContext.report_output_strides
    except (ImportError, AttributeError) as error:
        return f"PyTorch {torch.__version__} has other compiler internals than the ones known here: {error}"
    if "inner_compile" not in outer or list(inner)[:2] != ["gm", "example_inputs"] or not callable(report):
        return f"PyTorch {torch.__version__} compiles graphs through another interface than the one known here"
    return ""


@contextmanager
def intercepted(handler: Handler) -> Iterator[None]:
    """Hand every graph that Inductor compiles inside to `handler`, and run what it returns in the graph's place.

    Holds for `torch.compile` with any options, since Inductor's entry point itself is replaced; a backward graph that
    is compiled after the block still goes to the handler. Caches of whole AOTAutograd results are off inside: their
    entries have no graph.
    """
    from torch._inductor import compile_fx as inductor

    compile_fx, default = inductor.compile_fx, inductor.compile_fx_inner

    def replaced(model: Any, inputs: Any, inner_compile: Any = default, *args: Any, **kwargs: Any) -> Any:
        if inner_compile is not default:  # compile_fx calls itself again, with options applied
            return compile_fx(model, inputs, inner_compile, *args, **kwargs)
        sources = _sources(model)

        def inner(module: fx.GraphModule, examples: Any, **options: Any) -> Any:
            phase = BACKWARD if options.get("is_backward") else INFERENCE if options.get("is_inference") else FORWARD

            def lower(graph: fx.GraphModule) -> Runnable:
                run: Runnable = default(graph, examples, **options)
                return run

            graph = LoweredGraph(
                module=module,
                phase=phase,
                key=options.get("graph_id") or 0,
                sources=_inputs(module, sources),
                saved=_saved(module) if phase == FORWARD else (),
                donated=frozenset(getattr(_metadata(), "bw_donated_idxs", None) or () if phase == BACKWARD else ()),
                _lower=lower,
            )
            run = handler(graph)
            run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks how the inputs are handed over
            return run

        return compile_fx(model, inputs, inner, *args, **kwargs)

    with attribute(inductor, "compile_fx", replaced), without_autograd_cache():
        yield


def is_intercepted() -> bool:
    """Return whether `intercepted` is in effect."""
    from torch._inductor import compile_fx as inductor

    return inductor.compile_fx.__name__ == "replaced"


def calls_of_compile(called: Callable[[Any], None]) -> AbstractContextManager[None]:
    """`called` gets each module and function that is passed to `torch.compile` inside.

    Of `module.compile()` that is a bound method of the module. Dynamo is not imported, which takes a second.
    """

    def observe(module: types.ModuleType) -> AbstractContextManager[None]:
        return observed(module.eval_frame.OptimizeContext, "__call__", lambda context, function: called(function))

    return once_imported("torch._dynamo", observe)


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call of what `torch.compile` returned. original: the module or function that it wrapped. function: what it runs
    of that, such as a module's `forward` without its hooks. compile: wraps another one with the same settings.
    autocast: what autocast casts to on the device of the arguments, where it is on. grad: whether grad mode is.
    caller: the module of which a call runs the function as its `forward`."""

    original: Any
    function: Any
    compile: Callable[[Any], Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: str
    autocast: torch.dtype | None
    grad: bool
    caller: torch.nn.Module | None = None

    @classmethod
    def of(cls, frame: types.FrameType) -> CompiledCall | None:
        """The call that a frame begins, where it is that of a wrapper of `torch.compile`."""
        names = frame.f_locals
        context: Any = names.get("self")
        function = names.get("fn")
        if type(context).__name__ != "OptimizeContext" or function is None or "args" not in names:
            return None
        owner = getattr(function, "__self__", getattr(function, "__wrapped__", None))
        original = owner if isinstance(owner, torch.nn.Module) else function
        device = next((t.device.type for _, t in tensors((names["args"], names["kwargs"]))), "cpu")
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        grad = torch.is_grad_enabled()
        return cls(
            original, function, context, names["args"], names["kwargs"], device, autocast, grad, _caller(frame.f_back)
        )


def _caller(frame: types.FrameType | None) -> torch.nn.Module | None:
    """The module whose call a frame of PyTorch's is, with its hooks or without."""
    if frame is None or frame.f_code.co_filename != torch.nn.Module._call_impl.__code__.co_filename:
        return None
    module = frame.f_locals.get("self")
    return module if isinstance(module, torch.nn.Module) else None


def is_wrapper_of_compile(code: types.CodeType) -> bool:
    """Return whether a code object is that of the wrapper which `torch.compile` returns."""
    eval_frame = os.path.join("torch", "_dynamo", "eval_frame.py")
    return code.co_name in ("_fn", "compile_wrapper") and code.co_filename.endswith(eval_frame)


def in_compiled_region(frame: types.FrameType | None) -> bool:
    """Return whether a frame runs inside what `torch.compile` wrapped, and not inside `torch.compiler.disable`.

    The wrappers of both close over `self`.
    """
    while frame is not None and not is_wrapper_of_compile(frame.f_code):
        frame = frame.f_back
    return frame is not None and type(frame.f_locals.get("self")).__name__ not in DISABLED


def dotted(source: str) -> str:
    """A path through modules as module stacks write it; one with a `__getattr__` of its own is read by `__dict__`."""
    containers = r"_(?:modules|parameters|buffers)"
    return re.sub(rf"\.(?:__dict__\['{containers}'\]|{containers})\['([^']*)'\]", r".\1", source)


def _metadata() -> Any:
    """AOTAutograd's metadata of the graph that is being compiled; donated inputs are its `bw_donated_idxs` (2.6)."""
    from torch._guards import TracingContext

    return getattr(TracingContext.try_get(), "fw_metadata", None)


def _counting() -> AbstractContextManager[object]:
    """In 2.6 a hit of Inductor's cache is counted among the metrics of a compilation, and raises outside of one."""
    from torch._dynamo import utils

    return nullcontext() if hasattr(utils, "CompileEventLogger") else utils.get_metrics_context()


def _without_donation() -> AbstractContextManager[None]:
    metadata = _metadata()
    return attribute(metadata, "bw_donated_idxs", []) if getattr(metadata, "bw_donated_idxs", None) else nullcontext()


def _sources(model: object) -> list[str]:
    """The source of each input of a Dynamo graph in the user's frame, `L['self'].up.weight`; "" for what is no
    parameter or buffer. `_dynamo_source` of its node (2.7 and later)."""
    names = []
    for node in model.graph.nodes if isinstance(model, fx.GraphModule) else ():
        if node.op == "placeholder":
            source = getattr(node, "_dynamo_source", None)
            if source is None and (argument := node.meta.get("grapharg")) is not None:
                source = argument.source
            name = getattr(source, "name", "")
            names.append(str(name() if callable(name) else name))
    return [dotted(n) if re.search(r"[._'](?:parameters|buffers)(?:'\])?\['[^']*'\]$", n) else "" for n in names]


def _inputs(module: fx.GraphModule, sources: Sequence[str]) -> tuple[str, ...]:
    """The source of each input of a lowered graph, whose name or `desc` (2.9) is its index in the Dynamo graph."""
    names = []
    # Where weights are lifted without Dynamo's knowledge, the numbers of the names are not those of its inputs.
    whole = len(getattr(_metadata(), "input_info", ())) == len(sources)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            index = getattr(node.meta.get("desc"), "idx", None)
            if index is None and whole and (match := re.fullmatch(r"primals_(\d+)|arg(\d+)_1", node.name)):
                index = int(match[1]) - 1 if match[1] else int(match[2])
            known = isinstance(index, int) and node.name.startswith(("primals", "arg")) and index < len(sources)
            names.append(sources[index] if known and isinstance(index, int) else "")
    return tuple(names)


def _saved(module: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the outputs that a forward graph saves for its backward, from their descriptors (2.9); before, they
    are behind all others."""
    output = module.graph.output_node()
    if (descriptors := output.meta.get("desc")) is None:
        count = len(output.args[0])  # type: ignore[arg-type]
        return tuple(range(getattr(_metadata(), "num_forward", count), count))
    kinds = [type(descriptor).__name__ for descriptor in descriptors]
    return tuple(position for position, kind in enumerate(kinds) if kind == "SavedForBackwardsAOTOutput")


set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
"""Set what compiles the frames that this thread runs, None for nothing; returns what did before."""


def leave_out(code: types.CodeType) -> None:
    """Dynamo never compiles the frames of a code object; here without its import, which takes a second."""
    compiler: Any = torch._C._dynamo.eval_frame
    if hasattr(compiler, "skip_code"):  # 2.6
        compiler.skip_code(code)
        return
    action = compiler._FrameAction
    compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(action.SKIP, action.DEFAULT))
