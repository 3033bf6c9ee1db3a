"""A report in a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from llamahybrid.evaluate.changes import changes
from llamahybrid.evaluate.check import WORKLOADS
from llamahybrid.evaluate.render.markdown import markdown
from llamahybrid.evaluate.render.terminal import show, show_changes
from llamahybrid.evaluate.report import Report
from tests.evaluate.reports import report, request, target, verdict, workload


def shown(made: Report, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    show(made, console)
    return console.export_text()


def test_each_name_is_whole_in_80_columns() -> None:
    names = [f"qwen35: {each.name}" for each in WORKLOADS]  # so where there are several models
    every = [workload(name, least=123_456, decoded=234_567) for name in names]
    text = shown(report(target("ours", *every)))
    assert max(map(len, text.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for name in names:
        assert f"{name} 123,456 234,567 1.00 same ok" in lines, name


def test_what_does_not_fit_is_folded_and_markup_is_text() -> None:
    name = "[red]" + "a/trace/in/a/folder/" * 5 + "x.jsonl"
    text = shown(report(target(name, workload(name, verdicts=(verdict("exact", "bad", "[bold]why"),)))))
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "[bold]why" in " ".join(text.split())
    assert "bad: exact, [red]a/trace" in " ".join(text.split())


def test_probes_are_sentences_and_in_the_table_only_where_they_are_bad() -> None:
    good = workload("probe: good", verdicts=(verdict("hits"),))
    bad = workload("probe: bad", verdicts=(verdict("own-attention", "bad"),))
    text = shown(report(target("ours", good, bad)))
    assert "A prompt that goes on is reused" in text
    assert "probe: good" not in text
    assert "probe: bad" in text
    assert "workload " not in shown(report(target("ours", good)))


def test_misses_are_shown_the_first_few() -> None:
    requests = tuple(request(turn=turn, miss=f"[why] {'abcdefghij'[turn]}") for turn in range(10))
    text = " ".join(shown(report(target("ours", workload(requests=requests)))).split())
    assert "miss: chat, chat 0, turn 8: [why] h miss: and 2 more, in the JSON report" in text


def test_a_reason_is_said_once_with_how_many_requests_it_holds_for() -> None:
    requests = tuple(request(turn=turn, miss=f"[why] {turn} tokens") for turn in range(10))
    text = " ".join(shown(report(target("ours", workload(requests=requests)))).split())
    assert "miss: 10 requests alike, the first of them chat, chat 0, turn 1: [why] 0 tokens" in text
    assert text.count("[why]") == 1


def test_misses_of_probes_do_not_push_those_of_workloads_away() -> None:
    parted = workload(
        "probe: parts on purpose", requests=(request(miss="on purpose"),) * 9, verdicts=(verdict("hits"),)
    )
    made = report(target("ours", parted, workload(requests=(request(miss="why"),))))
    assert "miss: chat, chat 0, turn 1: why" in shown(made)
    assert "on purpose" not in shown(made)
    assert "on purpose" not in markdown(made)


def test_changes_are_printed_worse_first_and_silence_is_said() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    better = workload("b", verdicts=(verdict("x", "bad"), verdict("y")))
    worse = workload("b", verdicts=(verdict("x"), verdict("y", "bad", "[why]")))
    show_changes(changes(report(target("ours", better)), report(target("ours", worse))), console)
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines] == ["worse", "better"]
    assert lines[0].rstrip() == "worse   ours, b: y was ok, is bad: [why]"
    show_changes(changes(report(), report()), console)
    assert "nothing got better or worse" in console.export_text()
