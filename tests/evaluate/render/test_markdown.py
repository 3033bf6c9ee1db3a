"""Markdown for a pull request: nothing that was said becomes markup."""

from __future__ import annotations

from llamahybrid.evaluate.render.markdown import escaped, markdown
from tests.evaluate.reports import report, request, target, verdict, workload


def test_a_table_a_target_with_what_was_missed_folded_away() -> None:
    requests = tuple(request(turn=turn, miss=f"reason {turn}") for turn in range(5))
    text = markdown(
        report(target("ours", workload("a | b", 5, requests=requests, ratio=1.234), error="it died"))
    )
    assert "### ❌ ours" in text
    assert "| ✅ | a \\| b | 5 | 300 | 300 | 1.23 | same |" in text
    assert "Why tokens were not reused (5)" in text
    assert [f"reason {turn}" in text for turn in range(5)] == [True, True, False, False, False]
    assert "and 3 more" in text


def test_hazards_that_hit_are_named() -> None:
    found = (verdict("hazard:rollback-twice", "bad", "went on wrong"), verdict("hazard:other", "ok"))
    text = markdown(report(target(hazards=found)))
    assert "hit it (1 of 2)" in text
    assert "- `rollback-twice`: went on wrong" in text
    assert "`other`" not in text


def test_what_was_said_stays_text() -> None:
    hostile = "<img src=x>\n# title @someone [a](b) `c` *d* | e"
    assert escaped(hostile) == (
        "\\<img src=x\\> \\# title @<!-- -->someone \\[a\\]\\(b\\) \\`c\\` \\*d\\* \\| e"
    )
    text = markdown(
        report(target(hostile, workload(hostile, requests=(request(miss=hostile, chat=hostile),))))
    )
    assert "<img" not in text.replace("\\<img", "")
    assert "@someone" not in text
    assert "\n# title" not in text
