"""Print an outline of a cache as trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.markup import escape
from rich.tree import Tree

from llamahybrid.cli.cache_folder import NAME_LETTERS, age
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import tokens_of
from llamahybrid.prompt_cache.outline import Branch, CacheOutline

DEEPEST = 12
"""Deeper branches are not indented further, for the terminal's width."""


def trees(
    seen: CacheOutline,
    written: Mapping[tuple[str, bytes], float],
    spell: Callable[[Tokens], str] | None = None,
) -> list[Tree]:
    """A tree for each model and salt. `spell`: returns the text of tokens, shortened to a line.

    `written`: times of records by namespace and token path, in seconds since 1970.
    """
    roots: dict[str, Tree] = {}
    made: list[tuple[Tree, int, bytes]] = []
    for branch in seen.branches:
        name = branch.namespace
        if name not in roots:
            model, _, salt = name.partition("+")
            roots[name] = Tree(
                f"model {escape(model[:NAME_LETTERS])}" + (f", salt {escape(salt)}" if salt else "")
            )
        above, depth, path = (roots[name], 0, b"") if branch.parent < 0 else made[branch.parent]
        path += branch.ids
        label = _label(branch, written.get((name, path)))
        if spell is not None:
            label += f"  [dim]{escape(spell(tokens_of(branch.ids)))}[/]"
        node = above.add(label)
        made.append((above, depth, path) if depth >= DEEPEST else (node, depth + 1, path))
    return list(roots.values())


def _label(branch: Branch, written: float | None) -> str:
    kept = branch.disk
    parts = [f"{branch.start:,}-{branch.end:,}"]
    if kept.nbytes:
        plural = "" if kept.checkpoints == 1 else "s"
        parts.append(f"{kept.checkpoints} checkpoint{plural}, {kept.nbytes / 2**20:.1f} MiB")
    if written is not None:
        parts.append(age(written))
    if branch.why:
        parts.append(", ".join(f"{why} {position:,}" for position, why in sorted(branch.why.items())))
    if "disk" in branch.goes_next:
        parts.append("[red]goes next[/]")
    if branch.more:
        parts.append(f"{branch.more:,} more go on from here")
    return "  ".join(parts)
