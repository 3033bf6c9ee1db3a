"""matplotlib's SVG as part of a page: in the page's colours, with tips, and small.

A page has hundreds of plots, and matplotlib writes each to stand alone: every label and bar spells out its
style, every stroke has a group with an id, coordinates are exact to a millionth of a point.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence

from llamahybrid.files import printable

THEME = {"text": "#000101", "line": "#000102", "ok": "#000103", "bad": "#000104", "untold": "#000105"}
THEME |= {"reused": "#000106", "again": "#000107", "needed": "#000108", "page": "#000109"}
THEME |= {f"series{i}": f"#0002{i:02x}" for i in range(8)}
"""Colours that stand for custom properties of the page (`--reused`), by name."""


class Sheet:
    """The plots of a page: a style or the shape of a marker that many have is written once."""

    def __init__(self) -> None:
        self._styles: dict[str, str] = {}
        self._shapes: dict[str, ET.Element] = {}

    @property
    def css(self) -> str:
        """Their styles, by class."""
        return "\n".join(f".{name} {{ {style} }}" for style, name in self._styles.items())

    @property
    def shapes(self) -> str:
        """Their markers: elements that they refer to."""
        return "\n".join(_written(shape) for shape in self._shapes.values())

    def plot(self, svg: str, tips: Mapping[str, Sequence[str]]) -> str:
        """The `<svg>` element of what matplotlib wrote; `tips` are shown over its groups of these ids."""
        root = ET.fromstring(printable(svg[svg.index("<svg ") :]))
        drawn = ET.Element("svg", role="img", viewBox=root.get("viewBox", ""))
        drawn.extend(self._drawn(root, tips))
        return _written(drawn)

    def _drawn(self, group: ET.Element, tips: Mapping[str, Sequence[str]]) -> Iterator[ET.Element]:
        """What there is to see of a group: of those within it, only those with a tip stay groups."""
        for element in group:
            tag = _local(element.tag)
            if tag == "g":
                inside = list(self._drawn(element, tips))
                yield from _tipped(inside, tips.get(element.get("id", ""), ()))
            elif tag == "defs":
                # matplotlib names a marker by its content: the same name is the same shape
                shapes = (self._part(shape) for shape in element if shape.get("d"))
                self._shapes |= {shape.get("id", ""): shape for shape in shapes}
            elif tag in ("path", "use", "text"):
                yield self._part(element)

    def _part(self, element: ET.Element) -> ET.Element:
        """An element without what another place says, or nobody sees."""
        known = {_local(name): value for name, value in element.attrib.items()}
        part = ET.Element(_local(element.tag))
        part.text = element.text if part.tag == "text" else None
        for name, value in known.items():
            if name == "style":
                part.set("class", self._class(value))
            elif name in ("d", "x", "y", "transform") and not value.startswith("rotate(-0 "):
                part.set(name, _short(value))
            elif name in ("id", "href"):
                part.set(name, value)
        return part

    def _class(self, style: str) -> str:
        """The class of a style, whose colours become the page's."""
        for name, colour in THEME.items():
            style = style.replace(colour, f"var(--{name})")
        return self._styles.setdefault(style, f"s{len(self._styles)}")


def _tipped(inside: Sequence[ET.Element], tips: Sequence[str]) -> Sequence[ET.Element]:
    """One tip: over all of it. Several: one over each marker, in order."""
    if len(tips) != 1:
        markers = (part for part in inside if part.tag == "use")
        for marker, tip in zip(markers, tips, strict=False):
            ET.SubElement(marker, "title").text = tip
        return inside
    group = ET.Element("g", {"class": "tip"})
    ET.SubElement(group, "title").text = tips[0]
    group.extend(inside)
    return [group]


def _short(place: str) -> str:
    """Coordinates to a tenth of a point, written without blanks that need not be."""
    place = re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), place)
    return re.sub(r"\s*([A-Za-z]|\s)\s*", r"\1", place.strip())


def _local(name: str) -> str:
    """A name without its namespace: in a page there is none."""
    return name.rpartition("}")[2]


def _written(element: ET.Element) -> str:
    return ET.tostring(element, encoding="unicode")
