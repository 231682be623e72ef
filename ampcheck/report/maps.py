"""The map of a model as rows of a page, and the values around a finding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampcheck.core.run import SEVERITY, Finding, ModelMap, Site, Verdict
from ampcheck.report.magnitudes import Axis, axis_over, strip
from ampcheck.report.svg import markup, node
from ampcheck.report.text import number

if TYPE_CHECKING:
    from markupsafe import Markup

_MARKED = (Verdict.FAIL, Verdict.WARN, Verdict.UNDECIDED, Verdict.INCOMPLETE)
"""Verdicts that a module shows."""

_QUANTILES = (0.05, 0.5, 0.95)
"""Of a strip, between the smallest and the largest value."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The values of a module in one phase.

    share: the error as a share of its limit, None where it is unknown. bars: the histogram; None without one.
    """

    phase: str
    picture: Markup
    facts: tuple[tuple[str, str], ...]
    share: float | None
    bars: Markup | None
    ops: tuple[Site, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A module, with the findings about it. lost: the sorts of damage that began here."""

    module: str
    depth: int
    cells: tuple[Cell, ...]
    findings: tuple[Finding, ...]
    lost: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.module.rpartition(".")[2] or "(root)"

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict of the findings about it."""
        return min((f.verdict for f in self.findings), key=SEVERITY.index, default=None)


@dataclass(frozen=True, slots=True)
class MapView:
    """A map ready to be laid out. head: the axis with the names of the formats; background: the same behind a strip."""

    subject: str
    note: str
    head: Markup
    background: str
    phases: tuple[str, ...]
    rows: tuple[Row, ...]


def map_view(model_map: ModelMap, findings: Iterable[Finding]) -> MapView:
    """The modules of a map in its order, with the findings about each."""
    axis = _axis(model_map.sites, model_map)
    phases = tuple(dict.fromkeys(site.phase for site in model_map.sites))
    marked: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.subject == model_map.subject and finding.verdict in _MARKED and finding.where.phase in phases:
            marked.setdefault(finding.where.module, []).append(finding)
    by_module: dict[str, list[Site]] = {}
    for site in model_map.sites:
        by_module.setdefault(site.module, []).append(site)
    rows = tuple(
        Row(
            module,
            _depth(module, by_module),
            tuple(cell for phase in phases if (cell := _cell(phase, sites, axis)) is not None),
            tuple(marked.get(module, ())),
            tuple(dict.fromkeys(site.lost for site in sites if site.lost)),
        )
        for module, sites in by_module.items()
    )
    return MapView(model_map.subject, model_map.note, markup(axis.head()), axis.background, phases, rows)


def _depth(module: str, known: Iterable[str]) -> int:
    """Return how many modules of the map contain this one."""
    parts = module.split(".")
    return sum(".".join(parts[:end]) in known for end in range(1, len(parts))) + (module != "" and "" in known)


def _axis(sites: Iterable[Site], model_map: ModelMap) -> Axis:
    values = (v for site in sites for v in (site.amin, site.amax, site.inputs, site.exact))
    return axis_over([power for power in map(_exponent, values) if power is not None], model_map.bands)


def _exponent(value: float | None) -> float | None:
    """Where a magnitude lies on the axis; None for zero, and where it is unknown."""
    return math.log2(value) if value is not None and value > 0 else None


def _cell(phase: str, sites: Sequence[Site], axis: Axis) -> Cell | None:
    of_phase = [site for site in sites if site.phase == phase]
    ops = tuple(site for site in of_phase if site.op)
    site = next((site for site in of_phase if not site.op), None)
    if site is None:
        largest = [op.amax for op in ops if op.amax]
        if not ops:
            return None
        site = Site(phase, amax=max(largest, default=None), nonfinite=sum(op.nonfinite for op in ops))
    picture = markup(strip(axis, [(f"c{int(phase != 'forward')}", spread(site))], ""))
    return Cell(phase, picture, tuple(_facts(site)), error_share(site), _bars(site, axis), ops)


def spread(site: Site) -> list[float]:
    """The values of a site on the axis: five where its histogram is known, else its largest; what is flushed or not
    finite lies at the edges."""
    low, high = _exponent(site.amin), _exponent(site.amax)
    if low is not None and high is not None and any(site.bins):
        inner = [min(max(exponent + 0.5, low), high) for exponent in _quantiles(site)]
        ends = (-math.inf if site.flushed else low, math.inf if site.nonfinite else high)
        return [ends[0], *inner, ends[1]]
    return [*([high] if high is not None else []), *([math.inf] if site.nonfinite else [])]


def _quantiles(site: Site) -> Iterator[int]:
    whole = sum(site.bins)
    for share in _QUANTILES:
        seen = 0
        for exponent, count in enumerate(site.bins, site.first):
            seen += count
            if seen / whole >= share:
                yield exponent
                break


def _facts(site: Site) -> Iterator[tuple[str, str]]:
    if site.amax is not None:
        yield "amax", number(site.amax)
    if site.amin is not None:
        yield "smallest", number(site.amin)
    if site.flushed is not None:
        yield "flushed", f"{number(100 * site.flushed)} %"
    if site.nonfinite:
        yield "inf or NaN", number(site.nonfinite)
    if site.error is not None and site.limit is not None:
        yield "error", f"{number(site.error)} of {number(site.limit)}"


def error_share(site: Site) -> float | None:
    """The error as a share of its limit; None where one is unknown."""
    return site.error / site.limit if site.error is not None and site.limit else None


def _bars(site: Site, axis: Axis) -> Markup | None:
    """The histogram of a site over the axis of its strip."""
    highest = max(site.bins, default=0)
    if not highest:
        return None
    edges = [round(1000 * axis.scale.share(site.first + n)) for n in range(len(site.bins) + 1)]
    steps = [f"V{40 - round(38 * count / highest)}H{right}" for count, right in zip(site.bins, edges[1:], strict=True)]
    path = node("path", d=f"M{edges[0]} 40{''.join(steps)}V40Z")
    return markup(node("svg", path, viewBox="0 0 1000 40", preserveAspectRatio="none"))


# The values around a finding -----------------------------------------------------------------------------------------


def site_of(finding: Finding, maps: Iterable[ModelMap]) -> tuple[Site, ModelMap] | None:
    """The site that a finding is about, on the map of its subject: the op at its line, or the module as a whole."""
    where = finding.where
    place = where.phase, where.module, where.op, where.file, where.line
    known = ((site, each) for each in maps if each.subject == finding.subject and where.phase for site in each.sites)
    return next(((s, each) for s, each in known if (s.phase, s.module, s.op, s.file, s.line) == place), None)


def values_around(site: Site, model_map: ModelMap) -> Markup:
    """Return what goes in and comes out at a site, and what float64 gives, on the axis of the format."""
    whole = any(site.bins)
    named: list[tuple[str, float | None, Sequence[float | None]]] = [
        ("goes in", site.inputs, [_exponent(site.inputs)]),
        ("values" if whole else "comes out", site.amax, spread(site)),
        ("in float64", site.exact, [_exponent(site.exact)]),
    ]
    axis = _axis([site], model_map)
    rows = []
    for colour, (name, largest, powers) in enumerate(named):
        values = [power for power in powers if power is not None]
        if values:
            text = f"up to {number(largest)}" if largest else ""
            if site.nonfinite and name in ("values", "comes out"):
                text = f"{text}{', and ' if text else ''}{number(site.nonfinite)} inf or NaN"
            drawn = node("td", strip(axis, [(f"c{colour}", values)], ""))
            rows.append(node("tr", node("th", text=name, scope="row"), drawn, node("td", text=text, class_="num")))
    head = node("thead", node("tr", node("td"), node("td", axis.head()), node("td")))
    return markup(node("table", head, node("tbody", *rows), class_="ranges", style=f"--axis:{axis.background}"))
