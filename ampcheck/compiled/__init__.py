"""Did torch.compile keep the model whole and its numbers right? Measured on what really runs compiled, then judged.

blame/      names the stage, the op and the modules of a failure (`blame`, `ampcheck blame`)
  blame       the search and its report; arm: one run of it; stats: what is found, and the findings
  locate      the first op of an eager run beyond its bound; cut: the first node of the compiled graphs
  keep        the smallest set of modules to keep in float32, as code; cost: its step time
accuracy/   eager mode, compiled code and float64 on equal data and random streams (`assert_compiled`)
  judge       the entry points; arms: one trajectory; ladder: one arm at one stage of the compiler
  compare     how far everything lies; stats: the record and its limits; checks: the findings
  pairs       the same findings from records that an audit has already
graph/      breaks, recompilations, what runs eager, caches (`assert_graph`, `observe_graphs`)
  judge       the entry points; run: the passes of a subject; checks: the findings; records: what is noted
  trace       reads PyTorch's records of its compilations; guards: why a graph was compiled again
  calls       which code really ran; noting: all notes together; children, child: the same in child processes
options     what torch.compile may be given, checked before anything runs

What is inside the graphs is measured in `ampcheck.telemetry`.
"""
