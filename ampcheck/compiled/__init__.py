"""Did torch.compile keep the model whole and its numbers right? Measured on what really runs compiled, then judged.

hygiene         runs a subject compiled and notes breaks, recompiles, fallbacks, caches; assert_graph, observe_graphs
hygiene_checks  judges what was noted; no torch
"""
