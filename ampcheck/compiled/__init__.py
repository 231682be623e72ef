"""Did torch.compile keep the model whole and its numbers right? Measured on what really runs compiled, then judged.

hygiene         runs a subject compiled and notes breaks, recompiles, fallbacks, caches; assert_graph, observe_graphs
hygiene_checks  judges what was noted; no torch; hygiene_records: the notes; hygiene_run: the passes of a subject
hygiene_trace   reads PyTorch's records of its compilations; hygiene_guards: why a graph was compiled again
hygiene_calls   which code really ran; hygiene_noting: all notes together; hygiene_child*: the same in child processes
accuracy        eager mode, compiled code and float64 on equal data and random streams; assert_compiled, judge_accuracy
accuracy_checks judges the errors of both; no torch
ladder          one arm at one stage of the compiler: eager, aot_eager, emulated casts, inductor
blame           names the stage, the op and the modules of a failure; blame_arm runs, blame_stats judges
locate          the first op of an eager run beyond its bound; cut: the first node of the compiled graphs
keep            the smallest set of modules to keep in float32, as code; cost: its step time
"""
