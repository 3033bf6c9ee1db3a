"""The subjects of `benchmarks.clients`: stock, llamahybrid in process and served, and llama-server.

Each gives `stream(prompt, n)`, greedy and unpenalised, of token ids: the vocabulary of `tiny` has a token for
each byte and "</think>", so that tokens are read from the text of a stream. Each process imports one
subject.
"""

from __future__ import annotations

import json
import re
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from llamahybrid.tiny.vocab import vocabulary
from tests.lab.serving import ServerProcess
from tests.llama_server.llama_server import LlamaServer

ASKED: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.0, "stream": True}
THOUGHT = "</think>"
THOUGHT_TOKEN = cast("list[str]", vocabulary("tiny").metadata["tokenizer.ggml.tokens"]).index(THOUGHT)

Stream = Callable[[list[int], int], Iterator[int]]
"""`stream(prompt, n)`: the tokens of an answer, as they come."""


@dataclass(frozen=True)
class Shape:
    """Options of a subject; all others keep their defaults."""

    model: Path
    slots: int
    context: int
    """Tokens that one request may hold."""
    threads: int
    program: Path | None = None
    """llama-server."""


def tokens_of(text: str) -> Iterator[int]:
    """The tokens of a piece of an answer."""
    for part in re.split(f"({THOUGHT})", text):
        yield from [THOUGHT_TOKEN] if part == THOUGHT else part.encode()


def options(shape: Shape) -> dict[str, Any]:
    """Arguments of either `Llama`."""
    threads = {"n_threads": shape.threads, "n_threads_batch": shape.threads}
    return {"model_path": str(shape.model), "n_ctx": shape.context, "verbose": False, **threads}


@contextmanager
def stock(shape: Shape) -> Iterator[Any]:
    """`llama_cpp.Llama`."""
    import llama_cpp

    with closing(llama_cpp.Llama(**options(shape))) as llm:
        yield llm


@contextmanager
def ours(shape: Shape) -> Iterator[Any]:
    """`llamahybrid.Llama`."""
    from llamahybrid import Llama

    with closing(Llama(**options(shape), n_parallel=shape.slots)) as llm:
        yield llm


def streamed(llm: Any) -> Stream:
    """Streams of `create_completion`."""

    def stream(prompt: list[int], n: int) -> Iterator[int]:
        for chunk in llm.create_completion(list(prompt), max_tokens=n, **ASKED):
            yield from tokens_of(chunk["choices"][0]["text"])

    return stream


def posted(url: str, body: dict[str, Any]) -> Iterator[Any]:
    """The events of a streamed reply."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


@contextmanager
def served(shape: Shape) -> Iterator[Stream]:
    """`llamahybrid serve`."""
    threads = ("--n_threads", str(shape.threads), "--n_threads_batch", str(shape.threads))
    size = ("--n_parallel", str(shape.slots), "--n_ctx", str(shape.context))
    with tempfile.NamedTemporaryFile() as log:
        server = ServerProcess(shape.model, Path(log.name), *size, *threads)
        try:

            def stream(prompt: list[int], n: int) -> Iterator[int]:
                url = f"http://127.0.0.1:{server.port}/v1/completions"
                for event in posted(url, {"prompt": prompt, "max_tokens": n, **ASKED}):
                    yield from tokens_of(event["choices"][0]["text"])

            yield stream
        finally:
            server.process.kill()
            server.process.wait()


@contextmanager
def theirs(shape: Shape) -> Iterator[Stream]:
    """llama-server."""
    assert shape.program is not None, "it was built"
    size = ("-np", str(shape.slots), "-c", str(shape.slots * shape.context), "-t", str(shape.threads))
    with LlamaServer(shape.program, shape.model, *size) as server:

        def stream(prompt: list[int], n: int) -> Iterator[int]:
            body = {"prompt": prompt, "n_predict": n, "temperature": 0, "repeat_penalty": 1.0}
            more = {"stream": True, "return_tokens": True, "cache_prompt": True}
            for event in posted(server.url + "/completion", {**body, **more}):
                yield from event.get("tokens", ())

        yield stream


@contextmanager
def opened(name: str, shape: Shape) -> Iterator[Stream]:
    """The streams of a subject."""
    if name in ("served", "llama-server"):
        with {"served": served, "llama-server": theirs}[name](shape) as stream:
            yield stream
        return
    with {"stock": stock, "ours": ours}[name](shape) as llm:
        yield streamed(llm)
