"""SVG as part of a page: its colours, its ids, what stands in it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from llamahybrid.evaluate.render.bars import Bar
from llamahybrid.evaluate.render.svg import Sheet

plots = pytest.importorskip("llamahybrid.evaluate.render.plots")
pytest.importorskip("matplotlib")

HOSTILE = '<script>$x$ & "y"'


def tips(svg: str) -> list[str]:
    return [str(each.text) for each in ET.fromstring(svg).iter("title")]


def test_a_timeline_is_in_the_pages_colours_and_says_what_it_shows() -> None:
    sheet, bars = Sheet(), [Bar("turn 1", 0, 0, 300), Bar(HOSTILE, 200, 20, 90)]
    svg = plots.timeline(bars, 400, sheet)
    colours = set(re.findall(r"var\(--\w+\)", sheet.css))
    assert {"var(--reused)", "var(--again)", "var(--needed)", "var(--text)"} <= colours
    assert "#0001" not in sheet.css
    assert tips(svg) == [bar.text for bar in bars]
    assert HOSTILE in "".join(ET.fromstring(svg).itertext())
    assert "<script" not in svg


def test_each_part_of_a_bar_is_as_long_as_it_has_tokens() -> None:
    sheet = Sheet()
    svg = plots.timeline([Bar("turn 1", 100, 0, 300), Bar("turn 2", 200, 50, 50)], 400, sheet)
    colours = dict(re.findall(r"\.(s\d+) { fill: var\(--(\w+)\) }", sheet.css))
    rows = []
    for row in ET.fromstring(svg).iter("g"):
        places = [
            [float(x) for x in re.findall(r"[ML]([\d.]+)", path.get("d", ""))] for path in row.iter("path")
        ]
        names = [colours[path.get("class", "")] for path in row.iter("path")]
        rows.append(
            {name: round((max(xs) - min(xs)) / 0.725) for name, xs in zip(names, places, strict=True)}
        )
    assert rows == [{"reused": 100, "needed": 300}, {"reused": 200, "again": 50, "needed": 50}]


def test_each_point_says_whose_it_is() -> None:
    svg = plots.first_tokens({"a": [0.1, None, 0.3], HOSTILE: [0.01, 0.02]}, ["x", "y"], Sheet())
    assert tips(svg) == [
        "a, x: 100.0 ms",
        "a, 3: 300.0 ms",
        f"{HOSTILE}, x: 10.0 ms",
        f"{HOSTILE}, y: 20.0 ms",
    ]


def test_a_point_is_met_by_a_pointer_that_is_near() -> None:
    sheet = Sheet()
    marker = ET.fromstring(plots.first_tokens({"a": [0.1]}, ["x"], sheet)).find("use")
    assert marker is not None
    (style,) = re.findall(rf"\.{marker.get('class')} {{ (.*) }}", sheet.css)
    assert "fill: var(--series0)" in style
    assert "stroke: #000000; stroke-opacity: 0; stroke-width: 8" in style, "a wide edge that is not seen"


def test_hazards_are_counted_on_their_bars() -> None:
    svg = plots.hazards({"stock": {"ok": 3, "bad": 2}, "x" * 90: {"cannot tell": 4}}, Sheet())
    texts = [text for text in ET.fromstring(svg).itertext() if text.strip()]
    assert {"3", "2", "4", "stock"} <= {text.strip() for text in texts}
    assert "x" * 90 not in {text.strip() for text in texts}


def test_the_same_figures_give_the_same_bytes() -> None:
    one, two = Sheet(), Sheet()
    for sheet in (one, two):
        for key in "ab":
            plots.first_tokens({key: [0.1, 0.2]}, [], sheet)
    assert plots.timeline([Bar("a", 1, 2, 3)], 9, one) == plots.timeline([Bar("a", 1, 2, 3)], 9, two)
    assert (one.css, one.shapes) == (two.css, two.shapes)


def test_a_long_name_keeps_its_end() -> None:
    assert plots.short("server:/opt/a/very/long/path/to/llama-server").endswith("llama-server")
    assert len(plots.short("x" * 90)) == 30
