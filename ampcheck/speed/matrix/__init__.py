"""Does `torch.compile` pay, in which mode and precision? Speed, memory, cost and accuracy of each, side by side.

judge      the run with its tables; checks: the findings
measure    all arms of a workload in one job, paired; accuracy: what the judges of numbers say of each
workloads  the built-in ones in two sizes, of models; stats: what is left of it
"""

from ampcheck.speed.matrix.judge import matrix_run as matrix_run
from ampcheck.speed.matrix.measure import measure_matrix as measure_matrix
from ampcheck.speed.matrix.stats import MatrixStats as MatrixStats
from ampcheck.speed.matrix.workloads import WORKLOADS as WORKLOADS
