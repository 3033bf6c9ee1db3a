"""JUnit: a case for each verdict, under names that stay."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from llamahybrid.evaluate.render.junit import junit
from tests.evaluate.reports import report, target, verdict, workload


def test_each_verdict_is_a_case_and_counts_as_what_it_is() -> None:
    found = workload(
        "chat <&>", verdicts=(verdict(), verdict("exact", "bad", "a\x1bb"), verdict("x", "cannot tell"))
    )
    hazards = (verdict("hazard:rollback-twice", "bad"),)
    suites = ET.fromstring(junit(report(target("ours", found, hazards=hazards), target("s", error="died"))))
    ours, stopped = suites
    counts = {name: ours.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "2", "errors": "0", "skipped": "1"}
    cases = {(case.get("classname"), case.get("name")): case for case in ours.iter("testcase")}
    assert list(cases) == [
        ("ours", "runs"),
        ("ours.chat <&>", "reuse"),
        ("ours.chat <&>", "exact"),
        ("ours.chat <&>", "x"),
        ("ours.hazards", "rollback-twice"),
    ]
    children = [[child.tag for child in case] for case in cases.values()]
    assert children == [[], [], ["failure"], ["skipped"], ["failure"]]
    failure = cases["ours.chat <&>", "exact"].find("failure")
    assert failure is not None
    assert "a b" in str(failure.get("message"))
    assert (stopped.get("errors"), stopped.get("tests")) == ("1", "3")
    assert (suites.get("tests"), suites.get("failures"), suites.get("errors")) == ("8", "2", "1")


def test_names_do_not_depend_on_figures() -> None:
    def names(text: str) -> list[tuple[str | None, str | None]]:
        return [(case.get("classname"), case.get("name")) for case in ET.fromstring(text).iter("testcase")]

    other = workload(
        decoded=999, verdicts=(verdict("reuse", "bad", "ratio 9"), verdict("exact", "cannot tell"))
    )
    assert names(junit(report())) == names(junit(report(target("ours", other))))
