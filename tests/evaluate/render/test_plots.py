"""SVG as part of a page: its colours, its ids, what stands in it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from llamahybrid.evaluate.render.bars import Bar

plots = pytest.importorskip("llamahybrid.evaluate.render.plots")
pytest.importorskip("matplotlib")

HOSTILE = '<script>$x$ & "y"'


def drawn(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def test_a_timeline_is_in_the_pages_colours_and_says_what_it_shows() -> None:
    svg = plots.timeline([Bar("turn 1", 0, 0, 300), Bar(HOSTILE, 200, 20, 90)], 400, "k")
    root = drawn(svg)
    assert {"var(--reused)", "var(--again)", "var(--needed)", "var(--text)"} <= set(
        re.findall(r"var\(--\w+\)", svg)
    )
    assert "#0001" not in svg
    titles = {each.text for each in root.iter("{http://www.w3.org/2000/svg}title")}
    assert titles == {Bar("turn 1", 0, 0, 300).text, Bar(HOSTILE, 200, 20, 90).text}
    assert HOSTILE in "".join(root.itertext())
    assert "<script" not in svg


def test_two_plots_on_a_page_have_no_id_in_common_and_each_refers_to_its_own() -> None:
    one, two = (
        plots.first_tokens({"a": [0.1, None, 0.3], HOSTILE: [0.01, 0.02]}, ["x"], key) for key in "ij"
    )
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg, own in zip((one, two), ids, strict=True):
        referred = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg))
        assert {a or b for a, b in referred} <= own


def test_hazards_are_counted_on_their_bars() -> None:
    svg = plots.hazards({"stock": {"ok": 3, "bad": 2}, "x" * 90: {"cannot tell": 4}}, "k")
    texts = [text for text in drawn(svg).itertext() if text.strip()]
    assert {"3", "2", "4", "stock"} <= {text.strip() for text in texts}
    assert "x" * 90 not in {text.strip() for text in texts}


def test_the_same_figures_give_the_same_bytes() -> None:
    assert plots.timeline([Bar("a", 1, 2, 3)], 9, "k") == plots.timeline([Bar("a", 1, 2, 3)], 9, "k")


def test_a_long_name_keeps_its_end() -> None:
    assert plots.short("server:/opt/a/very/long/path/to/llama-server").endswith("llama-server")
    assert len(plots.short("x" * 90)) == 30
