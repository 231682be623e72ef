"""Checks of compiled models."""

from __future__ import annotations

from ampcheck.catalog import declared
from ampcheck.core.subject import EVERY, Kind

COMPILED_DTYPE = declared(
    "compiled-dtype",
    "compile",
    "A compiled model returns the dtypes, shapes and containers of eager mode, and every op returns the dtypes of "
    "eager mode. Fails where they differ; of ops, warns where one of the two raises and the other does not.",
    "The outputs of each call, eager and compiled. For ops alone (assert_dtypes): each op that the model sends "
    "through autocast runs by itself, with the arguments of the model, in eager mode and compiled by Inductor, both "
    "under autocast. Each choice of dtypes counts once.",
    "An op whose own kernel calls ops that autocast casts, which the compiled graph never sees; operands of two "
    "dtypes that only one of the two accepts.",
    "Cast the result where the dtype matters, call the op with autocast disabled, bring operands to one dtype.",
    subjects=EVERY,
)

COMPILED_EXCEPTION = declared(
    "compiled-exception",
    "compile",
    "Eager and compiled code accept the same inputs. Fails where only compiled code raises, and where it "
    "computes with what eager mode refuses in every precision; warns where eager mode raises in low precision "
    "alone.",
    "The subject runs in eager mode and under torch.compile on equal data.",
    "An op that Inductor lowers wrongly, control flow on tensor values under fullgraph; checks of the data that "
    "eager kernels make and compiled kernels leave out.",
    "Compile with backend='aot_eager': where it raises as well, tracing is at fault. Report it to PyTorch with the "
    "smaller model; check the data before the compiled region.",
    subjects=EVERY,
)

COMPILED_ERROR = declared(
    "compiled-error",
    "compile",
    "Outputs, loss, updated weights, buffers and overwritten arguments of compiled code are as close to float64 as "
    "rounding allows, integers are those of eager mode, and no op computes in 16 bits that eager mode computes in "
    "float32. A difference to eager mode is no failure: fused kernels "
    "round less often. Where eager mode is beyond the bound as well, compiled code fails only if it is far worse. "
    "Warns where a decision near a tie explains the excess (ties of values that were never rounded do not turn), "
    "where eager mode overflows and compiled code does not, and where a float32 output has the digits of 16 bits in "
    "eager mode alone.",
    "An eager run under a shadow gives the exact value of each result, and what moving the data by a rounding does to "
    "it. Compiled code runs on equal data, weights and random streams. It may be off by 8 times that movement and a "
    "few roundings, more for long sums in float32. Where a float32 model rounds to 16 bits by casts alone, compiled "
    "code must round there too. After a failure the compiler's stages and settings are tried. Of a training loop and a "
    "callable: the first call of each module and function that they compile, calls after these changed, and "
    "results and weights that become infinite or NaN in compiled code alone.",
    "Casts that fusion leaves out, a value that is specialised and should not be, state that changes between calls.",
    "Use the setting that the finding names, which was tried; ampcheck blame finds the op and the modules.",
    subjects=EVERY,
)

COMPILED_GRADIENT = declared(
    "compiled-gradient",
    "compile",
    "Gradients of weights and inputs of compiled code are as close to float64 as rounding allows, and no op of the "
    "backward pass computes in 16 bits that eager mode computes in float32.",
    "As compiled-error, each gradient as a whole; of one that the data hardly determine, what is small beside the norm "
    "of the whole gradient is no error. "
    "Gradients may differ by the few elements on whose side of a kink (relu) a rounding decides.",
    "AOTAutograd traces the backward pass under the autocast of the forward call, which eager mode has left by "
    "then: code that the author runs in float32 is differentiated in 16 bits (pytorch/pytorch#153044, #179804). A "
    "counter that forward changes and uses (#197039).",
    "Set torch._functorch.config.backward_pass_autocast = 'off' where the finding says that it fixes it; enter "
    "autocast inside the compiled region.",
    subjects=EVERY,
)

BLAME = declared(
    "blame",
    "compile",
    "A subject passes at every stage from eager low precision to torch.compile. Where it does not, the verdict "
    "names the stage, the first op at fault, and the smallest set of modules that fixes it in float32.",
    "Eager low precision is judged as in an audit, compiled code as by compiled-error, at aot_eager, Inductor with "
    "emulated casts, and Inductor. In eager mode the shadow names the first op at fault; in compiled code the first k "
    "nodes of the graphs are compiled, the rest run eagerly, and k is bisected. The modules are found by delta "
    "debugging on the tree of modules, each set tried by running the code that is printed; the step is timed in pairs "
    "with and without it.",
    "Those of the check that fails: see its page.",
    "Paste the code and call keep_in_float32(model), set what the hint names, or leave the module out of "
    "compilation. Where no set of modules fixes it, fix the op at the line that is named.",
    unit="relative error",
)

GRAPH_BREAK = declared(
    "graph-break",
    "compile",
    "A call of a compiled function stays in one graph. Fails with each line at which a graph ends, when one call "
    "meets more graph breaks than max_breaks.",
    "The subject runs compiled, as it would for its user, and Dynamo's own records of breaks are read: line, reason, "
    "advice. How often a call meets one is counted by the functions that resume after it. Of a model of which one call "
    "is given, where the check is selected.",
    "An if on a tensor's values, .item() or print for logging, a library that Dynamo cannot follow, "
    "torch.compiler.disable, a try block. Each costs a synchronisation or a round through Python, and what could "
    "be fused across it is not.",
    "Compute both sides and choose with torch.where or clamp, return what is to be logged as a tensor, set "
    "torch._dynamo.config.capture_scalar_outputs, or accept the break with max_breaks.",
    unit="breaks",
    subjects=EVERY,
)

RECOMPILE = declared(
    "recompile",
    "compile",
    "Calls after the warm-up do not recompile. Fails when more than max_recompiles compilations come after the "
    "warm-up or, in it, for a value that had varied before.",
    "All calls run as a warm-up and once more. The message names the guard that failed, by kind: shape, dtype, "
    "training flag, grad mode, autocast, inference mode, constant. In the warm-up each value may vary once, by which "
    "Dynamo learns the dynamic sizes. Without a warm-up, as in a block of code, only that first new size is free. A "
    "training loop and a callable have no end of their warm-up: each value may vary once, and one more is allowed.",
    "A Python number or a layer's index that changes, a size with dynamic=False or of 1, train and eval or grad "
    "modes in turn, new objects for each call. After eight graphs Dynamo runs a function in eager mode.",
    "Mark what varies with torch._dynamo.mark_dynamic, keep numbers in buffers or tensors, warm up in each mode "
    "that occurs, or accept them with max_recompiles.",
    unit="recompilations",
    subjects=EVERY,
)

EAGER_FALLBACK = declared(
    "eager-fallback",
    "compile",
    "Code inside the compiled region runs compiled. Fails for modules and functions that silently fall back to eager, "
    "though no graph break is the reason.",
    "While the subject runs after its warm-up, Python's profiling hook records the modules and functions that run as "
    "plain Python. The reason comes from Dynamo's trace: the limit of recompilations, an exception of the backend "
    "that suppress_errors swallowed, or none. Compiled block by block, each block is named.",
    "More graphs of one function than torch._dynamo.config.recompile_limit (8), as with an integer per layer in "
    "regional compilation; suppress_errors; code in files that Dynamo leaves out; the stance force_eager. A method of "
    "a compiled model besides its call, or model.forward after model.compile(): only the original runs.",
    "Mend the guard that fails, see recompile; switch suppress_errors off and read the exception; leave out of the "
    "compiled region what is not to be compiled.",
    unit="left eager",
    subjects=EVERY,
)

CACHE_ARTIFACTS = declared(
    "cache-artifacts",
    "compile",
    "A call of torch.compiler.save_cache_artifacts saves artifacts, and those that load_cache_artifacts loads are "
    "used. Fails otherwise, with the calling line.",
    "Calls of the two functions are recorded in this process and in Python processes that it starts, with the graphs "
    "compiled before and after; loaded keys are compared with those that the caches hit. A child process reports "
    "through a file, by a sitecustomize on PYTHONPATH; one started with -I, -E or -S does not.",
    "Saving before the first compiled call, or in a process that did not compile; loading after it; another "
    "release, model, shape or setting than when it was saved.",
    "Run the compiled function once, forward and backward, then save; load before its first call.",
    subjects=(Kind.FORWARD, Kind.COMPILE, Kind.REGIONAL, Kind.CALL),
)

CUDAGRAPH = declared(
    "cudagraph",
    "compile",
    "Where the mode asks for CUDA graphs, each graph becomes one, and no output is read after the next run has "
    "overwritten it. Skipped without a CUDA device.",
    "Inductor's own reasons for leaving out CUDA graphs are read, and the exception that PyTorch raises for an "
    "output that was overwritten. With mode max-autotune a graph left out is a warning.",
    "Tensors on the CPU, inputs changed in place, dynamic shapes, outputs kept from step to step.",
    "Keep all inputs on the device, clone outputs that are kept, or call "
    "torch.compiler.cudagraph_mark_step_begin() before each step.",
    subjects=EVERY,
)
