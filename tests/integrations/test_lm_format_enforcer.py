"""lm-format-enforcer's logits processor."""

from __future__ import annotations

from typing import Any

import llama_cpp

from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SETTINGS, SYSTEM, needed, reuses

needed("lmformatenforcer", "lm_format_enforcer")

from lmformatenforcer import RegexParser  # noqa: E402
from lmformatenforcer.integrations.llamacpp import (  # noqa: E402
    build_llamacpp_logits_processor,
    build_token_enforcer_tokenizer_data,
)


def test_answers_by_a_pattern(tiny_model: TinyModel) -> None:
    def scenario() -> Any:
        llm = llama_cpp.Llama(str(tiny_model("qwen35")), n_ctx=2048, verbose=False, **SETTINGS)
        data = build_token_enforcer_tokenizer_data(llm)
        said = []
        for question in (*ASKED, *ASKED):
            enforce = build_llamacpp_logits_processor(data, RegexParser(" (The )?(Mur|Inn)( is long)?[.]"))
            answer = llm(
                SYSTEM + question,
                max_tokens=60,
                temperature=0.0,
                logits_processor=llama_cpp.LogitsProcessorList([enforce]),
            )
            said.append(answer["choices"][0]["text"])
        assert all("Mur" in text or "Inn" in text for text in said)
        return said, llm

    reuses(scenario)
