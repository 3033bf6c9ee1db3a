"""Writes the measured tables and pictures of README and docs from `benchmarks/results/`: no figure is typed.

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`; a test compares.
Run: python -m benchmarks.figures
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from llamahybrid.harness.bench import SAVED

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

GIB = ("1", "2", "4", "8", "16")


def load(name: str) -> Any:
    """What a benchmark wrote."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all but the first column to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def ratios() -> str:
    """Tokens decoded over the least possible, over models."""
    cells: Mapping[str, list[Any]] = defaultdict(list)
    for cell in load("ratios-stock.json")["cells"]:
        cells[cell["workload"]].append(cell)

    def row(name: str, of: Sequence[Any]) -> Sequence[str]:
        worst = max(of, key=lambda cell: float(cell["ours"]))
        stock = [cell["stock"] for cell in of if cell["stock"] is not None]
        ours = [cell["ours"] for cell in of]
        where = f" ({worst['arch']})" if worst["ours"] >= 1.0005 else ""
        return name, f"{fmean(stock):.2f}", f"{fmean(ours):.3f}", f"{worst['ours']:.3f}{where}"

    return markdown(("workload", "stock", "llamahybrid", "worst"), (row(*item) for item in cells.items()))


def budgets() -> str:
    """The same under budgets of RAM; "mid-generation" is no part of the means (see `benchmarks.budgets`)."""
    kinds = (("a chat alone", "templates"), ("all chats in one cache", "side by side"))
    sides = (("llamahybrid", "ours"), ("llama-server's rules", "server"))
    measured = load("budgets.json")

    def row(kind: str, side: str) -> Sequence[str]:
        of = [measured[kind][side][gib] for gib in GIB]
        return [f"{fmean(v for name, v in one.items() if name != 'mid-generation'):.3f}" for one in of]

    rows = ((f"{name}, {whose}", *row(kind, side)) for name, kind in kinds for whose, side in sides)
    return markdown(("GiB", *GIB), rows)


SHORT = (
    ("exact append", "a chat that only grows"),
    ("chat: thinking stripped", "thinking stripped from the history"),
    ("chat: regenerate x 6", "an answer regenerated six times"),
    ("chat: edit a message", "a message in the middle edited"),
    ("chat: tools and pages", "tool calls and fetched pages"),
    ("four users", "four users in turn"),
    ("shared system prompt", "eight chats on one system prompt"),
    ("few-shot", "few-shot batch"),
    ("document questions", "questions on one document"),
)


def short_ratios() -> str:
    """The workloads that people ask about first, in their words."""
    cells = load("ratios-stock.json")["cells"]

    def row(workload: str, words: str) -> Sequence[str]:
        of = [cell for cell in cells if cell["workload"] == workload]
        return words, f"{fmean(c['stock'] for c in of):.1f}", f"{fmean(c['ours'] for c in of):.3f}"

    return markdown(("", "stock", "llamahybrid"), (row(*item) for item in SHORT))


def bench() -> str:
    """The peers in one run: what `llamahybrid bench` wrote last."""
    every = {path.name: load(path.name) for path in RESULTS.glob("bench-*.json")}
    found = every[max(name for name, results in every.items() if results.get("complete", True))]

    def row(cell: Mapping[str, Any], before: str) -> Sequence[str]:
        name = "" if cell["workload"] == before else cell["workload"]
        if cell["error"]:
            return name, cell["target"], "failed", "", "", ""
        decoded, least = cell["decoded"], cell["least"]
        return (
            name,
            cell["target"],
            "cannot tell" if decoded is None or not least else f"{decoded / least:.2f}",
            *("" if value is None else f"{value:.{digits}f}" for value, digits in measured(cell)),
        )

    def measured(cell: Mapping[str, Any]) -> Sequence[tuple[float | None, int]]:
        mib = None if cell["resident"] is None else cell["resident"] / (1 << 20)
        return (cell["ttft"], 3), (cell["tokens_per_second"], 0), (mib, 1)

    cells = [cell for cell in found["cells"] if cell["workload"] != SAVED]
    befores = ["", *(cell["workload"] for cell in cells)]
    head = ("workload", "target", "decoded / least", "first token, s", "tokens/s", "MiB a chat")
    return markdown(head, map(row, cells, befores))


TABLES: Mapping[str, Callable[[], str]] = {
    "short-ratios": short_ratios,
    "ratios": ratios,
    "budgets": budgets,
    "bench": bench,
}


def filled(text: str) -> str:
    """A page with its tables as the results have them. Raises KeyError for a table that nobody makes."""
    return BLOCK.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[3]}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
