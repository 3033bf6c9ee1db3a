"""Clients of a server: they talk, stream, leave in the middle, hang up, and note what they were answered."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import httpx

N_CTX = 4096
PLAIN: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.0}
WORDS = "the a some tree river stone light and or but sees takes gives leaves under over when"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESET = struct.pack("ii", 1, 0)
"""Has a socket say so when it is closed (SO_LINGER)."""

NOTES = [f"a note of {what}" for what in ("rivers", "stones", "light", "trees and what lies under them")]
PROMPTS = 300
"""Few enough that the cache knows all paths after the first half of the requests, and grows no more."""


@dataclass(frozen=True)
class Said:
    """An answer and its request."""

    path: str
    asked: dict[str, Any]
    text: str
    tokens: int = 0
    finish: str = ""
    """As `finish_reason`; empty: the client left before the end, and has no usage either."""


@dataclass
class Load:
    """Answers, counts and errors of all clients."""

    answers: list[Said] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    hangups: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)
    worst: float = 0.0
    """Furthest that a token lay under a fresh context's best, as a share of the logits' range."""
    ties: int = 0
    """Answers with another text than a fresh context's, within the tolerance."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, said: Said, usage: dict[str, Any]) -> None:
        with self.lock:
            self.answers.append(said)
            self.prompt_tokens += usage.get("prompt_tokens", 0)
            self.cached_tokens += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)

    def known(self) -> str:
        """The share of prompt tokens that were cached, in words."""
        share = self.cached_tokens / max(1, self.prompt_tokens)
        return f"{share:.0%} of {self.prompt_tokens:,} prompt tokens"

    def failed(self, what: str) -> None:
        with self.lock:
            self.errors.append(what)


def words(chance: random.Random, n: int) -> str:
    return " ".join(chance.choice(WORDS.split()) for _ in range(n))


def talk(client: httpx.Client, load: Load, number: int, turns: int, seed: int) -> list[dict[str, str]]:
    """Hold a conversation of answers that are read whole, streamed or left; return its messages."""
    chance = random.Random(f"{seed} {number}")
    system = "You are a " + words(random.Random(number % 2), 30)
    messages = [{"role": "system", "content": system}]
    for _ in range(turns):
        messages.append({"role": "user", "content": words(chance, chance.randrange(3, 25))})
        asked = {"messages": list(messages), "max_tokens": chance.randrange(2, 16)}
        how = chance.choice(("whole", "whole", "whole", "stream", "stream", "stream", "hang up", "leave"))
        if how == "hang up":
            hang_up(client, CHAT, asked, chance)
        elif how == "leave":
            ask(client, load, CHAT, asked, stream=True, chunks=chance.randrange(1, 8))
        with load.lock:
            load.hangups += how in ("hang up", "leave")
        said = ask(client, load, CHAT, asked, stream=how == "stream")
        if said is None:
            return messages
        messages.append({"role": "assistant", "content": said})
        if sum(len(m["content"]) for m in messages) > N_CTX // 4 - 200:
            messages = messages[:1]
    return messages


def ask(
    client: httpx.Client,
    load: Load,
    path: str,
    asked: dict[str, Any],
    stream: bool = False,
    chunks: int | None = None,
) -> str | None:
    """The text of an answer; None where there was none, which is noted.

    `chunks`: of a stream, after which the client leaves.
    """
    try:
        if stream:
            text, finish, usage = read(client, path, {**asked, **PLAIN}, chunks)
        else:
            response = client.post(path, json={**asked, **PLAIN})
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) > 0
                with load.lock:
                    load.refused += 1
                return None
            assert response.status_code == 200, response.text
            made = response.json()
            choice, usage = made["choices"][0], made["usage"]
            finish = choice["finish_reason"]
            text = choice["text"] if path == TEXT else choice["message"]["content"]
    except (AssertionError, httpx.HTTPError, KeyError) as error:
        load.failed(repr(error))
        return None
    if finish or text:
        load.answered(Said(path, asked, text, usage.get("completion_tokens", 0), finish), usage)
    return text


def read(
    client: httpx.Client, path: str, asked: dict[str, Any], chunks: int | None
) -> tuple[str, str, dict[str, Any]]:
    """Text of a stream, its end, and usage; without these two if it was left after `chunks`."""
    text, finish, usage = "", "", dict[str, Any]()
    asked = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=asked) as response:
        assert response.status_code == 200, response.read()
        lines = (line[6:] for line in response.iter_lines() if line.startswith("data: "))
        for line in islice(lines, chunks):
            if line == "[DONE]":
                assert usage
                return text, finish, usage
            chunk = json.loads(line)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                finish = choice["finish_reason"] or finish
    assert chunks is not None, "a stream without an end"
    return text, "", {}


def hang_up(client: httpx.Client, path: str, asked: dict[str, Any], chance: random.Random) -> None:
    """Ask, and go at a random moment, politely or not: in the headers, the body, the prompt or the answer."""
    body = json.dumps({**asked, **PLAIN, "stream": chance.random() < 0.5}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    said = (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body
    if chance.random() < 0.1:
        said = said[: chance.randrange(len(said))]
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
        if chance.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.sendall(said)
        time.sleep(chance.random() ** 3 * 0.3)


def embed(client: httpx.Client, texts: list[str]) -> list[Any]:
    """Return the vectors of texts. Raises AssertionError."""
    answer = client.post("/v1/embeddings", json={"input": texts})
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


def request(client: httpx.Client, load: Load, vectors: dict[str, Any], number: int, seed: int) -> None:
    """Send a chat, a stream, a completion, texts to embed, or a request that is hung up on."""
    chance = random.Random(f"{seed} request {number}")
    kind = chance.choices(("chat", "stream", "text", "embed", "hang up"), (2, 1, 1, 1, 5))[0]
    pool = random.Random(chance.randrange(PROMPTS))
    system = {"role": "system", "content": words(random.Random(number % 5), 40)}
    question = {"role": "user", "content": words(pool, pool.randrange(1, 20))}
    if kind == "embed":
        texts = chance.sample(NOTES, chance.randrange(1, len(NOTES)))
        if embed(client, texts) != [vectors[each] for each in texts]:
            load.failed(f"other vectors of {texts}")
    elif kind == "hang up":
        asked = {"prompt": words(chance, chance.randrange(1, 400)), "max_tokens": 200}
        hang_up(client, TEXT, asked, chance)
    elif kind == "text":
        asked = {"prompt": words(pool, pool.randrange(1, 60)), "max_tokens": chance.randrange(1, 12)}
        ask(client, load, TEXT, asked)
    else:
        asked = {"messages": [system, question], "max_tokens": chance.randrange(1, 12)}
        ask(client, load, CHAT, asked, stream=kind == "stream")
