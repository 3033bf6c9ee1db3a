"""Targets behind HTTP: llama-server's own interface where it is there, else OpenAI's."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from llamahybrid.errors import TargetError
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.report import Sameness
from llamahybrid.harness.targets.base import (
    LARGEST_TOLERANCE,
    SECONDS,
    TOLERANCE,
    ModelFile,
    Reply,
    Session,
    Shape,
    Target,
)
from llamahybrid.harness.workloads.speech import Vocabulary

_OURS = "llama-cpp-python "
"""Beginning of the build that `llamahybrid serve` reports, whose requests have salts."""
_PROBABILITIES = 4096
"""Number of most likely tokens requested where two answers part."""


def base_url(url: str) -> httpx.URL:
    """Return the URL of a server without its "/v1". Raises TargetError unless it is one of HTTP."""
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise TargetError(f"{url}: {error}") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise TargetError(f"{url} is no http:// or https:// URL")
    return found.copy_with(path=found.path.rstrip("/").removesuffix("/v1") or "/")


def lines(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text in pieces; JSON may hold other line breaks than "\\n", as U+2028."""
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        yield from whole
    yield rest


def events(found: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events in the lines of a server's stream. Raises TargetError for an error in it."""
    for line in found:
        if line.startswith("error:"):
            raise TargetError(line)
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            event = json.loads(line[5:])
            if not isinstance(event, dict) or "error" in event:
                raise TargetError(str(event.get("error") if isinstance(event, dict) else event))
            yield event


class Client:
    """JSON over HTTP, with a connection for each request."""

    def __init__(
        self, url: str, key: str | None = None, timeout: Callable[[], float] = lambda: SECONDS
    ) -> None:
        """`timeout`: returns the seconds that a request may be silent."""
        self._timeout = timeout
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.Client(base_url=base_url(url), headers=headers, limits=limits, trust_env=False)

    def json(self, path: str, body: object = None) -> Any:
        """POST, or GET without a body. Raises TargetError."""
        try:
            with self._open(path, body) as response:
                return json.loads(response.read())
        except ValueError as error:
            raise TargetError(f"{path}: no JSON came back") from error

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream. Raises TargetError."""
        try:
            with self._open(path, body) as response:
                yield from events(lines(response.iter_text()))
        except ValueError as error:
            raise TargetError(f"{path}: {error}") from error

    @contextmanager
    def _open(self, path: str, body: object) -> Iterator[httpx.Response]:
        method = "GET" if body is None else "POST"
        try:
            with self._client.stream(method, path, json=body, timeout=self._timeout()) as response:
                if response.status_code != 200:
                    said = response.read()[:400].decode(errors="replace")
                    raise TargetError(f"{method} {path}: HTTP status {response.status_code}: {said}")
                yield response
        except httpx.HTTPError as error:
            raise TargetError(f"{path}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


@dataclass
class Heard:
    """An answer, as the events of a stream tell it, or the one object that a reply is."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Ids, if the server tells them."""
    total: int | None = None
    """Tokens of the prompt."""
    cached: int | None = None
    worked: int | None = None
    """Decoded prompt tokens."""

    def add(self, event: Mapping[str, Any]) -> bool:
        """Take an event of llama-server or of OpenAI's interface; True if it has a part of the answer."""
        said, tokens = str(event.get("content") or ""), event.get("tokens") or ()
        for choice in event.get("choices") or ():
            spoken = choice.get("delta") or choice.get("message") or {}
            said += str(spoken.get("reasoning_content") or "")
            said += str(spoken.get("content") or choice.get("text") or "")
        self.text += said
        self.tokens += tokens
        usage, timings = event.get("usage") or {}, event.get("timings") or {}
        details = usage.get("prompt_tokens_details") or {}
        totals = _number(usage.get("prompt_tokens")), _number(event.get("tokens_evaluated"))
        cached = _number(details.get("cached_tokens")), _number(timings.get("cache_n"))
        self.total = next((n for n in totals if n is not None), self.total)
        self.cached = next((n for n in cached if n is not None), self.cached)
        self.worked = _number(timings.get("prompt_n")) if timings else self.worked
        return bool(said or tokens)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class HttpSession(Session):
    """A running server. `native`: it has llama-server's interface, which takes and gives token ids."""

    def __init__(
        self,
        client: Client,
        native: bool,
        vocabulary: Vocabulary | None,
        parallel: int,
        salts: bool | None = False,
    ) -> None:
        self._client, self._native = client, native
        self.parallel, self.vocabulary = parallel, vocabulary
        self.takes_tokens = native and vocabulary is not None
        self.takes_chats = True
        self.salts = salts
        self.name = ""
        self.known_state_bytes: int | None = None

    @property
    def state_bytes(self) -> int | None:
        """Size of a state, where it is known from elsewhere: servers do not tell it."""
        return self.known_state_bytes

    def ask(self, request: Request, fresh: str = "") -> Reply:
        """Answer; `fresh`: an unused salt, so that nothing stored is used. Raises TargetError."""
        body: dict[str, Any] = {"stream": True, "temperature": 0.0 if request.seed is None else 1.0}
        if request.seed is not None:
            body["seed"] = request.seed
        if self._native:
            body |= {"ignore_eos": True, "cache_prompt": not fresh or bool(self.salts)}
        if request.salt or fresh:
            body["cache_salt"] = fresh or request.salt
        if self.name:
            body["model"] = self.name
        if request.tokens and self._native and not request.messages:
            path = "/completion"
            body |= {"prompt": list(request.tokens), "n_predict": request.max_tokens, "return_tokens": True}
        else:
            path, more = self._openai(request)
            body |= {**more, "max_tokens": request.max_tokens, "stream_options": {"include_usage": True}}
        heard, began, first = Heard(), time.perf_counter(), None
        for event in self._client.stream(path, body):
            if heard.add(event) and first is None:
                first = time.perf_counter() - began
        seconds = time.perf_counter() - began
        bare = path == "/completion"
        prompt = tuple(request.tokens) if bare else self._rendered(request)
        total = heard.total or (len(request.tokens) if bare else None)
        if prompt is not None and total is not None and len(prompt) != total:
            prompt = None  # the server renders messages in another way
        tokens = tuple(heard.tokens) if bare else None
        return Reply(heard.text, seconds, first, prompt, tokens, total, heard.cached, heard.worked)

    def _openai(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Return path and prompt of a request to OpenAI's interface. Raises TargetError for token ids."""
        if request.messages:
            more: dict[str, Any] = {"messages": list(request.messages)}
            if self._native:
                more["reasoning_format"] = "none"
            if request.tools:
                more["tools"] = list(request.tools)
            return "/v1/chat/completions", more
        if request.text:
            return "/v1/completions", {"prompt": request.text}
        raise TargetError("takes no token ids")

    def _rendered(self, request: Request) -> tuple[int, ...] | None:
        """Return the token ids of a chat's prompt; None: the server does not tell."""
        if not (self._native and request.messages):
            return None
        body: dict[str, Any] = {"messages": list(request.messages)}
        if request.tools:
            body["tools"] = list(request.tools)
        with suppress(TargetError, KeyError, TypeError):
            prompt = self._client.json("/apply-template", body)["prompt"]
            told = {"content": prompt, "add_special": True, "parse_special": True}
            return tuple(self._client.json("/tokenize", told)["tokens"])
        return None

    def sameness(self, request: Request, reply: Reply) -> tuple[Sameness, str]:
        """Compare with the same server, told to reuse nothing, if it reports that it did not."""
        fresh = self._fresh(request)
        if fresh.reported or fresh.reused:
            return "unknown", f"it cannot be told to reuse nothing: {fresh.reported} tokens were"
        if fresh.reported is None and fresh.reused is None:
            return "unknown", "it does not say whether it reused anything"
        if fresh.text == reply.text and fresh.tokens == reply.tokens:
            return ("same", "") if reply.text or reply.tokens else ("unknown", "no token came, or no text")
        if request.seed is not None:
            return "unknown", "sampled: a tie cannot be told from a fault"
        if fresh.tokens is None or reply.tokens is None or reply.prompt is None:
            if self._fresh(request).text != fresh.text:
                return "unknown", "two fresh answers differ, too"
            return "different", f"{_around(reply.text, fresh.text)}; token ids are not told, it may be a tie"
        pairs = list(zip(fresh.tokens, reply.tokens, strict=False))
        where = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        if pairs[where:] and self._tied(reply.prompt, reply.tokens[:where], pairs[where]):
            return "tie", ""
        return "different", f"token {where + 1} of the answer: {_around(reply.text, fresh.text)}"

    def _fresh(self, request: Request) -> Reply:
        """Answer under an unused salt, and without the cache of a server that has no salts."""
        return self.ask(request, fresh=uuid.uuid4().hex)

    def _tied(self, prompt: Sequence[int], answer: Sequence[int], pair: tuple[int, int]) -> bool:
        """Tell whether two tokens are equally likely after `answer`, within the distance of two right runs.

        Prompt and answer as one prompt are decoded in batches, the answer's tokens one by one: two right
        runs, neither of which reuses anything.
        """
        batched = self._likely([*prompt, *answer], 0)
        single = self._likely(prompt, len(answer)) if answer else batched
        if batched is None or single is None or not set(pair) <= batched.keys():
            return False
        span = max(batched.values()) - min(batched.values())
        both = batched.keys() & single.keys()
        apart = max((abs(batched[token] - single[token]) for token in both), default=0.0)
        tolerance = min(max(TOLERANCE * span, 2 * apart), LARGEST_TOLERANCE * span)
        return abs(batched[pair[0]] - batched[pair[1]]) <= 2 * tolerance

    def _likely(self, prompt: Sequence[int], place: int) -> dict[int, float] | None:
        """Return log probabilities of the most likely tokens at a place of a fresh answer; None: not told."""
        body = {"prompt": list(prompt), "n_predict": place + 1, "n_probs": _PROBABILITIES, "temperature": 0}
        with suppress(TargetError, KeyError, IndexError, TypeError):
            reply = self._client.json("/completion", {**body, "cache_prompt": False, "ignore_eos": True})
            top = reply["completion_probabilities"][place]["top_logprobs"]
            return {each["id"]: float(each["logprob"]) for each in top}
        return None

    def spell(self, tokens: Sequence[int], special: bool = True) -> str | None:
        """Return the text of tokens; None: not told."""
        if self._native:
            with suppress(TargetError, KeyError):
                return str(self._client.json("/detokenize", {"tokens": list(tokens)})["content"])
        return None


def _around(text: str, fresh: str) -> str:
    """Quote the place where two texts part."""
    pairs = zip(text, fresh, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(fresh)))
    return f"{text[at : at + 20]!r} where a fresh answer has {fresh[at : at + 20]!r}"


class UrlTarget(Target):
    """A running server; it may have other clients and a past."""

    needs_model = False

    def __init__(self, name: str, url: str, key: str | None = None) -> None:
        super().__init__(name, "url")
        self._client = Client(url, key, self.timeout)

    @contextmanager
    def open(self, model: ModelFile | None, shape: Shape) -> Iterator[Session]:
        """Open a session on the server as it is. Raises TargetError."""
        build = self._build()
        salts = None if build is None else build.startswith(_OURS)
        session = HttpSession(self._client, build is not None, None, shape.parallel, salts)
        session.nonce = uuid.uuid4().hex
        session.name = self._model()
        yield session

    def _build(self) -> str | None:
        """Return the build of a server with llama-server's interface; None: it has another one."""
        with suppress(TargetError, KeyError, TypeError):
            self.versions["llama-server"] = str(self._client.json("/props")["build_info"])
        return self.versions.get("llama-server")

    def _model(self) -> str:
        """Return the name of its first model."""
        with suppress(TargetError, KeyError, IndexError, TypeError):
            return str(self._client.json("/v1/models")["data"][0]["id"])
        return ""
