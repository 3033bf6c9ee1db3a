"""llama-index-llms-llama-cpp, which binds the class when it is imported."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SETTINGS, SYSTEM, needed, reuses

needed("llama_index.llms.llama_cpp", "llama_index")

from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.llms.llama_cpp import LlamaCPP  # noqa: E402


def prompt_of(messages: Any) -> str:
    said = "".join(f"<|im_start|>{m.role.value}\n{m.content}<|im_end|>\n" for m in messages)
    return f"{said}<|im_start|>assistant\n"


def model(path: str) -> Any:
    return LlamaCPP(
        model_path=path,
        temperature=0.0,
        max_new_tokens=12,
        context_window=2048,
        model_kwargs={**SETTINGS, "verbose": False},
        messages_to_prompt=prompt_of,
        completion_to_prompt=lambda text: text,
        verbose=False,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_chats(tiny_model: TinyModel, stream: bool) -> None:
    def scenario() -> Any:
        llm, said = model(str(tiny_model("qwen35"))), []
        for question in (*ASKED, *ASKED):
            messages = [
                ChatMessage(role="system", content=SYSTEM),
                ChatMessage(role="user", content=question),
            ]
            if stream:
                said.append("".join(part.delta or "" for part in llm.stream_chat(messages)))
            else:
                said.append(llm.chat(messages).message.content)
        return said, llm._model

    reuses(scenario)
