"""Checks of speed, start-up, compile time and memory."""

from __future__ import annotations

from ampcheck.catalog import declared

SPEEDUP = declared(
    "speedup",
    "speed",
    "Each arm, such as the compiled model, is at least a given number of times as fast as the reference, such as "
    "eager mode. Undecided if the machine is too noisy or the time too short.",
    "All arms take turns, block by block, in random order in one process, each twice a cycle; the difference between "
    "the two runs of the reference, its A/A twin, is the noise. The ratio is the median of the paired ratios. It "
    "fails when the exact interval of the median is below the limit and the median is below it by more than the "
    "minimum effect (3 %). The confidence of the interval accounts for every comparison of the suite and every look "
    "at the growing data, so that at most one suite in a hundred fails without a cause. It is not comparable if "
    "reference and twin differ by more than the minimum effect and the arm by no more than they do.",
    "Graph breaks, recompilations, a step so short that guards and launches cost more than fusion saves, eager "
    "kernels that are as good already, memory-bound work in which nothing can be fused, casts of autocast.",
    "Check ampcheck.assert_compiled first, then a profile; compare modes with ampcheck speed --matrix. If undecided, "
    "raise the budget, or leave other work off the machine.",
    unit="times as fast",
)

REGRESSION = declared(
    "regression",
    "speed",
    "The head is as fast as the base. In a history: no lasting step down.",
    "With ampcheck speed --base: base, a twin of it, and head run in separate processes that take turns block by "
    "block, in at least three launches, since two launches of the same compiled code differ by 2 to 3 %; the "
    "interval includes the variation of launches. Dynamo's counts, graph breaks and recompilations, are compared "
    "first. In a history, steps are detected in each series of one hardware; the detector has at most 1 % false "
    "alarms for each series of 60 points, so about one in a hundred series. A step is a warning, since it cannot "
    "be fixed in the current build.",
    "More work in the step, a graph break, a shape that recompiles, a new cast by autocast, a new release of PyTorch, "
    "a changed flag.",
    "The finding says whether the reference became faster or the arm slower, and between which commits; "
    "torch.profiler shows the ops that grew.",
    unit="times as fast",
)

START_UP = declared(
    "start-up",
    "speed",
    "A process that starts with warm caches, or that loads artifacts of torch.compiler.save_cache_artifacts, compiles "
    "no graph. Fails for each way to start in which a graph is not in the cache, or no cache is used.",
    "The subject starts in fresh processes with separate cache folders: empty, then warm from the first one, then "
    "empty with the artifacts loaded. PyTorch's own records show for each graph whether the FX graph cache and the "
    "AOTAutograd cache contained it; seconds are reported and never judged. A graph that is traced again and then "
    "found is a warning.",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES or a setting that disables a cache; a model that differs from process to "
    "process in a constant, a name or an order; artifacts of another release, device or setting; a graph that PyTorch "
    "refuses to cache, for the reason it gives.",
    "Enable the caches, and remove the reported difference in the key. A hit does not remove all costs: on a CPU an "
    "empty folder costs time even if the artifacts contain every graph (measured: 54 s of 121 s remained); keep the "
    "whole of TORCHINDUCTOR_CACHE_DIR from run to run if you can.",
)

COMPILE_TIME = declared(
    "compile-time",
    "speed",
    "Compilation with empty caches costs no more seconds than the limit, and pays off after no more calls than the "
    "limit. Judged only if a limit is given.",
    "The cost is the time of the first steps beyond that of as many steps in the steady state, imports of the "
    "compiler included, less the same for eager mode. The saving of a call is the typical eager time and the paired "
    "ratio to it, measured block by block in one process. The number of calls is cost divided by saving, with a "
    "bootstrap interval, and infinite if compiled code is not faster. Fewer than three launches are assumed to be 30 "
    "% off and never fail.",
    "Many different blocks, one graph for each shape, max-autotune, a backward; a machine with a slow C++ compiler; a "
    "step so short that nothing can be saved.",
    "Compile repeated blocks, not the whole (module.compile() on each); mark varying dimensions with "
    "torch._dynamo.mark_dynamic; keep the caches or ship artifacts; leave short runs eager.",
)

PEAK_MEMORY = declared(
    "peak-memory",
    "speed",
    "A compiled step needs at most 1.1 times the memory of an eager one, with 1 MiB of slack, or the given limit. "
    "Skipped with the reason if memory cannot be measured.",
    "The highest sum of tensors beyond the memory in use when the step begins: on the CPU by the allocations that "
    "PyTorch's profiler records, to the byte and the same from run to run; on an accelerator max_memory_allocated, "
    "from before the first step, so that pools count. Scratch space of libraries, and on the CPU allocations of other "
    "threads, are not measured.",
    "Activations that the compiled graph saves and eager mode frees, pools of CUDA graphs, padding and workspaces of "
    "max-autotune, an input that stays alive because a graph break ends the graph.",
    "Lower torch._functorch.config.activation_memory_budget, checkpoint blocks, do without reduce-overhead, or raise "
    "the limit if the speed is worth it.",
)
