"""SVG as text: elements whose text and attributes are escaped, sized in percent so that a chart fits any width."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, tostring

from ampcheck.report.text import clean

if TYPE_CHECKING:
    from markupsafe import Markup


def node(tag: str, *children: Element, text: str = "", **attributes: str | float) -> Element:
    """An element. Attribute names take `_` for `-`, and a trailing one where Python has the word (`class_`)."""
    named = {
        name.rstrip("_").replace("_", "-"): clean(value) if isinstance(value, str) else f"{value:.5g}"
        for name, value in attributes.items()
    }
    element = Element(tag, named)
    element.text = clean(text) or None
    element.extend(children)
    return element


def percent(share: float) -> str:
    """A share of the width or height."""
    return f"{100 * share:.4g}%"


def markup(*elements: Element) -> Markup:
    """The elements as HTML; the serialiser escaped what they hold."""
    from markupsafe import Markup

    return Markup("".join(tostring(element, encoding="unicode", short_empty_elements=False) for element in elements))
