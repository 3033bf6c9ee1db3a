"""What of a conversation is written to disk, and how much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llamahybrid.prompt_cache import Checkpoint, write_policy
from llamahybrid.prompt_cache.tree import Tree
from llamahybrid.prompt_cache.write_policy import WriteBudget, restart_points

PATH = list(range(100))


def tree_of(*places: tuple[Sequence[int], bool, bool]) -> Tree:
    """Checkpoints at the ends of paths: (path, it has logits, a message starts there)."""
    tree = Tree()
    for path, logits, marked in places:
        row = np.zeros(3, np.float32) if logits else None
        ids = np.array(path, np.int32)
        tree.attach(tree.insert("m", ids), Checkpoint("m", len(path), np.zeros(8, np.uint8), row), marked)
    return tree


def points(tree: Tree, path: Sequence[int] = PATH) -> list[tuple[int, bool]]:
    return restart_points(tree.match("m", np.array(path, np.int32)))


def test_nothing_stored_is_nothing_to_write() -> None:
    assert points(Tree()) == []


def test_the_tip_comes_first_then_the_last_prompts_end_and_nothing_between() -> None:
    plain = [(PATH[:n], False, False) for n in (20, 50, 70, 100)]
    assert points(tree_of(*plain, (PATH[:40], True, False), (PATH[:60], True, False))) == [
        (100, False),
        (60, True),
    ]


def test_a_message_that_starts_before_the_last_prompts_end_is_written_in_its_place() -> None:
    marks = [(PATH[:30], False, True), (PATH[:56], False, True), (PATH[:80], False, True)]
    assert points(tree_of(*marks, (PATH[:60], True, False), (PATH, False, False))) == [
        (100, False),
        (56, False),
    ]


def test_where_paths_have_parted_the_last_checkpoint_before_is_written_once() -> None:
    other = [*PATH[:50], 999]
    tree = tree_of((PATH[:45], False, False), (PATH, True, False), (other, True, False))
    assert points(tree) == [(100, True), (45, False)]
    assert points(tree, PATH[:50]) == [(45, False)]


def test_an_hours_budget_is_kept_and_not_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(write_policy.time, "monotonic", lambda: clock[0])
    budget = WriteBudget(3600)
    assert budget.open()
    budget.spend(3700)
    assert not budget.open()
    clock[0] += 101
    assert budget.open()
    clock[0] += 100_000
    assert budget.open()
    budget.spend(3601)
    assert not budget.open()
    assert not WriteBudget(0).open()
