"""matplotlib's SVG made small: nothing that is seen is lost, and nothing that was said is changed."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from llamahybrid.evaluate.render.svg import THEME, Sheet

SHAPE = '<defs><path id="m1" d="M 0 2 \nL 2 0 \nz\n" style="stroke: #000101"/></defs>'
USE = '<use xlink:href="#m1" x="{}" y="3.000001" style="fill: #000103"/>'


def written(inside: str) -> str:
    """As matplotlib begins a file."""
    names = 'xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg" version="1.1"'
    return f'<?xml version="1.0"?>\n<svg width="9pt" height="8pt" viewBox="0 0 9 8" {names}>{inside}</svg>\n'


def test_groups_comments_and_clips_go_and_what_is_drawn_stays_in_order() -> None:
    inside = (
        "<metadata><x>made by</x></metadata><defs><style>*{a: b}</style></defs><!-- one -->"
        '<g id="a"> <g id="b"><path d="M 1 2" clip-path="url(#c)"/></g>\n<g id="d"/><text x="1">t</text></g>'
        '<defs><clipPath id="c"><rect x="0" y="0"/></clipPath></defs>'
    )
    shown = '<svg role="img" viewBox="0 0 9 8"><path d="M1 2" /><text x="1">t</text></svg>'
    assert Sheet().plot(written(inside), {}) == shown


def test_a_style_is_written_once_in_the_pages_colours() -> None:
    sheet = Sheet()
    one, two = (sheet.plot(written(f'<path style="fill: {THEME["bad"]}" d="M {i} 1"/>'), {}) for i in "12")
    assert sheet.css == ".s0 { fill: var(--bad) }"
    assert (one.count('class="s0"'), two.count('class="s0"')) == (1, 1)
    assert "style" not in one + two


def test_a_marker_that_plots_share_is_written_once_and_found() -> None:
    sheet = Sheet()
    one, two = (sheet.plot(written(SHAPE + USE.format(i)), {}) for i in "12")
    assert re.findall('id="(.*?)"', sheet.shapes) == ["m1"]
    assert re.findall('href="#(.*?)"', one + two) == ["m1", "m1"]
    assert "id=" not in one + two


def test_one_tip_is_over_a_group_and_several_are_over_its_markers() -> None:
    line = f'<g id="b">{SHAPE}<path d="M 1 2"/><g>{USE.format(1)}{USE.format(2)}</g></g>'
    bar = '<g id="a"><path d="M 5 6"/><path d="M 7 8"/></g>'
    root = ET.fromstring(Sheet().plot(written(bar + line), {"a": ["x < y"], "b": ["first", "second"]}))
    (group,) = root.findall("g")
    assert [each.tag for each in group] == ["title", "path", "path"]
    assert (group.get("class"), group.findtext("title")) == ("tip", "x < y")
    assert [each.findtext("title") for each in root.findall("use")] == ["first", "second"]


@pytest.mark.parametrize(
    ("place", "short"),
    [
        ('d="M 30.55774 67.819135 \nL -0.04 1200.96 \nz\n"', 'd="M30.6 67.8L-0 1201z"'),
        ('x="2.0" y="14.25001"', 'x="2" y="14.3"'),
        ('x="1" transform="rotate(-0 1.00001 2)"', 'x="1"'),
        ('x="1" transform="rotate(-90 1.00001 2)"', 'x="1" transform="rotate(-90 1 2)"'),
    ],
)
def test_places_are_as_exact_as_one_can_see(place: str, short: str) -> None:
    assert f"<path {short} />" in Sheet().plot(written(f"<path {place}/>"), {})


def test_what_was_said_stays_as_it_is() -> None:
    said = 'id="x" style="y" href="#z" #000101 1.23456  rotate(-0 M 1 2'
    assert f">{said}</text>" in Sheet().plot(written(f"<text>{said}</text>"), {})


def test_what_xml_cannot_hold_is_a_blank() -> None:
    assert "a b" in Sheet().plot(written("<text>a\x1bb</text>"), {})
