"""Upstream's completion and its `generate()`, made in the steps of a request, with its end told as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp

from llamahybrid.errors import LlamaHybridError, RequestCancelled, RequestSuperseded
from llamahybrid.request.finalisers import collecting
from llamahybrid.request.report import RequestReport
from llamahybrid.request.requests import Requests
from llamahybrid.request.ticket import Ticket

if TYPE_CHECKING:
    from llamahybrid.llama import Llama


def arguments(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """What a call of an upstream method gives each of its parameters by name, without `self`."""
    signature = inspect.signature(method)

    def named(*args: Any, **kwargs: Any) -> dict[str, Any]:
        given = dict(signature.bind(None, *args, **kwargs).arguments)
        del given["self"]
        return given

    return named


def keeps_rows(llm: Llama, options: Mapping[str, Any]) -> bool:
    """A completion with these options needs the logits of every token, and gets them for itself alone."""
    asked = options.get("logprobs")
    given = asked is not None and asked is not False  # 0 is asked for
    return given and (llm.requests.logprobs_on_request or llm._draft_model is not None)


def completion(
    requests: Requests,
    ticket: Ticket,
    start: Callable[[dict[str, Any]], Generator[Any, Any, None]],
    options: dict[str, Any],
) -> Generator[Any, Any, None]:
    """`start(options)`, a completion or its chunks, as the request of a ticket.

    A cancelled one ends its inner `generate()`, which upstream reads as "length" and without its text
    (llama.py, _create_completion): a stopping criterion makes it take the text, and "cancelled" is put in.
    """
    if requests.part_of_step(ticket):
        ticket = requests.gate.current or ticket
    criteria = options.get("stopping_criteria")

    def stopped(ids: Any, scores: Any) -> bool:
        return ticket.ended_early or bool(criteria is not None and criteria(ids, scores))

    options["stopping_criteria"] = llama_cpp.StoppingCriteriaList([stopped])
    for item in requests.drive(ticket, lambda: start(options)):
        ticket.tell(item)
        yield item


def generation(
    requests: Requests,
    tokens: Sequence[int] | Iterator[int],
    reset: bool,
    start: Callable[[list[int]], Generator[int, Sequence[int] | None, None]],
) -> Generator[int, Sequence[int] | None, None]:
    """Token ids from a prompt, inside its request; `start` is upstream's `generate` of what is left of it."""
    gate = requests.gate

    def completing() -> bool:
        return gate.current is not None and gate.current.completing

    try:
        prompt = list(tokens) if isinstance(tokens, Iterator) else tokens  # as upstream
        request, rest = requests.open(prompt, reset)
    except RequestCancelled:
        if completing():
            return
        raise
    try:
        inner = start(rest.tolist())
        sent: Sequence[int] | None = None
        while True:
            try:
                gate.check()
                if request.over:  # upstream would go on from the tokens of what took its place
                    raise RequestSuperseded(
                        "another request was made inside a step of this one, of its own model"
                    )
                token = inner.send(sent)
            except StopIteration:
                return
            except RequestCancelled:
                request.cancelled = True
                if completing():
                    return
                raise
            request.hand_out(token)
            sent = yield token
            request.sent |= sent is not None
    finally:
        # Given up between two steps, it is ended by the gate; a completion ends it inside one.
        if requests.active is request and gate.inside and not collecting():
            requests.end_active()


def decode_ahead(llm: Llama, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> RequestReport:
    """Decode a prompt (text, token ids or chat messages); what that took."""
    if isinstance(prompt, str):
        prompt = llm.tokenize(prompt.encode("utf-8"), special=True)
    words: list[Any] = list(prompt)
    if words and isinstance(words[0], dict):
        llm.create_chat_completion(words, max_tokens=1, seed=llm._seed)  # none is drawn for it
    else:
        stream = llm.generate(words, temp=0.0)
        next(stream)
        stream.close()
    if llm.last_request is None:
        raise LlamaHybridError("there is no prompt cache to warm; leave out prompt_cache=False")
    return llm.last_request
