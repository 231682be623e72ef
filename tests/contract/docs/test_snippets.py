"""README.md and docs/: every snippet runs, every output is what its command prints, and no link is dead."""

from __future__ import annotations

import ast
import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
import snippets
from snippets import ROOT, Snippet, in_essence, pages, run_page

from ampcheck.cli.main import _parser
from ampcheck.core.formats import format_of

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
SNIPPETS = {str(snippet): snippet for page in PAGES.values() for snippet in snippets.snippets(page)}


def commands(snippet: Snippet) -> list[list[str]]:
    """The calls of `ampcheck` in a shell block."""
    if snippet.language != "sh":
        return []
    lines = snippet.code.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [list(takewhile("&&".__ne__, line[1:])) for line in words if line and line[0] == "ampcheck"]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.usefixtures("warm_processes")
def test_snippets_run_and_print_what_the_page_shows(name: str, tmp_path: Path) -> None:
    results, shown = run_page(PAGES[name], tmp_path)
    assert [str(result) for result in results if result.failed] == []
    for snippet, text in shown:
        assert in_essence(text) == in_essence(snippet.code), f"{snippet}: run python docs/site/outputs.py"


@pytest.mark.parametrize("name", [name for name, snippet in SNIPPETS.items() if snippet.language == "python"])
def test_python_parses(name: str) -> None:
    ast.parse(SNIPPETS[name].code)


@pytest.mark.parametrize("name", [name for name, snippet in SNIPPETS.items() if commands(snippet)])
def test_commands_have_the_options_that_they_use(name: str) -> None:
    for command in commands(SNIPPETS[name]):
        if command not in (["--help"], ["--version"]):
            assert _parser().parse_args(command).command is not None


def test_what_a_page_shows_as_output_is_produced() -> None:
    typed = [name for name, s in SNIPPETS.items() if s.language == "text" and s.output is None and not s.reason]
    assert typed == [], "a text block needs <!-- output --> and the command before it"


def test_a_snippet_that_is_not_run_says_why() -> None:
    assert {s.language for s in SNIPPETS.values()} <= {"python", "sh", "text", "toml", "yaml", "diff"}
    untitled = [name for name, s in SNIPPETS.items() if s.language in ("toml", "yaml") and not (s.title or s.reason)]
    assert untitled == [], "configuration needs the title of its file, so that the commands below it read it"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 6_000


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    page = PAGES[name]
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        linked = (page.parent / path).resolve() if path else page
        generated = {"checks.md", "api.md"}
        if linked.parent == ROOT / "docs" and linked.name in generated:
            continue
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_the_commands_of_the_readme_are_two() -> None:
    blocks = [s for s in SNIPPETS.values() if s.reason.endswith("which continuous integration runs")]
    assert [s.page.name for s in blocks] == ["README.md", "README.md"]


@pytest.mark.parametrize("name", [name for name, snippet in SNIPPETS.items() if snippet.language == "yaml"])
def test_workflows_are_yaml_with_steps(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    written = yaml.safe_load(SNIPPETS[name].code)
    if SNIPPETS[name].title == ".pre-commit-config.yaml":
        hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))}
        assert hooks.issuperset(hook["id"] for repo in written["repos"] for hook in repo["hooks"])
        return
    jobs = written["jobs"]
    assert all("run" in step or "uses" in step for job in jobs.values() for step in job["steps"])


def test_the_facts_of_the_formats_are_those_of_the_package() -> None:
    text = (ROOT / "docs" / "how-it-judges.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (float32|bfloat16|float16) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    for name, cells in rows:
        form = format_of(name)
        precision, unit, largest, normal, zero, whole = (float(cell.replace(",", "")) for cell in cells.split(" | "))
        assert precision == form.mantissa_bits + 1
        assert unit == pytest.approx(2.0**-precision, rel=0.02)
        assert largest == pytest.approx(form.max, rel=0.01)
        assert normal == pytest.approx(form.smallest_normal, rel=0.03)
        assert zero == pytest.approx(form.smallest_subnormal / 2, rel=0.02)
        assert whole == 2.0**precision
