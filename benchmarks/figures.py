"""Write the measured tables of README and docs from `benchmarks/results/`: no figure is typed.

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`; tests/test_docs.py compares.
Run: python -m benchmarks.figures
"""

from __future__ import annotations

import json
import os
import platform
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from llamahybrid.engine import bindings
from tests.lab.habits import LINE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

DECODE_LOOP = "2026-11-26"
"""Results made before this day are of an older decode loop, and are not shown."""

GIB = ("1", "2", "4", "8", "16")


def machine() -> str:
    """The machine and the versions a measurement belongs to, in one line."""
    host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    names = "llama-cpp-python", "llamahybrid"
    versions = ", ".join(f"{name} {bindings.version(name)}" for name in names)
    return f"{host}, Python {platform.python_version()}, {versions}"


class Stale(Exception):
    """There is no result of the present decode loop; the message is the command that makes one."""


def load(name: str, command: str) -> Any:
    """Return the newest complete result whose file matches `name`. Raise Stale without one that is shown."""
    every = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob(name)]
    shown = [each for each in every if each.get("complete", True) and each.get("made", "") >= DECODE_LOOP]
    if not shown:
        raise Stale(command)
    return max(shown, key=lambda each: each["made"])


def wrapped(text: str) -> str:
    """Return a paragraph in lines as long as those of the pages."""
    return textwrap.fill(text, LINE, break_long_words=False, break_on_hyphens=False) + "\n"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


RATIOS = (
    ("exact append", "a chat that only grows"),
    ("chat: thinking stripped", "thinking stripped from the history"),
    ("chat: regenerate x 6", "an answer regenerated six times"),
    ("chat: edit a message", "a message in the middle edited"),
    ("chat: tools and pages", "tool calls and fetched pages"),
    ("mid-generation", "a follow-up in the middle of an answer"),
    ("four users", "four users in turn"),
    ("shared system prompt", "eight chats on one system prompt"),
    ("few-shot", "few-shot batch"),
    ("document questions", "questions on one document"),
    ("raw: thinking stripped", "thinking stripped, raw tokens"),
)
"""Workloads that are shown, and their names in the table."""

RATIOS_COMMAND = (
    "LLAMAHYBRID_ENGINE=stock python -m benchmarks.ratios --json benchmarks/results/ratios-stock.json"
)


def ratios() -> str:
    """Tokens decoded over the least possible, mean and worst of the models."""
    cells: Mapping[str, list[Any]] = defaultdict(list)
    for cell in load("ratios-stock.json", RATIOS_COMMAND)["cells"]:
        cells[cell["workload"]].append(cell)

    def row(workload: str, words: str) -> Sequence[str]:
        of = cells[workload]
        worst = max(of, key=lambda cell: float(cell["ours"]))
        stock = fmean(cell["stock"] for cell in of if cell["stock"] is not None)
        where = f" ({worst['arch']})" if worst["ours"] >= 1.0005 else ""
        return words, f"{stock:.2f}", f"{fmean(c['ours'] for c in of):.3f}", f"{worst['ours']:.3f}{where}"

    return markdown(("workload", "stock", "llamahybrid", "worst"), (row(*item) for item in RATIOS))


def budgets() -> str:
    """The same under budgets of RAM; "mid-generation" is no part of the means (see `benchmarks.budgets`)."""
    measured = load("budgets.json", "python -m benchmarks.budgets")

    def row(name: str, kind: str) -> Sequence[str]:
        each = ([v for w, v in measured[kind][gib].items() if w != "mid-generation"] for gib in GIB)
        return name, *(f"{fmean(ratios):.3f}" for ratios in each)

    return markdown(
        ("GiB", *GIB), [row("a chat alone", "templates"), row("all chats in one cache", "side by side")]
    )


SIDES = (("stock", "stock llama-cpp-python"), ("ours", "llamahybrid"))
"""Names that a run of `llamahybrid bench` gives stock and llamahybrid."""


def short() -> str:
    """Tokens and seconds of stock and llamahybrid, from what `llamahybrid bench` wrote last."""
    found = load(
        "bench-*.json",
        "llamahybrid bench MODEL --on stock --on ours --json benchmarks/results/bench-DAY.json",
    )
    cells = {
        (w["workload"], target["name"]): w
        for target in found["targets"]
        for w in target["workloads"]
        if w["decoded"] and w["times"] and w["times"]["ttft"] and "client" not in w["workload"]
    }
    sides = [next((s for s in names if any(s == t for _, t in cells)), names[0]) for names in SIDES]
    workloads = dict.fromkeys(name for name, _ in cells if all((name, side) in cells for side in sides))

    def row(name: str) -> Sequence[str]:
        stock, ours = (cells[name, side] for side in sides)
        tokens = [f"{cell['decoded']:,}" for cell in (stock, ours)]
        return name, *tokens, *(f"{cell['times']['ttft']:.3f}" for cell in (stock, ours))

    head = ("", "tokens, stock", "llamahybrid", "seconds, stock", "llamahybrid")
    machine = found["machine"]
    settings = (
        f"{', '.join(found['models'])}, threads: {machine['n_threads']}, rounds: {machine['rounds']}, "
        f"{machine['system']} {machine['processor']}, {machine['cores']} cores, {found['made'][:10]}."
    )
    return markdown(head, map(row, workloads)) + "\n" + wrapped(settings)


def clients() -> str:
    """Medians of what `benchmarks.clients` measured of several clients, by subject."""
    command = "python -m benchmarks.clients --clients 1 4 8 --json benchmarks/results/clients.json"
    found = load("clients.json", command)
    parts = [part for part in found["parts"] if part["part"] != "drafts"]
    names = list(dict.fromkeys(name for part in parts for name in part["runs"]))

    def rows() -> Iterable[Sequence[str]]:
        for part in parts:
            for measure in next(iter(part["runs"].values()))[0]:
                each = [[run[measure] for run in part["runs"].get(name, ())] for name in names]
                cells = (f"{median(values):.4g}" if values else "" for values in each)
                yield f"{part['title']}: {measure}", *cells

    counts = sorted({len(runs) for part in found["parts"] for runs in part["runs"].values()})
    rounds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    settings = f"Threads: {found['threads']}, rounds: {rounds}, {found['made']}; {found['machine']}."
    return markdown(("", *names), rows()) + "\n" + wrapped(settings)


TABLES: Mapping[str, Callable[[], str]] = {
    "short": short,
    "ratios": ratios,
    "budgets": budgets,
    "clients": clients,
}


def table(name: str) -> str:
    """Return a table, or the command that measures it. Raise KeyError for an unknown name."""
    try:
        return TABLES[name]()
    except Stale as command:
        return wrapped(f"*To measure: `{command}`, then `make docs`.*")


def filled(text: str) -> str:
    """Return a page with its tables as the results have them. Raise KeyError for an unknown table."""
    return BLOCK.sub(lambda m: f"{m[1]}{table(m[2])}{m[3]}", text)


def main() -> None:
    """Write all pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
