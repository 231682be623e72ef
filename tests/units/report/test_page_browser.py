"""The page in a real Chromium: filters, keyboard, details, dark mode, a phone, paper, and axe-core.

Skipped, with the reason, where playwright, Chromium (`AMPCHECK_CHROMIUM`, by default of the system) or axe-core
(`AMPCHECK_AXE`, by default in node_modules) are missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_run import sample_run
from test_html import hostile_run
from three_runs import RUNS

from ampcheck.core.run import Coverage, Finding, ModelMap, Run, Site, Verdict, Where
from ampcheck.report import write_html

sync_api = pytest.importorskip("playwright.sync_api", reason="the page is not driven: playwright is not installed")
CHROMIUM = os.environ.get("AMPCHECK_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="the page is not driven: there is no Chromium on this machine"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1200, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of the three real runs, of many findings and of hostile text."""
    folder = tmp_path_factory.mktemp("pages")
    runs = {name: run() for name, run in RUNS.items()} | {"sample": sample_run(), "hostile": hostile_run()}
    for name, run in runs.items():
        write_html(run, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in runs}


@pytest.fixture
def show(browser: Any, files: dict[str, Path]) -> Iterator[Any]:
    """Open a page of a run, from its file; nothing may be requested and nothing may be reported on the console."""
    contexts, problems, addresses = [], [], []

    def opened(name: str, *, viewport: dict[str, int] = DESK, **options: Any) -> Any:
        context = browser.new_context(viewport=viewport, **options)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: problems.append(request.url))
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        addresses.append(files[name].as_uri())
        page.goto(addresses[-1])
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [problem for problem in problems if problem not in addresses] == []


def unfold(page: Any) -> None:
    """Open all details."""
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")


def shown(page: Any, selector: str) -> int:
    return page.locator(selector).filter(visible=True).count()


def test_what_failed_is_seen_first_with_its_line_its_values_and_its_cure(show: Any) -> None:
    page = show("overflowing")
    first = page.locator("main article").first
    box = first.bounding_box()
    assert box["y"] < DESK["height"]
    assert first.locator("h3").inner_text() == "overflow"
    assert first.locator("mark").inner_text() == ".sum(-1)"  # the operation, not the chain that it ends
    assert first.locator(".marked").count() == 1
    assert first.locator(".code .line").count() > 2
    around = first.locator(".around tbody th").all_inner_texts()
    assert around == ["goes in", "comes out", "in float64"]
    assert "keep this op in float32" in first.inner_text()
    assert "ampcheck explain overflow" in first.locator(".command").all_inner_texts()


def test_the_markers_of_the_values_stand_in_their_order_on_the_axis(show: Any) -> None:
    rows = show("overflowing").locator("main article").first.locator(".around tbody tr")
    places = [rows.nth(n).locator("circle, .edge").first.bounding_box()["x"] for n in range(3)]
    assert places[0] < places[2] < places[1]  # what goes in, what float64 has beyond the end, infinity


def test_verdicts_filter_what_is_shown(show: Any) -> None:
    page = show("sample")
    assert page.locator("#filter").is_visible()
    page.locator("#filter input[value=warn]").check()
    assert shown(page, "main article.warn") == 2
    assert shown(page, "main article.fail") == 0
    assert page.locator("#passed").is_hidden()
    entries = page.locator("main [data-v]").count()
    assert page.locator("#shown").inner_text() == f"{shown(page, 'main [data-v]')} of {entries} entries"
    page.locator("#filter button[type=reset]").click()
    sync_api.expect(page.locator("#shown")).to_have_text("")
    assert shown(page, "main article.fail") == 3


def test_checks_subjects_and_modules_filter_what_is_shown(show: Any) -> None:
    page = show("sample")
    page.locator("#filter select[name=check]").select_option(label="flush")
    assert set(page.locator("main article h3").filter(visible=True).all_inner_texts()) == {"flush"}
    page.locator("#filter select[name=check]").select_option(label="all")
    subject = page.locator("main article .subject").first.inner_text()
    page.locator("#filter select[name=subject]").select_option(label=subject)
    assert set(page.locator("main article .subject").filter(visible=True).all_inner_texts()) == {subject}
    page.locator("#filter select[name=subject]").select_option(label="all")
    page.locator("#filter input[name=module]").fill("LAYER4.1")
    modules = page.locator("main article .place").filter(visible=True).all_inner_texts()
    assert modules
    assert all("layer4.1.bn2" in module for module in modules)


def test_the_map_is_filtered_by_module(show: Any) -> None:
    page = show("overflowing")
    page.locator("#filter input[name=module]").fill("attention.q")
    names = page.locator("#map .map li").filter(visible=True)
    assert names.count() >= 1
    assert all("query" in text for text in names.locator("summary code").all_inner_texts())


def test_filters_unfold_what_they_find(show: Any) -> None:
    page = show("healthy")
    passed = page.locator("#passed li")
    assert not passed.first.is_visible()
    page.locator("#filter input[value=pass]").check()
    assert passed.first.is_visible()


def test_the_keyboard_reaches_filters_details_and_evidence(show: Any) -> None:
    page = show("overflowing")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the findings"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "module"
    page.keyboard.type("head")
    assert page.locator("#shown").inner_text() != ""
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("#shown")).to_have_text("")
    row = page.locator("#map .map summary").nth(0)
    row.focus()
    page.keyboard.press("Enter")
    assert page.locator("#map .map .inside").first.is_visible()
    outline = row.evaluate("element => getComputedStyle(element).outlineStyle")
    assert outline != "none"


def test_a_module_opens_its_histogram_and_its_ops(show: Any) -> None:
    page = show("overflowing")
    page.locator("#map .map summary").first.click()
    inside = page.locator("#map .map .inside").first
    assert inside.locator(".bars svg").first.bounding_box()["height"] > 20
    assert "aten::sum.dim_IntList" in inside.locator("table").first.inner_text()
    assert "overflow" in inside.locator("table").first.inner_text()


def test_a_link_opens_the_details_that_hide_its_target(show: Any, files: dict[str, Path]) -> None:
    findings = tuple(Finding("flush", Verdict.FAIL, f"subject {n}", f"message {n}") for n in range(40))
    files["many"] = files["sample"].with_name("many.html")
    write_html(Run(findings=findings, coverage=Coverage({"ops": 1})), files["many"])
    page = show("many")
    target = page.locator("#finding-39")
    assert not target.is_visible()
    page.evaluate("location.hash = 'finding-39'")
    sync_api.expect(target).to_be_visible()


@pytest.mark.parametrize("name", [*RUNS, "sample", "hostile"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_without_scrolling_sideways(show: Any, name: str, scheme: str) -> None:
    page = show(name, viewport=PHONE, color_scheme=scheme)
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("getComputedStyle(document.body).fontSize") == "15px"


def test_the_dark_page_is_dark_and_so_are_its_charts(show: Any) -> None:
    def luminance(page: Any, selector: str, name: str) -> float:
        colour = page.locator(selector).first.evaluate(f"element => getComputedStyle(element).{name}")
        red, green, blue = (int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")[:3])
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = (show("training", color_scheme=scheme) for scheme in ("light", "dark"))
    assert luminance(light, "body", "backgroundColor") > 200 > 60 > luminance(dark, "body", "backgroundColor")
    assert luminance(dark, "body", "color") > 180
    assert luminance(dark, ".plot text", "fill") > 120 > luminance(light, ".plot text", "fill")


def test_paper_has_the_evidence_and_no_filters(show: Any) -> None:
    page = show("overflowing")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("#filter").is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#passed li").first.bounding_box()["height"] > 5
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") >= 2


def test_without_scripts_everything_can_be_read(show: Any) -> None:
    page = show("overflowing", java_script_enabled=False)
    assert page.locator("#filter").is_hidden()
    assert shown(page, "main article") == page.locator("main article").count() > 0
    page.locator("#passed summary").first.click()
    assert page.locator("#passed li").first.is_visible()


def test_hostile_text_runs_nothing_and_filters_work(show: Any) -> None:
    page = show("hostile")
    page.on("dialog", lambda dialog: pytest.fail("a script ran"))
    page.locator("#filter input[value=fail]").check()
    assert shown(page, "main article.fail") == 1
    assert page.locator("img").count() == 0


def test_runs_of_several_targets_stand_side_by_side(show: Any, files: dict[str, Path]) -> None:
    runs = [
        Run(
            findings=(Finding("overflow", verdict, f"target {n}", "m", Where("forward", "a")),),
            coverage=Coverage({"ops": 1}),
            maps=(ModelMap(f"target {n}", (Site("forward", "a", amax=1.0),)),),
        )
        for n, verdict in enumerate((Verdict.PASS, Verdict.FAIL, Verdict.WARN))
    ]
    files["targets"] = files["sample"].with_name("targets.html")
    write_html(runs[0] + runs[1] + runs[2], files["targets"])
    page = show("targets")
    assert page.locator(".matrix thead th").all_inner_texts() == ["check", "target 0", "target 1", "target 2"]
    assert page.locator(".matrix tbody td").all_inner_texts() == ["✓ pass", "✕ fail", "! warn"]
    assert page.locator(".map-of").count() == 3


def axe_file() -> Path | None:
    named = os.environ.get("AMPCHECK_AXE") or "node_modules/axe-core/axe.min.js"
    return Path(named) if Path(named).is_file() else None


@pytest.mark.skipif(axe_file() is None, reason="no accessibility check: set AMPCHECK_AXE to axe.min.js of axe-core")
@pytest.mark.parametrize("name", [*RUNS, "sample"])
@pytest.mark.parametrize(("viewport", "scheme"), [(DESK, "light"), (DESK, "dark"), (PHONE, "light")])
def test_axe_finds_no_violation(show: Any, name: str, viewport: dict[str, int], scheme: str) -> None:
    page = show(name, viewport=viewport, color_scheme=scheme, bypass_csp=True)
    unfold(page)
    path = axe_file()
    assert path is not None
    page.evaluate(path.read_text(encoding="utf-8"))
    violations = page.evaluate("axe.run().then(results => results.violations)")
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in violations] == []
