"""Statistics from inside the graphs that `torch.compile` makes, forward and backward.

sites       which values of a lowered graph are measured, and what the user calls them
statistics  the reductions that are appended to the graph, and how their one packed result is read
owners      which module's weights a call of a graph runs with: blocks that share a graph are told apart
passes      a documented hook, where graphs cannot be had in another way
telemetry   the plain graph and its measured twin side by side, sampled, and what they gave
stats       the frozen record: one site, all sites
checks      pure functions from the record to findings
"""
