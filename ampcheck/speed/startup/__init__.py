"""The cost of a compiled start: fresh processes with empty caches, warm caches and artifacts, and the break-even.

judge      the run with its tables; checks: the findings
measure    launches the processes; child_process: the commands of each; stats: the figures
breakeven  after how many calls compilation has paid
"""
