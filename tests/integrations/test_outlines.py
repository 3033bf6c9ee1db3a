"""outlines: its logits processors over `llama_cpp.Llama`, which it resets after each answer."""

from __future__ import annotations

from typing import Any, Literal

import llama_cpp
import pytest

from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SETTINGS, SYSTEM, needed, reuses

outlines = needed("outlines", "outlines")
WORDS = ("Mur", "Inn")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", [None, Literal["Mur", "Inn"], int], ids=str)
def test_answers_of_a_kind(tiny_model: TinyModel, kind: Any, chat: bool) -> None:
    def scenario() -> Any:
        llm = llama_cpp.Llama(
            str(tiny_model("qwen35")), n_ctx=2048, chat_format="chatml", verbose=False, **SETTINGS
        )
        model = outlines.from_llamacpp(llm, chat_mode=chat)
        ask = model if kind is None else outlines.Generator(model, kind)
        options = {"max_tokens": 8, "temperature": 0.0}
        said = [ask(SYSTEM + question, **options) for question in (*ASKED, *ASKED)]
        said.append("".join(ask.stream(SYSTEM + ASKED[0], **options)))
        assert kind is None or all(text in WORDS or text.lstrip("+-").isdigit() for text in said)
        return said, llm

    reuses(scenario)
