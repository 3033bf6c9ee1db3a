"""Haystack's llama-cpp-haystack, which binds the class when it is imported."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SETTINGS, SYSTEM, needed, reuses

needed("haystack_integrations.components.generators.llama_cpp", "haystack")

from haystack.dataclasses import ChatMessage  # noqa: E402
from haystack_integrations.components.generators.llama_cpp import LlamaCppChatGenerator  # noqa: E402


@pytest.mark.parametrize("stream", [False, True])
def test_chats(tiny_model: TinyModel, stream: bool) -> None:
    told = []

    def scenario() -> Any:
        generator = LlamaCppChatGenerator(
            model=str(tiny_model("qwen35")),
            n_ctx=2048,
            model_kwargs={**SETTINGS, "verbose": False, "chat_format": "chatml"},
            generation_kwargs={"max_tokens": 12, "temperature": 0.0},
        )
        said, pieces = [], []
        messages = [ChatMessage.from_system(SYSTEM)]
        for question in (*ASKED, *ASKED):
            del messages[1:]
            messages.append(ChatMessage.from_user(question))
            options = {"streaming_callback": lambda chunk: pieces.append(chunk.content)} if stream else {}
            (reply,) = generator.run(messages, **options)["replies"]
            said.append(reply.text)
            told.append(reply.meta.get("usage"))
        assert not stream or "".join(pieces) == "".join(said)
        return said, generator._model

    reuses(scenario)
    if not stream:
        assert told[-1]["prompt_tokens_details"]["cached_tokens"] > len(SYSTEM)
