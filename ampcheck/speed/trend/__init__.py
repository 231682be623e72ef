"""Since when is it slower? Change points of a history, with an error rate that was simulated before it was trusted."""

from ampcheck.speed.trend.checks import check_trend, trend_run
from ampcheck.speed.trend.detect import Change, change_points

__all__ = ["Change", "change_points", "check_trend", "trend_run"]
