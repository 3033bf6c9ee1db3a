"""The page: whole, on its own, and what was said stays text."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from llamahybrid.errors import ReportError
from llamahybrid.evaluate.render.html import html
from llamahybrid.evaluate.report import Report
from tests.evaluate.reports import report, request, target, verdict, workload

HOSTILE = "</style><script>alert(1)</script><img src=//x onerror=y>"


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def made() -> Report:
    missed = (
        request(HOSTILE, 0),
        request(HOSTILE, 1, cached=0, decoded=110, miss=HOSTILE, answer="different"),
    )
    bad = workload(HOSTILE, requests=missed, verdicts=(verdict("exact", "bad", HOSTILE),))
    hidden = workload(
        "hidden", requests=(request("hidden", total=None, cached=None, decoded=None, ttft=None),)
    )
    hazards = (verdict("hazard:x", "bad", HOSTILE), verdict("hazard:y"))
    stopped = target(HOSTILE, error=HOSTILE, versions={HOSTILE: HOSTILE})
    return report(target("ours", bad, hidden, hazards=hazards), stopped, target("none", workload("other")))


def test_it_needs_nothing_from_elsewhere(made: Report) -> None:
    page = Elements(html(made))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert links
    assert all(str(link).startswith("#") for link in links)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_the_verdicts_are_sentences_on_top_and_figures_follow(made: Report) -> None:
    text = " ".join(Elements(html(made)).text.split())
    order = [
        "1 of 3 targets came through without a fault; 2 did not.",
        "Its answers are not those of a context that reused nothing",
        "1 of 2 hazards of the native memory hit it: x.",
        "All conversations",
        "Turn by turn",
        "Hazards of the native memory",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "It tells no numbers of tokens." in text
    assert text.count(HOSTILE) >= 6


def test_light_and_dark_have_the_same_colours(made: Report) -> None:
    page = html(made)
    light, dark = (
        set(re.findall(r"(--\w+):", part)) for part in page.split("@media (prefers-color-scheme: dark)")[:2]
    )
    used = set(re.findall(r"var\((--\w+)\)", page))
    assert used <= light
    assert used <= dark


def test_no_id_is_twice(made: Report) -> None:
    page = Elements(html(made))
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {f"#{each}" for each in ids} == {value for name, value in page.attributes if name == "href"}


def test_every_class_of_a_plot_has_a_style(made: Report) -> None:
    page = html(made)
    used = set(re.findall(r'class="(s\d+)"', page))
    assert used
    assert used == set(re.findall(r"^\.(s\d+) {", page, flags=re.M))
    assert " style=" not in page


def test_what_holds_of_many_requests_is_said_once() -> None:
    missed = tuple(request("a", turn, miss=f"{turn} tokens were lost") for turn in range(1, 8))
    text = " ".join(Elements(html(report(target("ours", workload("a", requests=missed))))).text.split())
    assert "Why tokens were not reused (7) 7 requests alike, the first of them chat 0, turn 2" in text
    assert text.count("tokens were lost") == 1


def test_a_request_more_is_few_bytes_more() -> None:
    def size(workloads: int, turns: int = 8) -> int:
        each = [workload(f"chat {i}", turns) for i in range(workloads)]
        return len(html(report(target("stock", *each), target("ours", *each))).encode())

    drawn = 2 * 4 * 8
    assert (size(6) - size(2)) / drawn < 750, "what stands around a plot, too"
    assert (size(2, 16) - size(2)) / (2 * 2 * 8) < 450


@pytest.mark.parametrize("gone", ["matplotlib", "jinja2"])
def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == gone:
            raise ImportError(f"No module named {gone!r}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ReportError, match=rf"{gone}.*llamahybrid\[report\]"):
        html(report())
