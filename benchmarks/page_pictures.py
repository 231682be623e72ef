"""Pictures of the page for the documentation: three real runs, wide and narrow, light and dark, and a watched suite.

`python benchmarks/page_pictures.py [FOLDER]` writes them to docs/images. It needs playwright and Chromium.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "units" / "report"), str(ROOT / "docs" / "site")]

from snippets import Session  # noqa: E402  # the repository of the documentation
from three_runs import RUNS  # noqa: E402  # the runs that the tests of the page look at

from ampcheck.report import write_html  # noqa: E402

SIZES = {1200: 1500, 390: 1700}
"""Widths, and how much of the page is shown."""

LIMIT = 150_000
"""Bytes of a picture; one that is larger shows less of the page."""

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def take(page: Page, target: Path, width: int, start: float = 0.0) -> None:
    """A picture of the page from `start` pixels on, shorter until it is small enough."""
    height = SIZES[width]
    while True:
        clip = {"x": 0, "y": start, "width": width, "height": height}
        picture = page.screenshot(full_page=True, clip=clip, animations="disabled")
        if len(picture) <= LIMIT:
            target.write_bytes(picture)
            print(f"{target.relative_to(ROOT) if target.is_relative_to(ROOT) else target}: {len(picture):,} bytes")
            return
        height -= 100


def suite(file: Path) -> None:
    """The page of the documentation's repository under `pytest --ampcheck-watch`, which finds something."""
    session = Session(file.parent)
    command = [sys.executable, "-m", "pytest", "-q", "--ampcheck-watch", f"--ampcheck-html={file}"]
    subprocess.run(command, cwd=session.folder, env=session.environment, check=False)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chromium = os.environ.get("AMPCHECK_CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as pages, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, run in RUNS.items():
            file = Path(pages, f"{name}.html")
            write_html(run(), file)
            for width in SIZES:
                for scheme in ("light", "dark"):
                    context = browser.new_context(
                        viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
                    )
                    page = context.new_page()
                    page.goto(file.as_uri())
                    take(page, folder / f"page-{name}-{width}-{scheme}.png", width)
                    context.close()
        context = browser.new_context(viewport={"width": 1200, "height": 900})
        page = context.new_page()
        suite(Path(pages, "suite.html"))
        page.goto(Path(pages, "suite.html").as_uri())
        take(page, folder / "page-suite-1200-light.png", 1200)
        page.goto(Path(pages, "overflowing.html").as_uri())
        page.locator("#map .map summary").first.click()
        top = page.locator("#map").evaluate("section => section.getBoundingClientRect().top + scrollY")
        page.evaluate("document.querySelector('.map-head').style.position = 'static'")
        take(page, folder / "page-map-1200-light.png", 1200, top - 16)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
