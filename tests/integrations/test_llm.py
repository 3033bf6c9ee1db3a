"""llm with llm-llama-cpp, which opens its model anew for every prompt: what was kept serves the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

import llamahybrid
from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SYSTEM, needed

needed("llm_llama_cpp", "llm")

import llm  # noqa: E402


@pytest.fixture
def plugin(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from llm_llama_cpp import LlamaModel

    yield LlamaModel("tiny", str(tiny_model("qwen35")))
    llamahybrid.uninstall()
    llamahybrid.configure(ram=None, disk=None)


def asked(model: Any, opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the answers; `opened` gets the models."""
    made = llama_cpp.Llama.__init__

    def seen(self: Any, *args: Any, **options: Any) -> None:
        opened.append(self)
        made(self, *args, **{**options, "n_threads": 1, "n_threads_batch": 1, "seed": 7})

    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp.Llama, "__init__", seen)
        options = {"max_tokens": 12, "n_ctx": 2048, "no_gpu": True}
        return [model.prompt(SYSTEM + question, **options).text() for question in (*ASKED, *ASKED)]


def test_prompts(plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(plugin, llm.Model)
    stock: list[Any] = []
    expected = asked(plugin, stock, monkeypatch)
    llamahybrid.install()
    llamahybrid.configure(ram="64MiB", disk=tmp_path)
    ours: list[Any] = []
    assert asked(plugin, ours, monkeypatch) == expected
    made = list(dict.fromkeys(ours))  # the constructor is seen when it is called, and once more inside ours
    assert len(made) == len(stock)
    cached = [each.last_request.cached for each in made]
    assert cached[0] == 0
    assert all(tokens >= len(SYSTEM) * 0.9 for tokens in cached[3:])
