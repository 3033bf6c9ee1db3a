"""API: chats and responses, asked for and told as upstream's example server does, made by our `Llama`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import llama_cpp
from fastapi import APIRouter, Request, Response

from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.server.answer import Chunk, EventAnswer
from llamahybrid.server.arguments import biases
from llamahybrid.server.errors import refusal
from llamahybrid.server.job import Create
from llamahybrid.server.loading import ServedLlama, load
from llamahybrid.server.prompts import ChatApi
from llamahybrid.server.rendering import Prompt
from llamahybrid.server.routes import SECURED, InService
from llamahybrid.server.settings import ModelSettings
from llamahybrid.server.upstream_api.reading import Reading, finish_reason, formatter
from llamahybrid.server.upstream_api.source import Dialect, bodies, dialect, upstream
from llamahybrid.server.usage import usage_so_far

SYSTEM = ("system", "developer")
FIRST_ONLY = "must be at the beginning"
"""What Qwen's templates raise for a later system message."""

# -- the model -------------------------------------------------------------------------------------------


class SpeakingLlama(ServedLlama):
    """A `Llama` whose answers spell control tokens, and what ended them where the schema looks for it.

    gpt-oss, say, ends a call with <|call|>.
    """

    _spells_control = True
    api: UpstreamApi

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._said = threading.local()
        super().__init__(*args, **kwargs)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """See `Llama.generate`."""
        return self._noted(super().generate(tokens, *args, **kwargs))

    def _noted(self, made: Generator[int, Any, None]) -> Generator[int, Any, None]:
        with closing(made):
            sent = self._said.last = None
            while True:
                try:
                    token = made.send(sent)
                except StopIteration:
                    return
                self._said.last = token
                sent = yield token

    def end_token(self) -> int | None:
        """What ended the answer that this thread made last; None unless it was a token that ends answers."""
        last: int | None = getattr(self._said, "last", None)
        ended = last is not None and llama_cpp.llama_vocab_is_eog(self._model.vocab, last)
        return last if ended else None

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._ended(super()._create_completion(*args, **kwargs), kwargs)

    def _ended(self, made: Any, asked: dict[str, Any]) -> Iterator[Any]:
        with closing(made):
            for item in made:
                (choice,) = item["choices"]
                written = choice["finish_reason"] == "stop" and asked.get("grammar") is None
                if written and (end := self.end_token()) is not None:
                    yield from self._with_end(item, choice, end, asked)
                else:
                    yield item

    def _with_end(self, made: Chunk, choice: Chunk, end: int, asked: dict[str, Any]) -> Iterator[Chunk]:
        spelt = self.detokenize([end], special=True).decode("utf-8", errors="ignore")
        spelt = spelt if self.api.reads(spelt) else ""
        stops = asked.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            spelt = spelt.partition(stop)[0] if stop else spelt
        if asked.get("stream"):
            if spelt:
                yield {**made, "choices": [{**choice, "text": spelt, "finish_reason": None}]}
            yield made
        else:
            yield {**made, "choices": [{**choice, "text": choice["text"] + spelt}]}


def open_model(settings: ModelSettings, cache: PromptCache | None = None) -> Llama:
    """Open a model and what its requests go through. Raises as `load`, and EngineError."""
    up = upstream()
    llm = load(settings, cache, SpeakingLlama)
    assert isinstance(llm, SpeakingLlama)
    try:
        own = llm.metadata.get("tokenizer.chat_template", "")
        llm.api = UpstreamApi(llm, up, dialect(settings.api_config, own))
    except BaseException:
        llm.close()
        raise
    return llm


class UpstreamApi:
    """Upstream's formatter, with a model of ours behind it."""

    def __init__(self, llm: Llama, up: Any, spoken: Dialect) -> None:
        self._llm = llm
        self._up = up
        self._spoken = spoken
        self._schema_text = "" if spoken.schema is None else json.dumps(spoken.schema).replace("\\", "")
        self._formatter = formatter(up, self._model(spoken.schema))
        self._plain = up.OpenAIFormatter(self._model(None))
        """For answers that are not written as the schema says, or by a grammar of their own."""

    def _model(self, schema: dict[str, Any] | None) -> Any:
        """What the formatter asks of a model: its template, its vocabulary and the schema."""
        model = object.__new__(self._up.Model)
        model.llama_model = self._llm._model.model
        model.vocab = self._llm._model.vocab
        model.bos_token, model.eos_token = self._llm.token_bos(), self._llm.token_eos()
        model.chat_template_override = self._spoken.template
        model.mtmd_processor = None
        model.response_schema = schema
        model.model_path = ""
        model.chat_formatter = model._build_chat_formatter()
        return model

    def _reader(self, parts: Any) -> Any:
        """What reads the answer: one in JSON has no room for thinking, nor for what ends it."""
        return self._plain if parts.grammar_text and not parts.tool_name else self._formatter

    def reads(self, text: str) -> bool:
        """The schema looks for it; there such text is escaped, as in a regular expression."""
        return text in self._schema_text

    # -- in a thread of the request --------------------------------------------------------------------

    def chat(self, body: Any, alias: str, stream: bool) -> Any:
        """A chat completion, or its chunks. Raises ValueError for what cannot be asked."""
        functions = body.functions and [each.to_template_function() for each in body.functions]
        tools = body.tools and [each.to_template_tool() for each in body.tools]
        parts = self._parts(body)
        reading = Reading(self._reader(parts), self._plain, parts, functions, tools)
        made = self._complete(body, parts, alias, stream)
        return self._chunks(made, reading) if stream else reading.whole(self._completion(made))

    def prompt(self, body: Any) -> Prompt:
        """The prompt of a chat. Raises ValueError for what cannot be asked."""
        parts = self._parts(body)
        return Prompt(parts.prompt_text, parts.prompt_plan.text_tokens)

    def _parts(self, body: Any) -> Any:
        # Upstream refuses streams of several answers; each chunk says whose it is.
        taken = body.model_copy(update={"stream": False, "messages": self._taken(body.messages)})
        with _asked():
            return self._formatter.completion_request_from_chat_request(taken)

    def respond(self, body: Any, alias: str, stream: bool) -> Any:
        """A response, or its events. Raises ValueError for what cannot be asked."""
        with _asked():
            asked = self._formatter.response_request_to_chat_parts(body)
            asked = replace(asked, messages=self._taken(asked.messages))
            parts = self._formatter.completion_request_from_response_chat_parts(asked)
        reading = Reading(self._reader(parts), self._plain, parts, None, asked.tools)
        made = self._complete(body, parts, alias, stream)
        if stream:
            return self._events(made, reading, body, alias)
        told = reading.response(self._completion(made), body)
        _tell_cached(told, made["usage"])
        return told

    def _taken(self, messages: Sequence[Any]) -> list[Any]:
        """Messages as the template takes them.

        Agents send those of a developer, several for the system, and calls whose arguments are no JSON.
        """
        formatter = self._formatter.model.chat_formatter
        template = "" if formatter is None else formatter._template_text
        if "content_type" not in template:
            messages = [_with_json(message) for message in messages]
        if "developer" in template:
            return list(messages)
        lead = list(takewhile(lambda message: message.role in SYSTEM, messages))
        rest = [
            message.model_copy(update={"role": "user" if FIRST_ONLY in template else "system"})
            if message.role in SYSTEM
            else message
            for message in messages[len(lead) :]
        ]
        if len(lead) < 2:
            return [*(message.model_copy(update={"role": "system"}) for message in lead), *rest]
        told: list[Any] = []
        for message in lead:
            said = message.content or ""
            told += [{"type": "text", "text": "\n\n"}] if told else []
            told += [{"type": "text", "text": said}] if isinstance(said, str) else said
        return [lead[0].model_copy(update={"role": "system", "content": told}), *rest]

    def _complete(self, body: Any, parts: Any, alias: str, stream: bool) -> Any:
        asked = parts.payload
        bias = biases(self._llm, body) if asked.logit_bias else None
        grammar = None
        if parts.grammar_text is not None:
            grammar = llama_cpp.LlamaGrammar.from_string(parts.grammar_text, verbose=False)
        return self._llm.create_completion(
            parts.prompt_plan.text_tokens,
            max_tokens=self._spoken.max_output_tokens if asked.max_tokens is None else asked.max_tokens,
            # Upstream's sampler there knows these two, and neither top_k nor min_p nor repeat_penalty.
            **{"temperature": asked.temperature, "top_p": asked.top_p},
            **{"top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0},
            stop=asked.stop,
            logprobs=asked.logprobs,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=asked.seed,
            grammar=grammar,
            model=alias,
            n=asked.n,
            stream=stream,
        )

    def _completion(self, made: Chunk) -> Any:
        """As the formatter reads it."""
        choices = [{**choice, "finish_reason": finish_reason(choice)} for choice in made["choices"]]
        return self._up.OpenAICompletion.model_validate({**made, "choices": choices})

    def _chunks(self, made: Iterator[Chunk], reading: Reading) -> Iterator[Chunk]:
        for chunk in made:
            yield from reading.chunks(chunk)

    def _events(self, made: Iterator[Chunk], reading: Reading, body: Any, alias: str) -> Iterator[Chunk]:
        """The events of a response; the first come with the first token, so that errors have their status."""
        state, number = None, 0
        began: Chunk = {}
        try:
            for chunk in made:
                if state is None:
                    state = self._up.OpenAIFormatter.ResponsesStream(
                        body=body,
                        response_id=f"resp_{chunk['id']}",
                        created_at=float(chunk["created"]),
                        model=alias,
                    )
                    for each in self._formatter.start_response_stream(state):
                        began, number = _copy(each), each["sequence_number"]
                        yield began
                for part in reading.chunks(chunk):
                    for each in self._formatter.convert_chat_chunk_to_response_events(part, state):
                        number = each["sequence_number"]
                        yield _copy(each)
            if state is None:
                return
            told = usage_so_far(self._llm)
            ended = {**chunk, "choices": [{**chunk["choices"][0], "text": ""}], "usage": told}
            for each in self._formatter.response_stream_terminal_events(state, self._completion(ended)):
                _tell_cached(each["response"], told)
                yield _copy(each)
        except Exception as error:
            if began:
                failed = refusal(error)
                why = {"code": failed.code or "server_error", "message": failed.message}
                response = {**began["response"], "status": "failed", "error": why}
                yield {"type": "response.failed", "sequence_number": number + 1, "response": response}
            raise


def _with_json(message: Any) -> Any:
    """A message whose calls have JSON for arguments: those of freeform tools are text."""

    def mended(call: Any) -> Any:
        text = call.function.arguments or ""
        try:
            json.loads(text)
        except ValueError:
            text = json.dumps({"input": text}) if text.strip() else "{}"
        return call.model_copy(update={"function": call.function.model_copy(update={"arguments": text})})

    if not message.tool_calls:
        return message
    return message.model_copy(update={"tool_calls": [mended(call) for call in message.tool_calls]})


@contextmanager
def _asked() -> Iterator[None]:
    """Upstream's converters and templates stumble over what they do not know: it was asked for."""
    try:
        yield
    except (AssertionError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"this cannot be asked: {type(error).__name__}: {error}") from error


def _copy(event: Chunk) -> Chunk:
    """It is sent by another thread, while upstream goes on with what is in it."""
    copied: Chunk = json.loads(json.dumps(event))
    return copied


def _tell_cached(response: Chunk, told: Chunk) -> None:
    """Upstream says 0."""
    if response.get("usage"):
        cached = told.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        response["usage"]["input_tokens_details"]["cached_tokens"] = cached


# -- routes ----------------------------------------------------------------------------------------------


def _prepared(make: str) -> Callable[[Llama, Any, str], tuple[Create, dict[str, Any]]]:
    def prepare(llm: Llama, body: Any, alias: str) -> tuple[Create, dict[str, Any]]:
        assert isinstance(llm, SpeakingLlama)
        return getattr(llm.api, make), {"body": body, "alias": alias, "stream": body.stream}

    return prepare


def _prompt(llm: Llama, body: Any) -> Prompt:
    assert isinstance(llm, SpeakingLlama)
    return llm.api.prompt(body)


def chat_api() -> ChatApi:
    """How chats are asked for. Raises EngineError as `upstream`."""
    return ChatApi(bodies()[0], _prepared("chat"), _prompt)


def router() -> APIRouter:
    """`/v1/chat/completions` and `/v1/responses`. Raises EngineError as `upstream`."""
    made = APIRouter(dependencies=SECURED)
    chat_body, response_body = bodies()

    async def create_chat_completion(request: Request, body: Any, service: InService) -> Response:
        """Answer messages."""
        return await service.answer(request, body, _prepared("chat"))

    async def create_response(request: Request, body: Any, service: InService) -> Response:
        """Answer input items (OpenAI's Responses, stateless)."""
        return await service.answer(request, body, _prepared("respond"), EventAnswer)

    for path, answer, kind in (
        ("/v1/chat/completions", create_chat_completion, chat_body),
        ("/v1/responses", create_response, response_body),
    ):
        answer.__annotations__["body"] = kind
        made.post(path, tags=["OpenAI V1"], response_model=None)(answer)
    return made
