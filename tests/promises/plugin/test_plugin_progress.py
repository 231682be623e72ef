"""A test that takes seconds shows that it runs, although pytest captures what it prints."""

from __future__ import annotations

import pytest

SLOW = """
import time
{imports}
from ampcheck.core import heartbeat

heartbeat.EVERY = 0.1

def test_of_a_model():
    time.sleep(0.5)

def test_quick():
    pass
"""


def lines_of(pytester: pytest.Pytester, imports: str, *options: str) -> list[str]:
    pytester.makepyfile(SLOW.format(imports=imports))
    result = pytester.runpytest_subprocess("-n0", *options)
    assert result.ret == pytest.ExitCode.OK
    return [line for line in result.errlines if line.startswith("ampcheck: ")]


def test_a_long_test_that_uses_ampcheck_is_named_while_it_runs(pytester: pytest.Pytester) -> None:
    lines = lines_of(pytester, "import ampcheck")
    assert len(lines) >= 2
    assert all(line.startswith("ampcheck: test_of_a_model, ") for line in lines)


def test_the_stage_of_an_audit_is_named(pytester: pytest.Pytester) -> None:
    body = "import ampcheck\nfrom ampcheck.core.progress import current_listener\n"
    pytester.makepyfile(
        SLOW.format(imports=body).replace(
            "time.sleep(0.5)", "current_listener().progress('eager', 1, 4); time.sleep(0.5)"
        )
    )
    result = pytester.runpytest_subprocess("-n0")
    assert "ampcheck: test_of_a_model: eager (1 of 4 done), 0 s" in result.errlines


@pytest.mark.parametrize(("imports", "options"), [("", ()), ("import ampcheck", ("-qq",))], ids=["other tests", "-qq"])
def test_other_tests_and_quiet_sessions_show_nothing(
    pytester: pytest.Pytester, imports: str, options: tuple[str, ...]
) -> None:
    assert lines_of(pytester, imports, *options) == []
