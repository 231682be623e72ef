"""A model in every mode and precision: speed, memory, compilation and accuracy of each.

judge      the run with its tables; checks: the findings
measure    all arms of a workload in one job, paired; accuracy: the verdicts on the numbers of each; stats: the figures
"""
