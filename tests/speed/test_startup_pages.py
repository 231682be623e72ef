"""The pages of help on starts."""

from ampcheck.catalog import REGISTRY
from ampcheck.speed.startup.checks import STARTUP_CHECKS


def test_each_check_of_a_start_has_a_page_that_is_whole():
    pages = REGISTRY
    assert set(STARTUP_CHECKS) <= set(pages)
    for slug in STARTUP_CHECKS:
        page = pages[slug]
        assert all(len(text) > 60 for text in (page.requires, page.measured, page.causes, page.mend))
