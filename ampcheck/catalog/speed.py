"""Pages on speed: is it fast enough, has it become slower, what a start costs, when compilation has paid, memory."""

from __future__ import annotations

from ampcheck.core.check import Check

SPEEDUP = Check(
    "speedup",
    "speed",
    "Each arm, such as the compiled model, is at least so many times as fast as the reference, such as eager mode. "
    "Undecided where the machine is too noisy or the time too short.",
    "All arms take turns, block by block, in random order in one process, each twice a cycle; the difference of "
    "the two runs of the reference is noise, its A/A twin. The ratio is "
    "the median of the paired ratios. It fails when the exact interval of the median lies below the limit and the "
    "median below it by more than the minimum effect (3 %); the interval's confidence allows for every comparison "
    "of the suite and every look at the growing data, so that one suite in a hundred, at most, fails without a "
    "cause. It is not comparable where reference and twin differ by more than the minimum effect and the arm by no "
    "more than they do.",
    "Graph breaks, recompilations, a step so short that guards and launches cost more than fusion saves, eager "
    "kernels that are as good already, memory-bound work in which nothing can be fused, casts of autocast.",
    "Look at ampcheck.assert_graph first, then at a profile; compare modes with ampcheck speed --matrix. "
    "Undecided: raise the budget, or leave other work off the machine.",
    unit="times as fast",
)

REGRESSION = Check(
    "regression",
    "speed",
    "The head is as fast as the base. In a history: no step down that stays.",
    "With ampcheck speed --base: base, a twin of it, and head run in processes of their own that take turns block "
    "by block, in at least three launches, since two launches of the same compiled code differ by 2 to 3 %; the "
    "interval includes the variation of launches. Dynamo's counts, graph breaks and recompilations, are compared "
    "first. In a history a detector looks for steps in each series of one hardware; it reports one where there is "
    "none in at most 1 % of series of 60 points, so that of a hundred series one may be reported without a cause. A "
    "step is a warning, since a build of today cannot mend the past.",
    "More work in the step, a graph break, a shape that is compiled again, a cast that autocast did not make before, "
    "a new release of PyTorch, a changed flag.",
    "The finding says whether the reference became faster or the arm slower, and the commits between which it "
    "happened; torch.profiler shows the ops that grew.",
    unit="times as fast",
)

START_UP = Check(
    "start-up",
    "speed",
    "A process that starts with warm caches, or that loads artifacts of torch.compiler.save_cache_artifacts, compiles "
    "no graph. Fails for each kind of start in which a graph is not found in the cache, or no cache is asked.",
    "The subject is started in fresh processes with cache folders of their own: empty, then with the contents of the "
    "first start, then empty with the artifacts loaded. PyTorch's own records report for each graph if the FX graph "
    "cache and the AOTAutograd cache had it; seconds are shown and never decide. A graph that is traced again and "
    "found after all is a warning.",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES or a setting that switches a cache off; a model that differs from process "
    "to process in a constant, a name or an order; artifacts of another release, device or setting; a graph that "
    "PyTorch refuses to cache, for the reason it gives.",
    "Switch the caches on, and remove the differences of the key that the finding names. A hit is not all: on a CPU an "
    "empty folder costs time even where the artifacts have every graph (measured: 54 s of 121 s remained); keep "
    "the whole of TORCHINDUCTOR_CACHE_DIR from run to run where you can.",
)

COMPILE_TIME = Check(
    "compile-time",
    "speed",
    "Compilation with empty caches costs no more seconds than the limit, and has paid after no more calls than the "
    "limit. Judged only where a limit is set.",
    "Cost is the time of the first steps beyond as many steps in the steady state, imports of the compiler included, "
    "less the same of eager. A call saves the typical eager time less that divided by the paired ratio, both timed "
    "block by block in one process; cost divided by saving is the number of calls, with a bootstrap interval, and "
    "never where compiled is not faster. Fewer than three launches are assumed to be 30 % off and fail nothing.",
    "Many different blocks, one graph for each shape, max-autotune, a backward; a machine whose C++ compiler is "
    "slow; a step so short that nothing can be saved.",
    "Compile repeated blocks, not the whole (module.compile() on each); mark sizes that vary with "
    "torch._dynamo.mark_dynamic; keep the caches or ship artifacts; leave short runs eager.",
)

PEAK_MEMORY = Check(
    "peak-memory",
    "speed",
    "A compiled step needs at most 1.1 times the memory of an eager one, with 1 MiB of slack, or the limit in bytes. "
    "Skipped with the reason where memory is not reported.",
    "The highest sum of tensors beyond those at the beginning of the step: on the CPU from the allocator's reports to "
    "PyTorch's profiler, to the byte and the same from run to run; on an accelerator max_memory_allocated, from "
    "before the first step, so that pools count. Scratch space of libraries, and allocations of other threads than the "
    "calling one on the CPU, are not seen.",
    "Activations that the compiled graph saves and eager frees, pools of CUDA graphs, padding and workspaces of "
    "max-autotune, an input that stays alive because a graph break ends the graph.",
    "Lower torch._functorch.config.activation_memory_budget, checkpoint blocks, leave reduce-overhead out, or "
    "raise the limit if the speed is worth it.",
    unit="bytes",
)
