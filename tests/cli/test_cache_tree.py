"""An outline as trees in the terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console

from llamahybrid.cli.cache_tree import DEEPEST, trees
from llamahybrid.prompt_cache.nodes import ids_of
from llamahybrid.prompt_cache.outline import Branch, CacheOutline, Kept


def text(branches: list[Branch], width: int = 60, **options: object) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        for tree in trees(CacheOutline(tuple(branches)), **options):  # type: ignore[arg-type]
            console.print(tree)
    return [line.rstrip() for line in capture.get().splitlines()]


def branch(parent: int, start: int, **more: object) -> Branch:
    ids = ids_of(np.arange(start, start + 10, dtype=np.int32))
    kept = {"ram": Kept(), "disk": Kept(), **more}
    return Branch(parent, "0123456789abcdef", start, ids, **kept)  # type: ignore[arg-type]


def test_a_tree_for_each_model() -> None:
    disk = Kept(checkpoints=2, nbytes=3 << 20)
    lines = text([branch(-1, 0, disk=disk), branch(0, 10, goes_next=("disk",), more=1234)])
    assert lines == [
        "model 01234567",
        "└── 0-10  2 checkpoints, 3.0 MiB",
        "    └── 10-20  goes next  1,234 more go on from here",
    ]


def test_what_is_very_deep_stays_within_the_terminal() -> None:
    lines = text([branch(i - 1, 10 * i) for i in range(200)], width=80)
    assert len(lines) == 201
    assert lines[-1].endswith("1,990-2,000")
    assert lines[-1].index("1") <= 4 * (DEEPEST + 1)


def test_text_is_no_markup() -> None:
    (line,) = text([branch(-1, 0)], spell=lambda tokens: "[red]hello[/] [link=x]")[1:]
    assert "[red]hello[/] [link=x]" in line
