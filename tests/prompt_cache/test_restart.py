"""A model with a folder or a server behind its cache goes on after a restart, and answers as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import PromptCache
from tests.conftest import take
from tests.lab.redis_server import RedisServer

ARCHITECTURES = ["qwen35", "gemma3", *(pytest.param(a, marks=pytest.mark.full) for a in ("llama", "mamba"))]
PROMPT = [(7 * i) % 200 + 5 for i in range(120)]
QUESTION = [(3 * i) % 190 + 9 for i in range(20)]

Open = Callable[..., Any]


def answered(open_model: Open, arch: str, prompt: list[int], **cache: Any) -> tuple[list[int], Any]:
    """The answer of a model that is opened, asked and closed; and the report of that request."""
    llm = open_model(arch, prompt_cache=PromptCache(64 << 20, **cache))
    tokens = take(llm, prompt)
    report = llm.last_request
    llm.close()
    return tokens, report


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("place", ["disk", "remote"])
def test_a_conversation_goes_on_after_its_model_was_closed(
    arch: str, place: str, open_model: Open, fresh: Callable[..., list[int]], tmp_path: Path, request: Any
) -> None:
    where = {"disk_dir": tmp_path / "é"}
    if place == "remote":
        server: RedisServer = request.getfixturevalue("server")
        where = {"remote": server.url}
    first, _ = answered(open_model, arch, PROMPT, **where)
    longer = [*PROMPT, *first[:4], *QUESTION]
    tokens, report = answered(open_model, arch, longer, **where)
    assert report.source == place
    assert report.cached >= len(PROMPT)
    assert tokens == fresh(longer, 8, arch)
