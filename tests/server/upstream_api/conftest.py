"""A server that speaks the API of upstream's example server, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab.serving import Serving, serving

TinyModel = Callable[..., Path]

SETTINGS: dict[str, Any] = {"n_ctx": 8192, "api_config": "qwen3.5-0.8b", "logits_all": True}

CHAT: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is the weather in Paris?"},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = (
    "I look it up.\n</think>\n\nOne moment.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n"
    "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="session")
def shared(tiny_model: TinyModel) -> Iterator[Serving]:
    """One server for all tests of this folder that leave it as it was."""
    with serving(tiny_model("qwen35"), model=SETTINGS, api="upstream") as server:
        yield server


@pytest.fixture
def says(server: Serving, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`says(text, ...)`: the next requests, one after the other, are answered with these texts, decoded as
    if the model had sampled them."""

    def script(*texts: str, end: str = "<|im_end|>") -> None:
        llm = server.llm
        tokens = [iter(llm.tokenize((text + end).encode(), add_bos=False, special=True)) for text in texts]
        generate, now = llm.generate, list[Iterator[int]]()

        def next_one(prompt: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            now[:] = [tokens.pop(0)]
            return generate(prompt, *args, **kwargs)

        monkeypatch.setattr(llm, "generate", next_one, raising=False)
        monkeypatch.setattr(llm, "sample", lambda *args, **kwargs: next(now[0]), raising=False)

    return script
