"""Statistics from inside the graphs that `torch.compile` makes, forward and backward.

sites           the values of a lowered graph that are measured, with their names in the user's model
statistics      the reductions that are appended to the graph, and the layout of their packed result
owners          the modules that a call of a graph runs with: blocks that share a graph
accumulators    sums of the packed results over the calls of a graph
graph_variants  the plain graph and its variants with statistics
op_by_op        the plain graph alone, and its statistics from its ops, run one by one
telemetry       instrumentation and sampling
stats           the frozen record: one site, all sites
checks          pure functions from the record to findings
"""
