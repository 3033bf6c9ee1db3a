"""The prompts of chats, without decoding them."""

from __future__ import annotations

from typing import Any

from llamahybrid.client.chat_prompt import Prompt
from llamahybrid.client.chat_prompt import chat_prompt as render
from llamahybrid.client.chat_way import continuation_of
from llamahybrid.client.continuation import Continuing
from llamahybrid.llama import Llama
from llamahybrid.server.arguments import arguments
from llamahybrid.server.bodies import ChatCompletionRequest
from llamahybrid.server.errors import bad
from llamahybrid.server.loading import PromptRules, prompt_rules
from llamahybrid.server.options import template_kwargs
from llamahybrid.server.thinking import goes_on


def chat_prompt(llm: Llama, body: ChatCompletionRequest) -> Prompt:
    """Return the prompt of a chat.

    Raises Refusal if the format of this model decodes by itself, ContextOverflow for a prompt whose beginning
    alone fills the context, ValueError and what formats raise at messages.
    """
    if llm.chat_handler is not None:
        raise bad("the chat format of this model makes no prompt of text alone", "messages")
    options, template = arguments(llm, body, ""), template_kwargs(llm, body)
    del options["n"]
    token = prompt_rules.set(PromptRules())
    try:
        if not goes_on(llm, body):
            return render(llm, template, **options)
        continuation = continuation_of(llm, options["messages"])
        stand_in: Any = Continuing(llm, continuation)
        prompt = render(stand_in, template, **{**options, "messages": options["messages"][:-1]})
        return Prompt(prompt.text + continuation.after(prompt.text), prompt.tokens)
    finally:
        prompt_rules.reset(token)
