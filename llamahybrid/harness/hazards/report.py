"""What the probes found, as a table for people, JSON for programs and JUnit for CI."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from llamahybrid.files import printable, require_writable, without_home, write_json
from llamahybrid.harness.hazards.catalogue import PROBES, find
from llamahybrid.harness.hazards.outcome import Verdict
from llamahybrid.harness.hazards.runner import Library, Result, cure, expected, library, run, sound

_COLOURS = {
    Verdict.EXACT: "green",
    Verdict.REFUSED: "green",
    Verdict.NOT_APPLICABLE: "dim",
    Verdict.WRONG: "red",
    Verdict.DIED: "bold red",
    Verdict.FAILED: "yellow",
}


def hazards(
    lib: Path | None,
    arch: str | None = None,
    names: Sequence[str] = (),
    *,
    json: Path | None = None,
    junit: Path | None = None,
    expect_stock: bool = False,
    gpu_layers: int = 0,
    rpc: str = "",
    jobs: int = 2,
    seconds: float = 60.0,
    console: Console | None = None,
) -> bool:
    """Run probes (all, or those called `names`) on the libllama at `lib` and print what they find.

    `json` and `junit` are files to write reports to, with `~` for the home folder. True when nothing is
    unsound, and not every probe is out of place here; with `expect_stock`, when every verdict is the known
    one of stock llama-cpp-python 0.3.36.

    Raises:
        EngineError: `lib` cannot be loaded.
        UnknownArchitecture: there is no tiny model of `arch`.
        ValueError: a name in `names` is unknown.
        OSError: a report cannot be written.
    """
    require_writable(json, junit)
    console = console or Console()
    probes = [find(name) for name in names] or list(PROBES)
    under_test = library(lib)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("probes", total=len(probes))
        results = run(
            probes,
            under_test,
            arch=arch,
            gpu_layers=gpu_layers,
            rpc=rpc,
            jobs=jobs,
            seconds=seconds,
            done=lambda _: progress.advance(task),
        )
    written: OSError | None = None
    try:
        if json is not None:
            write_json(json, as_json(results, under_test))
        if junit is not None:
            junit.write_text(as_junit(results, under_test), encoding="utf-8")
    except OSError as error:
        written = error
    console.print(table(results, f"hazards of {under_test.path}", under_test.patches))
    console.print(summary(results))
    if written is not None:  # said last, but the run is not lost for it
        raise written
    if expect_stock:
        console.print("\n".join(surprises(results)) or "as known of stock llama-cpp-python 0.3.36")
        return not surprises(results)
    return sound(results, under_test.patches)


def table(results: Sequence[Result], title: str, patches: frozenset[str] | None = None) -> Table:
    """One line a probe: what came of it on which model, how far off it was, and which patches mend it.

    Names and verdicts are whole at 80 columns; what happened is folded.
    """
    shown = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("probe", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    shown.add_column("cure", no_wrap=True)
    shown.add_column("what happened", overflow="fold")
    for result in results:
        verdict = result.outcome.verdict
        colour = "yellow" if expected(result, patches) else _COLOURS[verdict]
        said = f"[{colour}]{verdict.value}[/]"
        shown.add_row(result.probe.id, said, cure(result.probe), escape(_happened(result)))
    return shown


def _happened(result: Result) -> str:
    """The outcome in words, on which model, and what mends it."""
    outcome, patches = result.outcome, result.probe.patches
    off = "" if not outcome.difference else f"logits off by {outcome.difference:.2g}"
    mended = f"mended by {' '.join(patches)}" if patches and not outcome.verdict.sound else ""
    return f"{result.model.name}: {'; '.join(filter(None, (outcome.detail, off, mended)))}"


def summary(results: Sequence[Result]) -> str:
    """How many probes came to which verdict, in one line."""
    counted = Counter(result.outcome.verdict for result in results)
    said = ", ".join(f"{counted[verdict]} {verdict.value}" for verdict in Verdict if counted[verdict])
    return f"{said}: nothing is known" if set(counted) == {Verdict.NOT_APPLICABLE} else said


def surprises(results: Sequence[Result]) -> list[str]:
    """Probes whose verdict is not the known one of stock llama-cpp-python 0.3.36, a line each."""
    return [
        f"{result.probe.id}: {result.outcome.verdict.value}, stock is known as {result.probe.stock.value}"
        for result in results
        if result.outcome.verdict != result.probe.stock
    ]


def as_json(results: Sequence[Result], under_test: Library) -> dict[str, Any]:
    """Everything that is known, as plain data."""
    return {
        "library": under_test.path,
        "system": under_test.system,
        "sound": sound(results, under_test.patches),
        "probes": [
            {
                "id": result.probe.id,
                "title": result.probe.title,
                "done": result.probe.done,
                "site": result.probe.site,
                "sound_library": result.probe.sound,
                "patches": list(result.probe.patches),
                "cure": cure(result.probe),
                "expected": expected(result, under_test.patches),
                "model": result.model.name,
                "seconds": round(result.seconds, 3),
                **result.outcome.as_json(),
            }
            for result in results
        ],
    }


def as_junit(results: Sequence[Result], under_test: Library) -> str:
    """A JUnit document: a wrong or dying probe is a failure, one that could not be set up an error.

    One that is as on stock, since the engine was built without its cure, is skipped.
    """
    awaited = [result for result in results if expected(result, under_test.patches)]
    verdicts = [result.outcome.verdict for result in results if result not in awaited]
    suite = ET.Element(
        "testsuite",
        name=_shown(f"hazards of {under_test.path}"),
        tests=str(len(results)),
        failures=str(sum(verdict in (Verdict.WRONG, Verdict.DIED) for verdict in verdicts)),
        errors=str(verdicts.count(Verdict.FAILED)),
        skipped=str(verdicts.count(Verdict.NOT_APPLICABLE) + len(awaited)),
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    for result in results:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"hazards.{result.model.name}",
            name=result.probe.id,
            time=f"{result.seconds:.3f}",
        )
        properties = ET.SubElement(case, "properties")
        ET.SubElement(properties, "property", name="cure", value=cure(result.probe))
        for number in result.probe.patches:
            ET.SubElement(properties, "property", name="patch", value=number)
        verdict, detail = result.outcome.verdict, _shown(result.outcome.detail)
        if verdict is Verdict.NOT_APPLICABLE:
            ET.SubElement(case, "skipped", message=detail)
        elif result in awaited:
            ET.SubElement(case, "skipped", message=f"cured by the set {cure(result.probe)}: {detail}")
        elif not verdict.sound:
            kind = "error" if verdict is Verdict.FAILED else "failure"
            said = ET.SubElement(case, kind, type=verdict.value, message=detail)
            said.text = f"{result.probe.done} ({result.probe.site}). A sound library: {result.probe.sound}."
    return ET.tostring(suite, encoding="unicode", xml_declaration=True)


def _shown(text: str) -> str:
    """`text` as XML can hold it and others may read it."""
    return printable(without_home(text))
