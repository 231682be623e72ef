"""Beside public names, what tests of promises use: the command line in this process, and the runs that asserts emit."""

from ampcheck.cli.main import main as main
from ampcheck.core.run import collect as collect
