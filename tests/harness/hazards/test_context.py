"""Requirements of probes on models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from llamahybrid.capi.gguf import quiet
from llamahybrid.harness.hazards.effect import NotApplicable
from llamahybrid.harness.hazards.model import ModelUnderTest

REFUSED = {
    "qwen35": {"window", "other positions"},
    "mamba": {"hybrid", "attention", "window", "planes", "M-RoPE"},
    "llama": {"hybrid", "recurrent", "window", "planes", "M-RoPE"},
    "gemma3": {"hybrid", "recurrent", "planes", "M-RoPE"},
    "jamba": {"window", "planes", "M-RoPE"},
    "qwen4exp": {"window", "other positions", "shared tokens"},
    "bert": {"hybrid", "recurrent", "window", "planes", "M-RoPE", "memory"},
}


@pytest.mark.parametrize("arch", REFUSED)
def test_requirement_that_a_model_lacks_is_not_applicable(tiny_model: Callable[..., Path], arch: str) -> None:
    with quiet():
        model = ModelUnderTest(str(tiny_model(arch)))
        needs: dict[str, Callable[[], object]] = {
            **{name: partial(model.need, name) for name in ("hybrid", "recurrent", "attention", "window")},
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
    assert found == REFUSED[arch]
