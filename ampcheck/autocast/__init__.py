"""Autocast's rules for each op: probed, shipped per release, compared, emulated, locked, and guarded in use.

state       autocast's own state                     policy      rules and facts as data, the shipped snapshots
probe       a policy of the installed PyTorch        drift       differences of policies and their history
kernels     the rules as Python kernels              emulate     the rules of another device on the CPU
missing     kernels that only the CPU lacks          device      where a subject runs
calls       which ops a model sends through it       observe     dtypes op by op, eager and compiled
views       policies as tables and JSON              locks/      the lock file and its checks
guards/     how code uses autocast while it runs     judge       `assert_policy`, and the parts of `audit`
"""
