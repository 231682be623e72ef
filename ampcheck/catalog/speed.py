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
    "interval carries the variation of launches. What Dynamo counts, graph breaks and recompilations, is compared "
    "first. In a history a detector searches each series of one hardware for steps, with false alarms in at most "
    "1 % of series of 60 points: of a hundred series, expect one. A step is a warning, since a build of today cannot "
    "mend the past.",
    "More work in the step, a graph break, a shape that compiles anew, a cast that autocast did not make before, "
    "a new release of PyTorch, a changed flag.",
    "The finding says whether the reference became faster or the arm slower, and the commits between which it "
    "happened; torch.profiler shows the ops that grew.",
)

START_UP = Check(
    "start-up",
    "speed",
    "A process that starts with warm caches, or that loads what torch.compiler.save_cache_artifacts saved, makes "
    "no graph anew. Fails for each way to start in which a graph is not found in the cache, or no cache is asked.",
    "The subject is started in fresh processes with cache folders of their own: empty, then as the first one left "
    "them, then empty with the artifacts loaded. PyTorch's own records say of each graph if the FX graph cache "
    "and the AOTAutograd cache had it; seconds are told and never decide. A graph that is traced again and found "
    "after all is a warning.",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES or a setting that switches a cache off; a model that differs from process "
    "to process in a constant, a name or an order; artifacts of another release, device or setting; a graph that "
    "PyTorch refuses to cache, for the reason it gives.",
    "Switch the caches on, and mend what the key is told to differ in. A hit is not all: on a CPU an empty folder "
    "costs time even where the artifacts have every graph (measured: 54 s of 121 s remained); keep "
    "the whole of TORCHINDUCTOR_CACHE_DIR from run to run where you can.",
)

COMPILE_TIME = Check(
    "compile-time",
    "speed",
    "Compilation with empty caches costs no more seconds than the limit, and has paid after no more calls than the "
    "limit. Judged only where a limit is given.",
    "Cost is what the first steps take beyond as many steps in the steady state, imports of the compiler included, "
    "less the same of eager. What a call saves is the typical eager time and the paired ratio to it, both taken "
    "block by block in one process; cost through saving is the number of calls, with a bootstrap interval, and "
    "never where compiled is not faster. Fewer than three launches are taken to be 30 % off and fail nothing.",
    "Many different blocks, one graph for each shape, max-autotune, a backward; a machine whose C++ compiler is "
    "slow; a step so short that nothing can be saved.",
    "Compile repeated blocks, not the whole (module.compile() on each); mark what varies with "
    "torch._dynamo.mark_dynamic; keep the caches or ship artifacts; leave short runs eager.",
)

PEAK_MEMORY = Check(
    "peak-memory",
    "speed",
    "A compiled step needs at most 1.1 times the memory of an eager one, with 1 MiB of slack, or what the limit "
    "says. Skipped with the reason where memory is not told.",
    "The highest sum of tensors beyond what is held when the step begins: on the CPU from what the allocator tells "
    "PyTorch's profiler, to the byte and the same from run to run; on an accelerator max_memory_allocated, from "
    "before the first step, so that pools count. Scratch space of libraries, and what other threads than the "
    "calling one allocate on the CPU, is not seen.",
    "Activations that the compiled graph saves and eager frees, pools of CUDA graphs, padding and workspaces of "
    "max-autotune, an input that is kept because a graph break ends the graph.",
    "Lower torch._functorch.config.activation_memory_budget, checkpoint blocks, leave reduce-overhead out, or "
    "raise the limit if the speed is worth it.",
)
