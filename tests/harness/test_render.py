"""Reports as a page, Markdown, JUnit XML and text: nothing is lost, and texts of prompts stay text."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

from rich.console import Console

from llamahybrid.harness.check import WORKLOADS
from llamahybrid.harness.render.formats import html, junit, markdown
from llamahybrid.harness.render.terminal import show
from llamahybrid.harness.report import Report
from tests.harness.reports import report, request, target, verdict, workload

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


def hostile_report() -> Report:
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


def test_page_loads_nothing_and_runs_nothing_of_what_was_said() -> None:
    page = Elements(html(hostile_report()))
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert page.tags.count("svg") == 2 + 4 + 4, "a bar for each request whose tokens are known"
    assert not {"href", "src", "xlink:href", "style"} & {name for name, _ in page.attributes}
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_page_begins_with_the_verdicts_and_names_faults() -> None:
    text = " ".join(Elements(html(hostile_report())).text.split())
    order = [
        "1 of 3 targets without a fault; 1 with faults; 1 did not run to the end.",
        "answers differ from a context that reused nothing: reused state was wrong",
        "hit by hazards of the native memory, in 1 of 2 hazards (x). There: x:",
        "Faults (2)",
        "none",
        "Side by side",
        "Turn by turn",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert text.count(HOSTILE) >= 6


def test_junit_has_a_case_for_each_verdict() -> None:
    found = workload(
        "chat <&>", verdicts=(verdict(), verdict("exact", "bad", "a\x1bb"), verdict("x", "cannot tell"))
    )
    hazards = (verdict("hazard:rollback-twice", "bad"),)
    suites = ET.fromstring(junit(report(target("ours", found, hazards=hazards), target("s", error="died"))))
    assert (suites.get("tests"), suites.get("failures"), suites.get("errors")) == ("8", "2", "1")
    ours, stopped = suites
    counts = {name: ours.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "2", "errors": "0", "skipped": "1"}
    cases = {(str(case.get("classname")), str(case.get("name"))): case for case in ours.iter("testcase")}
    assert {name: [child.tag for child in case] for name, case in cases.items()} == {
        ("ours", "runs"): [],
        ("ours.chat <&>", "reuse"): [],
        ("ours.chat <&>", "exact"): ["failure"],
        ("ours.chat <&>", "x"): ["skipped"],
        ("ours.hazards", "rollback-twice"): ["failure"],
    }
    assert "a b" in ET.tostring(cases["ours.chat <&>", "exact"], encoding="unicode")
    assert (stopped.get("errors"), stopped.get("tests")) == ("1", "3")


def test_markdown_has_a_table_and_keeps_hostile_text_as_text() -> None:
    said = "<img src=x>\n# title @someone [a](b) `c` *d* | e"
    requests = tuple(request(turn=turn, miss=f"reason {turn}") for turn in range(5))
    text = markdown(
        report(target("ours", workload("a | b", 5, requests=requests, ratio=1.234), error="died"))
    )
    assert "|---|---:|---:|---:|---|---|\n| a \\| b | 300 | 300 | 1.23 | same | ✅ |\n" in text
    assert "\n- 5 requests alike, the first of them chat, chat 0, turn 1: reason 0\n" in text
    text = markdown(report(target(said, workload(said, requests=(request(miss=said, chat=said),)))))
    assert "<img" not in text.replace("\\<img", "")
    assert "@someone" not in text
    assert "\n# title" not in text


def shown(made: Report, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    show(made, console)
    return console.export_text()


def test_headline_tells_how_much_of_a_check_ran() -> None:
    late = workload("late", requests=(), verdicts=(verdict("runs", "cannot tell", "it did not run: late"),))
    made = report(target("ours", workload(), late, late), target("stock", error="it died"))
    said = " ".join(shown(made).split())
    assert (
        "1 of 2 targets without a fault in the 2 of 4 workloads that ran; 1 did not run to the end." in said
    )
    bench = report(target("ours", workload(verdicts=()), late))
    assert "1 target measured in the 1 of 2 workloads that ran." in " ".join(shown(bench).split())


def test_terminal_shows_whole_names_in_80_columns() -> None:
    names = [f"qwen35: {each.name}" for each in WORKLOADS]  # as with several models
    every = [workload(name, least=123_456, decoded=234_567) for name in names]
    text = shown(report(target("ours", *every)))
    assert max(map(len, text.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for name in names:
        assert f"{name} 123,456 234,567 1.00 same ok" in lines, name
