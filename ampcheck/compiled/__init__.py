"""Checks of models under torch.compile: accuracy compared with eager mode and float64, graphs, and causes of failures.

assert_compiled  both families of checks, as an assertion
accuracy/   eager mode, compiled code and float64 on equal data and random streams
  judge       measures and judges a subject, or two records of an audit; arms: one trajectory; ladder: the stages
  compare     errors of every tensor; stats: the record and its limits; checks: the findings
graph/      breaks, recompilations, eager fallbacks, caches
  judge       of a subject or of a block (`GraphObservation`); run: the passes of a subject; recorder: its events
  trace       reads PyTorch's trace of compilations; calls: which code ran; startup_hook: for child processes
  stats       the record; checks: the findings
blame/      the stage, the op and the modules of a failure (`blame`, `ampcheck blame`)
  blame       the search; arm: one subject in one dtype; stats: the record, findings and tables
  locate      the first op of an eager run beyond its bound; bisect: the first node of the compiled graphs
  minimise    the smallest set of modules to keep in float32, as code; cost: its step time
options     frozen options of all these, validated when they are created

Values inside the graphs are measured in `ampcheck.telemetry`.
"""
