"""instructor, patched over `create_chat_completion_openai_v1` as its documentation shows."""

from __future__ import annotations

from typing import Any, Literal

import llama_cpp

from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SETTINGS, SYSTEM, needed, reuses

instructor = needed("instructor", "instructor")

from pydantic import BaseModel  # noqa: E402

# The random model needs it: what instructor asks for as `response_format`, upstream takes for free text.
GRAMMAR = r'''root ::= "{\"name\": " ("\"Mur\"" | "\"Inn\"") ", \"long\": " ("true" | "false") "}"'''


class River(BaseModel):
    name: Literal["Mur", "Inn"]
    long: bool


def test_structured_answers(tiny_model: TinyModel) -> None:
    def scenario() -> Any:
        llm = llama_cpp.Llama(
            str(tiny_model("qwen35")), n_ctx=2048, chat_format="chatml", verbose=False, **SETTINGS
        )
        create = instructor.patch(
            create=llm.create_chat_completion_openai_v1, mode=instructor.Mode.JSON_SCHEMA
        )
        grammar = llama_cpp.LlamaGrammar.from_string(GRAMMAR, verbose=False)
        said = []
        for question in (*ASKED, *ASKED):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            said.append(
                create(
                    messages=messages, response_model=River, temperature=0.0, max_tokens=200, grammar=grammar
                )
            )
        assert all(isinstance(river, River) for river in said)
        return [river.model_dump() for river in said], llm

    reuses(scenario)
