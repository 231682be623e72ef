"""What each check means: the text of `ampcheck explain SLUG`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from ampcheck.errors import UsageError


@dataclass(frozen=True, slots=True)
class Explanation:
    """A page of help: what a check requires, how it is measured, what usually causes a finding, how to mend it."""

    slug: str
    requires: str
    measured: str
    causes: str
    mend: str


_PAGES = (
    Explanation(
        "low-precision-error",
        "What runs in float32 also runs in low precision. Fails when only the low-precision run raises.",
        "The subject runs in float32 and in float64 first; the exception of the low-precision run is reported "
        "with the op, module and line at which it was raised.",
        "Operands whose dtypes no longer match (a float32 table meets a bfloat16 tensor), a constant such as -1e9 "
        "that float16 cannot hold, in-place and out= variants that autocast does not touch, a kernel that the "
        "device lacks.",
        "Cast where the dtypes part (.to(x.dtype)), take mask values from torch.finfo(x.dtype).min or use a "
        "boolean mask, use the out-of-place variant of the op.",
    ),
    Explanation(
        "overflow",
        "An op with finite inputs gives finite outputs. Fails when an infinity or NaN that low precision made "
        "reaches a module's output, an output or a gradient; warns when it was absorbed before.",
        "Every op of forward and backward is watched below autocast. Where non-finite values appear, the op is "
        "run again on the same inputs in float64, which tells the format's limit from arithmetic that has no "
        "result. The op where they appear is the producer; ops that carry them on are only counted. A -inf that "
        "the model writes on purpose (a mask) has a non-finite constant or input and is no finding. Inside a compiled "
        "graph, each cast to 16 bits and each product tells what it lost.",
        "Sums and products beyond 65504 in float16 (feed-forward projections, residual streams, variances), "
        "finfo.min added to a negative score, a divisor whose eps is zero in the format.",
        "Keep the op in float32, scale its inputs, use bfloat16, write masks with where or masked_fill instead of "
        "adding.",
    ),
    Explanation(
        "nonfinite-gradient",
        "Every gradient that is finite in float64 is finite in low precision.",
        "float16 is run at the loss scales at which torch.amp.GradScaler starts and to which it backs off, until "
        "no gradient is infinite; bfloat16 at scale 1.",
        "A forward overflow; a division or square root at zero whose derivative overflows.",
        "Mend the overflow first. Clamp before sqrt, log and division; see overflow for the op.",
    ),
    Explanation(
        "precision-loss",
        "Outputs and gradients lie within what rounding explains of the same model in float64. Fails beyond that, "
        "and where an output is 25 % off, whatever explains it; warns where a module alone is beyond its limit, where "
        "a CPU kernel sums in 16 bits, and where a decision (topk, comparison) fell otherwise near a tie and float64 "
        "could not follow it.",
        "The relative error in the Euclidean norm, per output, module output and gradient. The limit is precision * "
        "(sqrt(chain) * (u + s) + f) + sqrt(n) * u32: u is the unit roundoff of the format, chain the longest series "
        "of roundings between two weights, s how far the float64 model moves when its weights and rounded inputs are "
        "moved by u, f the same for float32, n the longest sum and u32 the unit roundoff of float32, in which sums are "
        "kept. Where the run decided otherwise near a tie, float64 runs again and takes the same decisions. Left out "
        "are gradients that not even float32 knows to the digits of the format, and those whose error is within "
        "rounding of the whole gradient.",
        "Cancellation (differences of cumulative sums, variance by E[x^2] - E[x]^2), position tables in 16 bits, "
        "accumulation in the low format.",
        "Compute what leads to the named place in float32; subtract before rounding; set precision in "
        "[tool.ampcheck.limits] if a larger error is accepted.",
    ),
    Explanation(
        "silent-zero",
        "No tensor becomes zero as a whole, and no constant vanishes where it guards. Fails when outputs or "
        "gradients suffer; warns otherwise.",
        "The op is run again on the same inputs in float64. A constant vanishes when it is a nonzero Python "
        "number below half of the format's smallest subnormal and results that needed it are exactly zero.",
        "eps=1e-8 in float16, squares of small numbers, a model whose weights are zero or tiny at initialisation.",
        "Use an eps that the format holds, scale before squaring, compute the guard in float32.",
    ),
    Explanation(
        "flush",
        "No tensor loses more of its Euclidean norm to zero than one rounding changes anyway. Fails when outputs "
        "or gradients suffer; warns when more than half of a tensor's nonzero elements vanish without a "
        "consequence.",
        "Element by element against the same op on the same inputs in float64: nonzero there, zero here, and too "
        "small for the format. The limit is flush * u, u being the unit roundoff.",
        "float16 below 6e-8: gradients of a loss that is not scaled, probabilities, variances of small activations.",
        "Scale the loss (torch.amp.GradScaler), scale the values, use bfloat16, keep the op in float32.",
    ),
    Explanation(
        "integer-cast",
        "Integers survive a trip through a 16-bit float. Fails when outputs or gradients suffer; warns otherwise.",
        "Casts between integers and 16-bit floats and arange in a 16-bit dtype are compared element by element; "
        "float16 holds every integer up to 2048, bfloat16 up to 256.",
        "torch.arange(n).to(x.dtype) or type_as, position ids and time steps cast with the model, counters kept "
        "as buffers.",
        "Compute with positions in float32 and cast the result.",
    ),
    Explanation(
        "headroom",
        "No value comes within a factor (4 by default) of the maximum of its format: a warning.",
        "The largest magnitude that each op makes, in forward, and in backward where the loss is not scaled. "
        "Constants that go in as they come out do not count.",
        "Growth along the residual stream, unnormalised scores, a large loss scale.",
        "Normalise or scale, or set headroom in [tool.ampcheck.limits].",
    ),
    Explanation(
        "loss-dtype",
        "The loss is float32: a warning where it has 16 bits.",
        "The dtype of the subject's loss, or of 0-d outputs that carry a gradient.",
        "A mean or sum of 16-bit outputs outside the ops that autocast moves to float32.",
        "Compute the loss from output.float().",
    ),
    Explanation(
        "dtype",
        "Modules give the dtype that was declared for them. A pattern that matches nothing fails.",
        "Floating outputs of every module are followed through tuples, dicts, dataclasses and model outputs.",
        "A float32 parameter or constant that promotes a 16-bit stream; a missing cast back.",
        "Cast the result, or the parameter at the point of use.",
    ),
    Explanation(
        "compiled-dtype",
        "What a compiled model gives has the dtypes, shapes and containers of eager mode, and every op the dtypes "
        "that it has there. Fails where they differ; of ops, warns where one of the two raises and the other does "
        "not.",
        "The outputs of each call, eager and compiled. For ops alone (assert_op_dtypes): each op that the model sends "
        "through autocast runs by itself, with the arguments that the model gave it, in eager mode and compiled by "
        "Inductor, both under autocast. Each choice of dtypes counts once.",
        "An op whose own kernel calls ops that autocast casts, which the compiled graph never sees; operands of two "
        "dtypes that only one of the two accepts.",
        "Cast the result where the dtype matters, call the op with autocast disabled, bring operands to one dtype.",
    ),
    Explanation(
        "compiled-exception",
        "Eager mode and compiled code accept the same. Fails where only compiled code raises, and where it computes "
        "with what eager mode refuses in every precision; warns where eager mode raises in low precision alone.",
        "The subject runs in eager mode and under torch.compile on equal data.",
        "An op that Inductor lowers wrongly, control flow on tensor values under fullgraph; checks of the data that "
        "eager kernels make and compiled kernels leave out.",
        "Compile with backend='aot_eager' to tell tracing from code generation, and report it to PyTorch with the "
        "smaller model; check the data before the compiled region.",
    ),
    Explanation(
        "compiled-error",
        "Outputs, loss, updated weights and buffers of compiled code lie as near to float64 as those of eager mode. "
        "That the two differ is no failure: fused kernels round less often. Warns where a decision near a tie "
        "explains the excess, where eager mode overflows and compiled code does not, and where a float32 output has "
        "the digits of 16 bits in eager mode alone.",
        "Three arms on equal data, weights and random streams: eager mode, compiled code, float64. Eager mode is "
        "measured on the data as they are and on data nudged by a rounding. Compiled code may have the square of the "
        "precision limit times its error, one rounding of the tensor's dtype, and what float32 sums of that length in "
        "another order give; it must be beyond on all of the data. After a failure the compiler's stages and settings "
        "are tried.",
        "Casts that fusion leaves out, a value that is specialised and should not be, state that changes between "
        "calls.",
        "Use the setting that the finding names: it was tried; ampcheck blame finds the place.",
    ),
    Explanation(
        "compiled-gradient",
        "Gradients of weights and inputs of compiled code lie as near to float64 as those of eager mode.",
        "As compiled-error. What is zero but for rounding is compared by its part in the whole gradient.",
        "AOTAutograd traces the backward pass under the autocast of the forward call, which eager mode has left by "
        "then: what the author keeps in float32 is differentiated in 16 bits (pytorch/pytorch#153044, #179804). A "
        "counter that forward changes and uses (#197039).",
        "Set torch._functorch.config.backward_pass_autocast = 'off' where the finding says that it mends it; enter "
        "autocast inside the compiled region.",
    ),
    Explanation(
        "policy-drift",
        "Autocast of the installed PyTorch treats each op as the shipped snapshot of its release says. Fails for each "
        "overload whose rule, facts or replacement are others, that appeared, or that is gone. With a lock: the model "
        "sends the same ops through autocast, in the same modules and dtypes; fails for each op that differs.",
        "Each overload with an autocast kernel is called with small stand-ins, and what autocast hands down is "
        "compared. No device is needed. Where the release has no snapshot the nearest one is the judge.",
        "A library that registers kernels of PyTorch's own ops, a patched or nightly PyTorch, a release newer than "
        "this ampcheck.",
        "Look at ampcheck policy explain OP and ampcheck policy diff X.Y installed, and find who registers the "
        "kernel; cast by hand where the model needs the former rule. A lock is refreshed by pytest --ampcheck-update.",
    ),
    Explanation(
        "policy-gap",
        "What a test on the CPU shows is what the device does. Warns where the CPU computes an op of the model wider "
        "than the device does, or the device bans it; the table lists every op that they treat otherwise.",
        "Forward and backward run on the CPU twice, under the CPU's autocast policy and under the device's, and the "
        "dtypes that each op gets after autocast are compared by op and module.",
        "The CPU keeps in float32 what CUDA computes in float16 (PyTorch has a list of ops for each device), so that "
        "an overflow there cannot be seen here; CUDA and XPU ban binary_cross_entropy, the CPU does not.",
        "Test under the device's policy (ampcheck audit --device cuda, ampcheck.emulate), or cast in the model.",
    ),
    Explanation(
        "policy-unregistered",
        "A custom op that gets floating tensors under autocast tells autocast what to do with them. Warns where it has "
        "no autocast kernel on the device; fails where it then raised on mixed dtypes.",
        "Every op outside of PyTorch's own namespaces that autocast would have acted on is recorded with the dtypes "
        "that it got. Ops that are made of others are left out: those reach autocast themselves. Under a guard, every "
        "op without a rule that raised on mixed dtypes counts, once it is shown to run when all inputs have one dtype.",
        "An op of torch.library.custom_op or TORCH_LIBRARY without an autocast kernel: the op sees float16 from a "
        "linear beside its own float32 parameter.",
        "Register one, torch.library.register_autocast(op, device, dtype), or cast inside the op.",
    ),
    Explanation(
        "policy-banned",
        "No op is called that autocast bans on the device. Fails where its exception ended the run; warns where the "
        "model caught it.",
        "The model runs under the device's policy, which raises PyTorch's own message.",
        "A sigmoid followed by binary_cross_entropy or BCELoss: CUDA and XPU ban it, the CPU computes it in float32.",
        "Use binary_cross_entropy_with_logits (BCEWithLogitsLoss); else leave autocast around it, with float32 inputs.",
    ),
    Explanation(
        "autocast-state",
        "A block leaves autocast and the precision switches as it found them. Fails with each switch that differs.",
        "Autocast on or off, its dtype, cache and nesting depth for every device, float32 matmul precision, TF32, "
        "reduced-precision reductions, fp32_precision, default dtype and determinism are read before and after. What "
        "differs is put back. Nothing else is tapped: it costs a fraction of a millisecond.",
        "A torch.set_autocast_enabled or a precision flag without a way back, autocast entered by hand, an exception "
        "inside a region of a torch.compile'd function, which leaves the region open.",
        "Use `with torch.autocast(...)`; put flags back in a finally block or a fixture.",
    ),
    Explanation(
        "autocast-scope",
        "Backward passes and optimizer steps run outside autocast regions. Fails for each place where one does not; "
        "warns where the gradient is differentiable itself (create_graph) and so belongs to a forward.",
        "Every way into the autograd engine and every optimizer step is tapped, and autocast's state is asked there. A "
        "backward that runs inside another one, as checkpoints do, does not count.",
        "A region around the whole step or the whole loop. Then weights keep their first cast, and the loss stands "
        "still.",
        "Put the forward and the loss in the region, and nothing else.",
    ),
    Explanation(
        "autocast-cache",
        "A cast of a weight that autocast keeps is used only while the weight has the values and the region the dtype "
        "that it was made for.",
        "Casts of float32 leaves inside a region are followed. When one is used in a forward after its weight was "
        "written to, also through .data, it is compared with the weight as it is now.",
        "An optimizer step, load_state_dict or weight averaging inside a region; a float16 region inside a bfloat16 "
        "one that share a weight.",
        "Change weights outside, call torch.clear_autocast_cache() after the change, or pass cache_enabled=False.",
    ),
    Explanation(
        "autocast-bypass",
        "No in-place or out= variant stands where autocast would have cast for the plain op. Fails when it raises or "
        "writes another dtype than the rule gives; warns when it ran in float32 where it could have run in 16 bits.",
        "Mutating overloads that run with autocast on are matched by their schema to the plain overload, whose rule on "
        "that device tells what would have been cast. Those of optimizers and of PyTorch's own library do not count.",
        "Calls of addmm_, baddbmm_, exp_, torch.mm(..., out=...): autocast has kernels for plain ops only.",
        "Call the plain op and assign its result.",
    ),
    Explanation(
        "autocast-thread",
        "A thread that was started inside a region computes in the region's dtype, unless it chose another one itself.",
        "Instances of threading.Thread and tasks of ThreadPoolExecutor are followed. An op counts when autocast, as it "
        "was where the thread was started, would have cast its inputs. A torch.autocast without dtype is no choice of "
        "a dtype. Threads of other pools are seen only where they are started inside.",
        "Autocast's state belongs to one thread: a new one starts with it off, and torch.nn.parallel.parallel_apply "
        "passes it on without the dtype.",
        "Enter torch.autocast(device, dtype=...) inside the thread's function.",
    ),
    Explanation(
        "autocast-checkpoint",
        "A forward that backward computes again runs under the same autocast state as before.",
        "Ops of Python code that the autograd engine calls are matched to the forward by op and source line, or by the "
        "module of PyTorch that ran them. Fails where both the state and the dtypes of the inputs differ, and where "
        "torch.utils.checkpoint refused the recomputation after the state had changed.",
        "A checkpoint written by hand that does not restore autocast; a flag that chooses the dtype and changes before "
        "backward.",
        "Use torch.utils.checkpoint, or keep the state in forward and enter torch.autocast with it in backward.",
    ),
    Explanation(
        "autocast-function",
        "The Python backward of a torch.autograd.Function runs under the autocast state of its forward. Fails where an "
        "op had mixed dtypes or 16 bits where its rule is float32; warns where it ran in float32 instead of 16 bits, "
        "unless the backward casts by itself.",
        "The states of a Function's forward are kept with its context, with setup_context by its code. Ops that its "
        "backward runs with autocast off are looked up in the policy: what counts is whether the rule would have "
        "changed a dtype. A Function that switched autocast off for a part of its forward is left alone.",
        "Backward runs outside the region. A plain Function does not restore autocast.",
        "Decorate with torch.amp.custom_fwd and torch.amp.custom_bwd, or enter torch.autocast in backward.",
    ),
    Explanation(
        "blame",
        "A subject passes at every stage from eager low precision to torch.compile. Where it does not, the verdict "
        "names the stage, the first op whose error leaves the bound, and the smallest set of modules that mends it in "
        "float32.",
        "Eager low precision is judged as the audit does, compiled code beside eager mode and float64 as "
        "compiled-error does, at aot_eager, Inductor with emulated casts, and Inductor. In eager mode every op is held "
        "against the same op of the float64 run; in compiled code the first k nodes of the graphs are compiled, the "
        "rest run eagerly, and k is bisected. The modules are found by delta debugging on the tree of modules, each "
        "set tried by running the code that is printed; the step is timed in pairs with and without it.",
        "What the named stage, op and check say: see the page of the check.",
        "Paste the code and call keep_in_float32(model), set what the hint names, or leave the module out of "
        "compilation. Where no set of modules mends it, mend the op at the line that is named.",
    ),
    Explanation(
        "graph-break",
        "A call of a compiled function stays in one graph. Fails with each place at which a graph ends, when one call "
        "runs into more of them than max_breaks.",
        "The subject runs compiled, as it would for its user, and Dynamo's own records of breaks are read: place, "
        "reason, advice. How often a call runs into one is counted by the functions behind it that really run. What "
        "torch._dynamo.explain and fullgraph=True say is told where they part: fullgraph captures .item(), a plain "
        "compile does not.",
        "An if on a tensor's values, .item() or print for logging, a library that Dynamo cannot follow, "
        "torch.compiler.disable, a try block. Each costs a synchronisation or a round through Python, and what could "
        "be fused across it is not.",
        "Compute both sides and choose with torch.where or clamp, return what is to be logged as a tensor, set "
        "torch._dynamo.config.capture_scalar_outputs, or accept the place with max_breaks.",
    ),
    Explanation(
        "recompile",
        "What is compiled serves all calls. Fails when more than max_recompiles compilations come after the warm-up "
        "or, in it, for a value that had varied before.",
        "All calls run as a warm-up and once more. Of each recompilation the guards that failed are read, one for each "
        "older graph; told is the one that differs in something new, by kind: shape, dtype, training flag, grad mode, "
        "autocast, inference mode, constant. In the warm-up each value may vary once: so Dynamo learns which size is "
        "dynamic. What observe_graphs watches has no warm-up: only that first new size is free.",
        "A Python number or a layer's index that changes, a size with dynamic=False or of 1, train and eval or grad "
        "modes in turn, objects made anew for each call. After eight graphs of one function it runs eager.",
        "Mark what varies with torch._dynamo.mark_dynamic, keep numbers in buffers or tensors, warm up in each mode "
        "that occurs, or accept them with max_recompiles.",
    ),
    Explanation(
        "eager-fallback",
        "What is to run compiled does. Fails for modules and functions that ran as plain Python inside the compiled "
        "region, though no graph break is the reason.",
        "While the subject runs after its warm-up, Python's profiling hook tells whose own code runs where Dynamo's "
        "should. The reason comes from Dynamo's records: the limit of recompilations, an exception of the backend that "
        "suppress_errors swallowed, or none. Compiled block by block, each block is named.",
        "More graphs of one function than torch._dynamo.config.recompile_limit (8), as with an integer per layer in "
        "regional compilation; suppress_errors; code in files that Dynamo leaves out; the stance force_eager.",
        "Mend the guard that fails, see recompile; switch suppress_errors off and read the exception; leave out of the "
        "compiled region what is not to be compiled.",
    ),
    Explanation(
        "cache-artifacts",
        "What torch.compiler.save_cache_artifacts saves is something, and what load_cache_artifacts loads is used. "
        "Fails otherwise, with the calling line.",
        "Calls of the two functions are seen in this process and in Python processes that it starts, with the graphs "
        "compiled before and after; the keys that were loaded are looked up among those that the caches hit. A child "
        "process reports through a file, by a sitecustomize on PYTHONPATH; one started with -I, -E or -S does not.",
        "Saving before the first compiled call, or in a process that did not compile; loading after it; another "
        "release, model, shape or setting than when it was saved.",
        "Run the compiled function once, forward and backward, then save; load before its first call.",
    ),
    Explanation(
        "cudagraph",
        "Where the mode asks for CUDA graphs, each graph becomes one, and no output is read after the next run has "
        "overwritten it. Skipped without a CUDA device.",
        "Inductor's own reasons for leaving out CUDA graphs are read, and the exception that PyTorch raises for an "
        "output that was overwritten. With mode max-autotune a graph left out is a warning.",
        "Tensors on the CPU, inputs changed in place, dynamic shapes, outputs kept from step to step.",
        "Keep all inputs on the device, clone outputs that are kept, or call "
        "torch.compiler.cudagraph_mark_step_begin() before each step.",
    ),
    Explanation(
        "coverage",
        "Something was looked at. Nothing looked at is a failure, and so is a compiled run without a graph, unless "
        "Dynamo says why (a skip). Warns where no op computed in 16 bits.",
        "Counts of ops, tensors, modules, outputs, gradients and graphs, and what could not be measured with the "
        "reason.",
        "Inputs with which nothing is computed, a model that torch._dynamo.disable excludes.",
        "Give inputs with which the model does its work.",
    ),
)

EXPLANATIONS: Mapping[str, Explanation] = MappingProxyType({page.slug: page for page in _PAGES})


def explain(slug: str) -> Explanation:
    """The page of one check. Raises `UsageError` naming the checks for an unknown slug."""
    if slug not in EXPLANATIONS:
        near = get_close_matches(slug.lower(), EXPLANATIONS, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"there is no check {slug!r}{meant}; there are {', '.join(EXPLANATIONS)}")
    return EXPLANATIONS[slug]
