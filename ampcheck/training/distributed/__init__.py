"""Training in several processes: what the ranks add up together, and whether they agree."""

from ampcheck.training.distributed.checks import check_distributed as check_distributed
from ampcheck.training.distributed.checks import distributed_tables as distributed_tables
from ampcheck.training.distributed.measure import measure_distributed as measure_distributed
from ampcheck.training.distributed.ranks import local_record as local_record
from ampcheck.training.distributed.ranks import measure_across_ranks as measure_across_ranks
from ampcheck.training.distributed.ranks import merge_across_ranks as merge_across_ranks
from ampcheck.training.distributed.runs import gather_runs as gather_runs
from ampcheck.training.distributed.runs import merge_ranks as merge_ranks
from ampcheck.training.distributed.stats import DistributedStats as DistributedStats
