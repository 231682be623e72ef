"""`--ampcheck-html` and its ini twin: one page, written by the process that owns the terminal."""

from __future__ import annotations

import pytest


def test_the_page_is_written(suite: pytest.Pytester, spread: str) -> None:
    result = suite.runpytest_subprocess(spread, "--ampcheck-html=page.html")
    result.stdout.fnmatch_lines(["ampcheck: *", "=* ampcheck *=", f"wrote {suite.path / 'page.html'}"])
    page = suite.path.joinpath("page.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    for text in ("test_suite.py::test_overflows", "an output stays finite", "second"):
        assert text in page


def test_the_ini_twin(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nampcheck_html = page.html\n")
    suite.runpytest_subprocess("-n0")
    assert suite.path.joinpath("page.html").is_file()


def test_both_files_at_once(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess("-n0", "--ampcheck-html=page.html", "--ampcheck-json=run.json")
    result.stdout.fnmatch_lines(["wrote *page.html", "wrote *run.json"])


def test_a_renderer_that_breaks_does_not_hide_the_failures(suite: pytest.Pytester) -> None:
    suite.makeconftest(
        """
        import ampcheck.report.html

        def broken(run, path):
            raise RuntimeError("the renderer broke")

        ampcheck.report.html.write_html = broken
        """
    )
    result = suite.runpytest_subprocess("-n0", "--ampcheck-html=page.html")
    assert result.ret != pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["E *fail: Big: an output stays finite", "FAILED test_suite.py::test_overflows*"])
    result.stderr.fnmatch_lines(["*RuntimeError: the renderer broke"])
