"""A report as JUnit XML for CI systems: a test case for each verdict.

Names of targets, workloads and verdicts are the same in each run.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from llamahybrid.files import printable
from llamahybrid.harness.render.sentences import HAZARD, sentence
from llamahybrid.harness.report import Report, TargetFigures, Verdict


def junit(report: Report) -> str:
    """Return the document, with a suite for each target.

    "bad" is a failure, "cannot tell" is skipped; a target that did not run to its end has an error.
    """
    suites = ET.Element("testsuites", name="llamahybrid")
    for target in report.targets:
        suites.append(_suite(report, target))
    for count in ("tests", "failures", "errors", "skipped"):
        suites.set(count, str(sum(int(suite.get(count, 0)) for suite in suites)))
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _suite(report: Report, target: TargetFigures) -> ET.Element:
    cases = [_ran(target)]
    for workload in target.workloads:
        seconds = sum(request.seconds for request in workload.requests)
        each = seconds / max(1, len(workload.verdicts))
        cases += [_case(target, workload.workload, verdict, each) for verdict in workload.verdicts]
    cases += [_case(target, "hazards", verdict, 0.0) for verdict in target.hazards]
    suite = ET.Element(
        "testsuite",
        name=printable(target.name),
        timestamp=printable(report.made),
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors=str(sum(case.find("error") is not None for case in cases)),
        skipped=str(sum(case.find("skipped") is not None for case in cases)),
        time=f"{sum(float(case.get('time', 0)) for case in cases):.3f}",
    )
    properties = ET.SubElement(suite, "properties")
    known = {"kind": target.kind, **target.versions, **{f"machine {k}": v for k, v in report.machine.items()}}
    for name, value in known.items():
        ET.SubElement(properties, "property", name=printable(name), value=printable(value))
    suite.extend(cases)
    return suite


def _ran(target: TargetFigures) -> ET.Element:
    """Return the case "runs", which has the target's error."""
    case = ET.Element("testcase", classname=printable(target.name), name="runs", time="0.000")
    if target.error is not None:
        ET.SubElement(case, "error", message=printable(target.error))
    return case


def _case(target: TargetFigures, where: str, verdict: Verdict, seconds: float) -> ET.Element:
    case = ET.Element(
        "testcase",
        classname=printable(f"{target.name}.{where}"),
        name=printable(verdict.name.removeprefix(HAZARD)),
        time=f"{seconds:.3f}",
    )
    if verdict.outcome != "ok":
        kind = "failure" if verdict.outcome == "bad" else "skipped"
        ET.SubElement(case, kind, message=printable(sentence(verdict).text))
    return case
