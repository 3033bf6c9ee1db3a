"""Completions for the bodies of llama_cpp.server's API, made in the request's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp

from llamahybrid.client.extras import asking
from llamahybrid.core.report import RequestReport
from llamahybrid.llama import Llama
from llamahybrid.server.arguments import arguments
from llamahybrid.server.bodies import CompletionRequest
from llamahybrid.server.chat_reading import reading_of
from llamahybrid.server.loading import Observer, PromptRules, prompt_rules
from llamahybrid.server.options import AnswerTokens, extras_of, template_kwargs
from llamahybrid.server.several import completions
from llamahybrid.server.thinking import budget_of, goes_on
from llamahybrid.server.usage import timings, usage


def prompts_of(body: Any) -> int:
    """Return the number of prompts in a body; a chat has one."""
    return len(body.prompts()) if isinstance(body, CompletionRequest) else 1


def complete(llm: Llama, body: Any, alias: str, ignore_unread: bool, stream: bool) -> Any:
    """Return the completion, or its chunks, of a body of llama_cpp.server's API. Raises Refusal.

    Call it in the request's thread: it may take seconds to tokenize texts and to compile schemas.
    `ignore_unread`: leave out variables that the chat template does not read.
    """
    prompts = prompts_of(body)
    if prompts == 1:
        return _complete_one(llm, body, alias, ignore_unread, stream)
    handle = llm.requests.handle()
    assert handle is not None, "a job's requests have one"
    return completions(
        lambda at: _complete_one(llm, body.of_prompt(at), alias, ignore_unread, stream),
        prompts,
        body.n,
        max(1, len(llm.slots)),
        handle.cancel,
        stream,
    )


def _complete_one(llm: Llama, body: Any, alias: str, ignore_unread: bool, stream: bool) -> Any:
    told = AnswerTokens() if body.return_tokens else None
    options = {**arguments(llm, body, alias), "stream": stream}
    create = llm.create_completion
    reading = None
    if not isinstance(body, CompletionRequest):
        create = llm.create_chat_completion
        template = options["chat_template_kwargs"] = template_kwargs(llm, body, ignore_unread)
        options["thinking_budget"] = budget_of(llm, body)
        options["thinking_budget_message"] = body.reasoning_budget_message
        options["continue_final_message"] = goes_on(llm, body)
        reading = reading_of(llm, body, template)
    with asking(extras_of(llm, body, told, frozenset() if reading is None else reading.control)):
        made = create(**options)
    made = made if told is None else told.into(made)
    return made if reading is None else reading.into(made)


def limited(
    create: Callable[..., Any],
    tokens: int | None,
    observe: Observer | None,
    **options: Any,
) -> Any:
    """Return `create(**options)`; `observe` gets the ids of its prompts.

    Raises PromptTooLong for a prompt with more than `tokens` tokens.
    """
    prompt_rules.set(PromptRules(tokens, observe))
    return create(**options)


def account_of(
    llm: Llama, stops: frozenset[int], prompts: int, reports: Sequence[RequestReport]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `usage` and `timings` of a request; `stops`: its own stop tokens."""

    def ends(token: int) -> bool:
        return token in stops or bool(llama_cpp.llama_vocab_is_eog(llm._model.vocab, token))

    return usage(reports, ends, prompts), timings(reports, prompts)
