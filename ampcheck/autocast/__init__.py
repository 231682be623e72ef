"""What autocast does to each op: probed, shipped per release, compared, emulated, locked, and guarded in use.

policy      rules and facts as data; no torch       state       autocast's own switches
probe       reads a policy from the installed torch  snapshots   the shipped ones, in `data/`
drift       differences, history, assert_policy      views       policies as tables and JSON
kernels     the rules as Python kernels              emulate     puts them in the place of the CPU's
redirect    `torch.autocast` for that device         missing     kernels that only the CPU lacks
calls       which ops a model sends through it       observe     dtypes op by op, eager and compiled
locks/      the lock file and its checks             guards/     how code uses autocast, while it runs
judge       all of it, for `ampcheck audit`
"""
