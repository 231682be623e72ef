"""The page: one file, no network, nothing lost, nothing trusted."""

from __future__ import annotations

import hashlib
import html
import math
import re
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from runs import HOSTILE_RUN, RUNS
from sample_run import FLOAT16, PROBLEMS, module_names, sample_run

from ampcheck.core.errors import UsageError
from ampcheck.core.excerpt import Excerpt
from ampcheck.core.run import Band, Chart, Coverage, Finding, ModelMap, Run, Series, Site, Table, Verdict, Where
from ampcheck.report import render_html, write_html

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)>{{ 1234 * 1001 }}\"'&\x1b[31m\u202e"
VOID = {"meta", "br", "img", "link", "hr", "input"}


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(sample_run())


class Outline(HTMLParser):
    """Tags, ids and text of a page; `open_tags` is empty at the end of a page whose tags all match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.open_tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def hostile_run() -> Run:
    where = Where(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 3)
    site = Site(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 3, HOSTILE, 1.0, lost=HOSTILE)
    row = Series(HOSTILE, (-3.0, -2.0, 0.0, 1.0, 2.0), group=HOSTILE)
    excerpt = Excerpt((HOSTILE, HOSTILE), 3, 3, 2, 9)
    return Run(
        {HOSTILE: HOSTILE},
        tuple(
            Finding(
                HOSTILE,
                v,
                HOSTILE,
                HOSTILE,
                where,
                1.0,
                None,
                HOSTILE,
                HOSTILE,
                family=HOSTILE,
                excerpt=excerpt,
                reproduce=HOSTILE,
                accepted=HOSTILE,
            )
            for v in Verdict
        ),
        Coverage({HOSTILE: 1}, {HOSTILE: 2}),
        (Table(HOSTILE, (HOSTILE,), ((HOSTILE,),), HOSTILE, HOSTILE),),
        (Chart("range", HOSTILE, HOSTILE, HOSTILE, (row, row), (Band(HOSTILE, -4, 4),), HOSTILE, HOSTILE),),
        HOSTILE,
        (ModelMap(HOSTILE, (site, replace(site, op="")), (Band(HOSTILE, -4, 4),), HOSTILE),),
    )


def test_the_page_refers_to_nothing_outside(page: str) -> None:
    content = re.sub(r'content="[^"]*"', "", page)
    assert not re.search(r"https?:|url\((?!#)|@import|//\w", content)
    outline = Outline(page)
    assert not {"link", "img", "iframe", "object", "base"} & set(outline.tags)
    assert all((value or "").startswith("#") for name, value in outline.attributes if name in ("href", "src"))
    assert "default-src 'none'" in page


def test_no_script_but_the_own_one_of_the_page_may_run(page: str) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in html.unescape(page)
    assert Outline(page).tags.count("script") == 1


def test_the_page_is_well_formed_and_its_anchors_exist_once(page: str) -> None:
    outline = Outline(page)
    assert outline.open_tags == []
    assert len(outline.ids) == len(set(outline.ids))
    assert {value[1:] for name, value in outline.attributes if name == "href" and value} <= set(outline.ids)


def test_every_message_is_in_the_page(page: str) -> None:
    words = Outline(page).words
    for finding in sample_run().findings:
        assert finding.message in words
        assert finding.hint in words
        assert finding.subject in words
    for finding in PROBLEMS.values():
        if finding.where.file:
            assert f"{finding.where.file}:{finding.where.line}" in words


def test_verdicts_come_first_then_the_evidence_then_the_environment(page: str) -> None:
    headline = "3 failed, 2 warnings, 1 undecided, 4 skipped, 46 passed"
    order = [
        f"<h1>{headline}", "<h2>What failed", "<h2>Warnings", "<h2>Not judged", "<b>Passed:</b>", "<h2>Verdicts",
        "Values of each module", "module outputs", "<h2>Coverage", "<h2>Environment",
    ]  # fmt: skip
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    assert re.findall(r'<article class="card (\w+)"', page) == ["fail"] * 3 + ["warn"] * 2


def test_tables_and_charts_stand_with_their_check(page: str) -> None:
    overflow, rest = page[page.index('id="topic-1"') :].split('id="topic-2"')
    assert all(name.removeprefix("transformer.blocks.") in overflow for name in module_names(30))
    assert "Values of each module, tiny-gpt (float16)" in overflow
    assert rest.index("<h2>Further evidence") < rest.index("Loss and loss scale") < rest.index("losses")


def test_coverage_and_environment_are_told(page: str) -> None:
    words = Outline(page).words
    for text in ("1,204,331,520", "inside a custom Triton kernel", "2.13.0+cpu", "allow_tf32", "threads"):
        assert text in words


def test_an_empty_run_does_not_look_well() -> None:
    page = render_html(Run())
    assert "<h1>nothing was looked at</h1>" in page
    assert 'class="head skip"' in page
    assert "passed" not in page


def test_passes_without_coverage_do_not_look_well() -> None:
    page = render_html(Run(findings=(Finding("overflow", Verdict.PASS, "a", "m"),)))
    assert "<h1>1 passed; coverage: nothing was looked at</h1>" in page
    assert 'class="head pass"' not in page


def test_markup_in_any_text_is_inert() -> None:
    page = render_html(hostile_run())
    outline = Outline(page)
    assert outline.open_tags == []
    assert "img" not in outline.tags
    assert outline.tags.count("script") == page.count("<script") == 1
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert page.count("<style>") == page.count("</style>") == 1
    assert "1235234" not in page
    assert not re.search("[\x1b\u202e]", page)
    assert "\\x1b[31m" in page


def test_nan_and_infinities_survive() -> None:
    nan, inf = math.nan, math.inf
    run = Run(
        findings=(Finding("overflow", Verdict.FAIL, "a", "m", observed=nan, limit=-inf),),
        tables=(Table("t", ("a", "b"), ((nan, inf), (-inf, None), (1.0,))),),
        charts=(
            Chart("range", "r", "x", series=(Series("m", (nan, -inf, 0.0, inf, inf)), Series("n", [nan] * 5))),
            Chart("line", "l", "x", series=(Series("m", (0, 1, nan), (nan, inf, -inf)),)),
        ),
    )
    page = render_html(run)
    assert "<b>nan</b>, limit -inf" in page
    cells = re.findall(r"<td[^>]*>([^<]+)</td>", page)
    assert cells == ["nan", "inf", "-inf", "–", "1"]


def test_the_same_run_gives_the_same_page(page: str) -> None:
    assert render_html(sample_run()) == page
    assert render_html(Run.from_json(sample_run().to_json())) == page


@given(RUNS)
@example(HOSTILE_RUN)
def test_the_page_of_any_run_is_well_formed(run: Run) -> None:
    outline = Outline(render_html(run))
    assert outline.open_tags == []
    assert len(outline.ids) == len(set(outline.ids))
    assert {value[1:] for name, value in outline.attributes if name == "href" and value} <= set(outline.ids)
    assert outline.tags.count("script") <= 1


def test_what_is_left_of_many_problems_is_folded() -> None:
    findings = tuple(Finding("flush", Verdict.FAIL, f"subject {i}", f"message {i}.") for i in range(40))
    page = render_html(Run(findings=findings, coverage=Coverage({"ops": 1})))
    assert "<summary>16 more</summary>" in page
    assert all(f">message {i}.</p>" in page for i in range(40))


def test_the_page_is_written_whole(tmp_path, page: str) -> None:
    target = tmp_path / "run.html"
    write_html(sample_run(), target)
    assert target.read_text(encoding="utf-8") == page
    with pytest.raises(UsageError, match="cannot write"):
        write_html(Run(), tmp_path / "missing" / "run.html")


def test_a_lone_surrogate_can_be_written(tmp_path) -> None:
    run = replace(sample_run(), title="a\udcff")
    write_html(run, tmp_path / "run.html")
    assert "a\\udcff" in html.unescape((tmp_path / "run.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("modules", "ops"), [(1000, 0), (250, 3), (10, 99)])
def test_a_page_of_two_thousand_sites_is_below_two_megabytes(modules: int, ops: int) -> None:
    sites = []
    for number in range(modules):
        module, counts = f"transformer.blocks.{number // 8}.mlp.part{number % 8}", [97 * n % 900 + 1 for n in range(18)]
        for phase in ("forward", "backward"):
            values = {"amax": 2.5 + number, "amin": 3e-5, "flushed": 0.012, "error": 1.3e-3, "limit": 0.021}
            sites.append(Site(phase, module, dtype="float16", **values, first=-15, bins=counts))
            sites += [
                Site(phase, module, f"aten::op_{n}.Tensor", "model.py", n, "float16", n + 1.0) for n in range(ops)
            ]
    assert len(sites) == 2000
    run = Run(findings=(Finding("flush", Verdict.PASS, "a", "m"),), maps=(ModelMap("a", sites, FLOAT16),))
    page = render_html(run)
    assert len(page.encode()) < 2_000_000
    assert page.count("<li data-v") >= modules


def test_a_module_of_the_map_has_its_values_and_its_worst_verdict() -> None:
    site = Site("forward", "net.conv", amax=2.0, amin=0.5, flushed=0.25, error=0.01, limit=0.02, bins=(3, 1), first=-1)
    op = Site("forward", "net.conv", "aten::mul", "net.py", 7, "float16", 9.0, inputs=3.0, exact=1e5, lost="overflow")
    finding = Finding("flush", Verdict.WARN, "a", "m", Where("forward", "net.conv", "aten::mul", "net.py", 7))
    page = render_html(Run(findings=(finding,), maps=(ModelMap("a", (site, op), FLOAT16),)))
    words = Outline(page).words
    for text in ("amax 2", "smallest 0.5", "flushed 25 %", "error 0.01 of 0.02", "aten::mul", "net.py:7", "overflow"):
        assert text in words
    row = page[page.index("<li data-v", page.index('id="map"')) :]
    assert row.startswith('<li data-v="warn" data-m="net.conv"')
    assert "--p:50.0%" in row
    story = page[: page.index('id="verdicts"')]
    assert all(text in story for text in ("goes in", "up to 3", "comes out", "up to 9", "in float64", "up to 1e5"))


def test_a_map_of_any_numbers_is_drawn() -> None:
    odd = (math.nan, math.inf, -math.inf, 0.0, -1.0, 5e-324, 1.7e308, None)
    sites = [
        Site("forward", f"m{n}.{k}", "", "", None, "", a, b, a, b, 1, 1.0, a, b, -3, (0, 0, 2), HOSTILE)
        for n, a in enumerate(odd)
        for k, b in enumerate(odd)
    ]
    page = render_html(Run(findings=(Finding("flush", Verdict.PASS, HOSTILE, "m"),), maps=(ModelMap(HOSTILE, sites),)))
    assert Outline(page).open_tags == []
