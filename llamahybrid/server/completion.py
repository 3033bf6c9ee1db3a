"""Completions for the bodies of llama_cpp.server's API, made in the request's thread.

Several prompts are completed each as in a request of its own, as many at once as the model has slots, each in
a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

from llamahybrid.client.extras import asking
from llamahybrid.llama import Llama
from llamahybrid.server.answer_format import AnswerFormat
from llamahybrid.server.arguments import arguments
from llamahybrid.server.bodies import Body, CompletionRequest
from llamahybrid.server.chat_parser import chat_parser_of
from llamahybrid.server.options import AnswerTokens, budget_of, extras_of, goes_on, template_kwargs
from llamahybrid.server.prompts import PromptRules, prompt_rules
from llamahybrid.server.usage import reports_so_far, timings, usage_so_far

Part = tuple[int, Any]
"""The index of a prompt, and its completion or a chunk of it."""


def prompts_of(body: Body) -> int:
    """Return the number of prompts in a body; a chat has one."""
    return len(body.prompts()) if isinstance(body, CompletionRequest) else 1


def make_answer(form: AnswerFormat, body: Body, rules: PromptRules, ignore_unread: bool, stream: bool) -> Any:
    """Return the answer to a request of any API, or the events of its stream.

    Call it in the request's thread and context: it may take seconds to tokenize texts and to compile schemas.
    `body`: the completion or chat of the request. `ignore_unread`: leave out variables that the chat template
    does not read. Raises Refusal, and PromptTooLong by the rules.
    """
    prompt_rules.set(rules)
    form.asked.prepare(form.llm, body)
    return form.make(partial(_complete, form.llm, body, form.alias, ignore_unread), stream)


def _complete(llm: Llama, body: Body, alias: str, ignore_unread: bool, stream: bool) -> Any:
    prompts = prompts_of(body)
    if prompts == 1:
        made = _complete_one(llm, body, alias, ignore_unread, stream)
    else:
        handle = llm.requests.handle()
        assert handle is not None, "a job's requests have one"
        made = completions(
            lambda at: _complete_one(llm, body.of_prompt(at), alias, ignore_unread, stream),
            prompts,
            body.n,
            max(1, len(llm.slots)),
            handle.cancel,
            stream,
        )
    if stream:
        return _with_usage(llm, body, prompts, made)
    told = {} if prompts == 1 else {"usage": _usage(llm, body, prompts)}  # one prompt's is upstream's
    return {**made, **told, **_timings(llm, prompts)}


def _complete_one(llm: Llama, body: Body, alias: str, ignore_unread: bool, stream: bool) -> Any:
    told = AnswerTokens() if body.return_tokens else None
    options = {**arguments(llm, body, alias), "stream": stream}
    create = llm.create_completion
    parser = None
    if not isinstance(body, CompletionRequest):
        create = llm.create_chat_completion
        template = options["chat_template_kwargs"] = template_kwargs(llm, body, ignore_unread)
        budget = options["thinking_budget"] = budget_of(llm, body)
        options["thinking_budget_message"] = body.reasoning_budget_message
        options["continue_final_message"] = goes_on(llm, body)
        parser = chat_parser_of(llm, body, template, budget)
    with asking(extras_of(llm, body, told, frozenset() if parser is None else parser.control)):
        made = create(**options)
    made = made if told is None else told.into(made)
    return made if parser is None else parser.into(made)


def _timings(llm: Llama, prompts: int) -> dict[str, Any]:
    reports = reports_so_far(llm)
    return {"timings": timings(reports, prompts)} if reports else {}


def _usage(llm: Llama, body: Body, prompts: int) -> dict[str, Any]:
    return usage_so_far(llm, prompts, frozenset(body.stop_token_ids))


def _with_usage(
    llm: Llama, body: Body, prompts: int, chunks: Generator[Any, None, None]
) -> Generator[Any, None, None]:
    """Yield chunks. The last one has the `timings`; a chunk of `usage` follows if it was asked for."""
    options = body.stream_options
    counts = options is not None and options.include_usage
    left, last = (body.n or 1) * prompts, dict[str, Any]()
    with closing(chunks):
        for chunk in chunks:
            last = chunk
            for choice in chunk["choices"]:
                left -= choice.get("finish_reason") is not None
            if counts:
                chunk["usage"] = None
            elif left <= 0:
                chunk = {**chunk, **_timings(llm, prompts)}
            yield chunk
    if left > 0 or not counts:
        return
    named = {key: last[key] for key in ("id", "object", "created", "model")}
    yield {**named, "choices": [], "usage": _usage(llm, body, prompts), **_timings(llm, prompts)}


def completions(
    complete: Callable[[int], Any],
    prompts: int,
    answers: int,
    width: int,
    stop: Callable[[], None],
    stream: bool,
) -> Any:
    """Return a completion, or its stream, with the choices of all prompts.

    `complete(i)` makes the completion of prompt i; its choice j becomes choice `answers * i + j`, as OpenAI
    numbers them. `width`: prompts at once. If one fails, `stop()` ends the others and its error is raised.
    """
    parts = _parts(complete, prompts, min(prompts, width), stop)
    return _stream(parts, answers) if stream else _merged(dict(parts), answers)


def _shifted(made: Any, prompt: int, answers: int) -> list[Any]:
    return [{**choice, "index": answers * prompt + choice["index"]} for choice in made["choices"]]


def _merged(made: dict[int, Any], answers: int) -> dict[str, Any]:
    choices = [choice for prompt in sorted(made) for choice in _shifted(made[prompt], prompt, answers)]
    return {**made[0], "choices": choices}


def _stream(parts: Generator[Part, None, None], answers: int) -> Iterator[Any]:
    same: dict[str, Any] = {}
    with closing(parts):
        for prompt, chunk in parts:
            same = same or {"id": chunk["id"], "created": chunk["created"]}
            yield {**chunk, **same, "choices": _shifted(chunk, prompt, answers)}


def _parts(
    complete: Callable[[int], Any], prompts: int, width: int, stop: Callable[[], None]
) -> Generator[Part, None, None]:
    """Yield the parts of all prompts in the order of their making. Raises the first error of a prompt."""
    news = SimpleQueue[Part | Future[None]]()

    def work(prompt: int) -> None:
        made = complete(prompt)
        if isinstance(made, dict):
            news.put((prompt, made))
            return
        with closing(made):
            for chunk in made:
                news.put((prompt, chunk))

    with ThreadPoolExecutor(width, "llamahybrid-prompt") as threads:
        running = [threads.submit(copy_context().run, work, prompt) for prompt in range(prompts)]
        for each in running:
            each.add_done_callback(news.put)
        left = prompts
        try:
            while left:
                item = news.get()
                if isinstance(item, Future):
                    item.result()
                    left -= 1
                else:
                    yield item
        finally:
            for each in running:
                each.cancel()
            if left:
                stop()
