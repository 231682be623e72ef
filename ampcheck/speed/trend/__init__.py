"""Change points of a history, with an error rate that was simulated."""

from ampcheck.speed.trend.checks import trend_run as trend_run
from ampcheck.speed.trend.detect import Change as Change
from ampcheck.speed.trend.detect import change_points as change_points
