"""The picture of the rooms in docs/tour.md, drawn from the imports: an arrow says "knows of".

Arrows that follow from others are left out. Run: python -m tests.lab.house_picture
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

TOUR = Path(__file__).parents[2] / "docs" / "tour.md"
BLOCK = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)
LEFT_OUT = ("errors", "upstream", "tiny")
"""Known almost everywhere, or for tests."""

Arrows = frozenset[tuple[str, str]]


def reduced(arrows: Iterable[tuple[str, str]]) -> Arrows:
    """Without those that a longer way makes needless; there must be no circle."""
    all_ = frozenset(arrows)
    follows: dict[str, set[str]] = {}
    for a, b in all_:
        follows.setdefault(a, set()).add(b)

    def reached(start: str) -> set[str]:
        return {far for near in follows.get(start, ()) for far in ({near} | reached(near))}

    return frozenset((a, b) for a, b in all_ if not any(b in reached(c) for c in follows[a] - {b}))


def rooms(imports: Iterable[tuple[str, str]], folders: Iterable[str]) -> Arrows:
    """Arrows between rooms of imports between modules: `llama.py`, the front door, is one of them."""
    shown = {*folders, "llama"} - set(LEFT_OUT)

    def room(module: str) -> str:
        return module.split(".")[min(1, module.count("."))]

    pairs = {(room(a), room(b)) for a, b in imports}
    return reduced((a, b) for a, b in pairs if a != b and {a, b} <= shown)


def drawing(arrows: Arrows, folders: Iterable[str]) -> str:
    """As a Mermaid flowchart."""
    alone = {*folders} - {end for arrow in arrows for end in arrow} - set(LEFT_OUT)
    lines = [f"    {a} --> {b}" for a, b in sorted(arrows)]
    lines += [f"    {room}" for room in sorted(alone)]
    return "flowchart TD\n" + "\n".join(lines) + '\n    llama["llama.py"]\n'


def current() -> str:
    """The drawing of the package as it is."""
    from tests.test_imports import OWN, PACKAGE

    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return drawing(rooms({i.pair for i in OWN if not i.for_types}, folders), folders)


def main() -> None:
    text = TOUR.read_text(encoding="utf-8")
    TOUR.write_text(BLOCK.sub(lambda _: current(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
