"""A gradio chat whose function streams from `llama_cpp.Llama`, asked through gradio's own client."""

from __future__ import annotations

from typing import Any

import llama_cpp

from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SETTINGS, SYSTEM, needed, reuses

gradio = needed("gradio", "gradio")


def test_a_chat_on_a_page(tiny_model: TinyModel) -> None:
    def scenario() -> Any:
        llm = llama_cpp.Llama(
            str(tiny_model("qwen35")), n_ctx=2048, chat_format="chatml", verbose=False, **SETTINGS
        )

        def answer(message: str, history: list[dict[str, Any]]) -> Any:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": message}]
            text = ""
            for chunk in llm.create_chat_completion(messages, stream=True, max_tokens=12, temperature=0.0):
                text += chunk["choices"][0]["delta"].get("content") or ""
                yield text

        from gradio_client import Client

        page = gradio.ChatInterface(answer, api_name="chat")
        _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, share=False)
        try:
            client = Client(url, verbose=False)
            said = [client.predict(question, api_name="/chat") for question in (*ASKED, *ASKED)]
        finally:
            page.close()
        return said, llm

    reuses(scenario)
