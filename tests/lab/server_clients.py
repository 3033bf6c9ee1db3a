"""Clients of a server: they talk, stream, leave in the middle, hang up, and note what they were answered."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
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
        """Count an answer."""
        with self.lock:
            self.answers.append(said)
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    def failed(self, what: str) -> None:
        """An error."""
        with self.lock:
            self.errors.append(what)


def words(chance: random.Random, n: int) -> str:
    """Return `n` random words."""
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
            hang_up(int(client.base_url.port or 0), CHAT, {**asked, "stream": chance.random() < 0.5}, chance)
        elif how == "leave":
            leave(client, load, CHAT, asked, chance.randrange(1, 8))
        if how in ("hang up", "leave"):
            with load.lock:
                load.hangups += 1
        said = ask(client, load, CHAT, asked, stream=how == "stream")
        if said is None:
            return messages
        messages.append({"role": "assistant", "content": said})
        if sum(len(m["content"]) for m in messages) > N_CTX // 4 - 200:
            messages = messages[:1]
    return messages


def ask(
    client: httpx.Client, load: Load, path: str, asked: dict[str, Any], stream: bool = False
) -> str | None:
    """The text of an answer; None where there was none, which is noted."""
    try:
        if stream:
            wanted = {**asked, **PLAIN, "stream_options": {"include_usage": True}}
            text, finish, usage = read(client, path, wanted)
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
    load.answered(Said(path, asked, text, usage["completion_tokens"], finish), usage)
    return text


def leave(client: httpx.Client, load: Load, path: str, asked: dict[str, Any], chunks: int) -> None:
    """Read `chunks` chunks of a stream and close it."""
    pieces = []
    try:
        with client.stream("POST", path, json={**asked, **PLAIN, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    pieces += texts(json.loads(line[6:]))
                    chunks -= 1
                if not chunks:
                    break
    except (AssertionError, httpx.HTTPError, KeyError) as error:
        load.failed(repr(error))
        return
    if any(pieces):
        with load.lock:
            load.answers.append(Said(path, asked, "".join(pieces)))


def texts(chunk: dict[str, Any]) -> list[str]:
    """Return the text of each choice of a chunk."""
    return [c.get("text") or c.get("delta", {}).get("content") or "" for c in chunk["choices"]]


def read(client: httpx.Client, path: str, asked: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """A stream's text, how it ended, and usage."""
    pieces, finish, usage = list[str](), "", dict[str, Any]()
    with client.stream("POST", path, json={**asked, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for chunk in map(json.loads, lines):
        usage = chunk.get("usage") or usage
        pieces += texts(chunk)
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
    return "".join(pieces), finish, usage


def hang_up(port: int, path: str, asked: dict[str, Any], chance: random.Random) -> None:
    """Ask, and go at a random moment, politely or not: in the headers, the body, the prompt or the answer."""
    body = json.dumps({**asked, **PLAIN}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    said = (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body
    if chance.random() < 0.1:
        said = said[: chance.randrange(len(said))]
    with socket.create_connection(("127.0.0.1", port)) as connection:
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
        prompt = {"prompt": words(chance, chance.randrange(1, 400)), "max_tokens": 200}
        hang_up(int(client.base_url.port or 0), TEXT, {**prompt, "stream": chance.random() < 0.5}, chance)
    elif kind == "text":
        asked = {"prompt": words(pool, pool.randrange(1, 60)), "max_tokens": chance.randrange(1, 12)}
        ask(client, load, TEXT, asked)
    else:
        asked = {"messages": [system, question], "max_tokens": chance.randrange(1, 12)}
        ask(client, load, CHAT, asked, stream=kind == "stream")
