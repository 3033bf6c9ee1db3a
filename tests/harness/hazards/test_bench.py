"""The bench that probes work at: what is asked of a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llamahybrid.harness.hazards.model import Bench
from llamahybrid.harness.hazards.outcome import NotApplicable


@pytest.mark.parametrize(
    ("arch", "refused"),
    [
        ("qwen35", {"window", "other positions"}),
        ("mamba", {"hybrid", "attention", "window", "planes", "M-RoPE"}),
        ("llama", {"hybrid", "recurrent", "window", "planes", "M-RoPE"}),
        ("gemma3", {"hybrid", "recurrent", "planes", "M-RoPE"}),
        ("jamba", {"window", "planes", "M-RoPE"}),
        ("qwen4exp", {"window", "other positions", "shared tokens"}),
        ("bert", {"hybrid", "recurrent", "window", "planes", "M-RoPE", "memory"}),
    ],
)
def test_what_cannot_happen_with_a_model_is_not_applicable(
    bench: Callable[[str], Bench], arch: str, refused: set[str]
) -> None:
    model = bench(arch)
    needs: dict[str, Callable[[], object]] = {
        "hybrid": model.need_hybrid,
        "recurrent": model.need_recurrent,
        "attention": model.need_attention,
        "window": model.need_window,
        "M-RoPE": lambda: model.need_multi_rope(True),
        "other positions": lambda: model.need_multi_rope(False),
        "planes": lambda: model.with_planes(2),
        "shared tokens": model.need_shared_tokens,
        "memory": model.context,
    }
    found = set()
    for name, need in needs.items():
        try:
            need()
        except NotApplicable:
            found.add(name)
    assert found == refused
