"""Checks of models under torch.compile: accuracy compared with float64, and graphs.

assert_compiled  both families of checks, as an assertion
accuracy/   compiled code compared with the exact values of a shadowed eager run
  judge       the runs of a subject, and the other stages of the compiler after a failure
  beside      the compiled run of an audit, compared with the audit's own eager run
  plans       how often a subject runs, and with which gradients; run: one run, with everything kept
  stats       the record; checks: the findings
graph/      breaks, recompilations, eager fallbacks, caches
  judge       of a subject or of a block (`GraphObservation`); run: the passes of a subject; recorder: its events
  trace       reads PyTorch's trace of compilations; calls: which code ran; startup_hook: for child processes
  stats       the record; checks: the findings
options     frozen options of all these, validated when they are created

Values inside the graphs are measured in `ampcheck.telemetry`.
"""
