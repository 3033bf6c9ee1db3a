"""Subjects of a measurement at defaults: stock, ours in process or served, and llama-server, as streams."""

from __future__ import annotations

import json
import random
import re
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from llamahybrid.tiny.vocab import vocabulary
from tests.lab.serving import ServerProcess
from tests.llama_server.llama_server import LlamaServer

VOCABULARY = 200
CONTEXT = 8_192
GUESSES = 10
"""Tokens of a draft at most, of the subject that drafts."""

ASKED: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.0, "stream": True}
THOUGHT = "</think>"
THOUGHT_TOKEN = cast("list[str]", vocabulary("tiny").metadata["tokenizer.ggml.tokens"]).index(THOUGHT)

Stream = Callable[[list[int], int], Iterator[int]]
"""`stream(prompt, n)`: the tokens of a greedy, unpenalised answer, as they come."""

Result = dict[str, Any]
"""Measures of one subject in one round, by name."""


def words(chance: random.Random, low: int, high: int) -> list[int]:
    """Tokens of a message of a length that is drawn from [low, high)."""
    return [chance.randrange(10, VOCABULARY - 10) for _ in range(chance.randrange(low, high))]


@dataclass(frozen=True)
class Subject:
    """Stock, llamahybrid in process ("ours", "drafting") or served, or llama-server; the rest at defaults."""

    name: str
    model: Path
    slots: int
    threads: int
    program: Path | None = None
    """llama-server."""
    layers: int | None = None
    """Layers on a GPU, -1 for all; None: each subject's default."""

    @property
    def counts(self) -> dict[str, int]:
        layers = {} if self.layers is None else {"n_gpu_layers": self.layers}
        return {"n_threads": self.threads, "n_threads_batch": self.threads, **layers}

    def in_process(self) -> Any:
        """A `Llama` of llama_cpp, or of llamahybrid; a process imports the one that it measures."""
        options: dict[str, Any] = {"n_ctx": CONTEXT, "verbose": False, **self.counts}
        if self.name == "stock":
            import llama_cpp

            return llama_cpp.Llama(str(self.model), **options)
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        from llamahybrid import Llama

        if self.name == "drafting":
            options["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=GUESSES)
        return Llama(str(self.model), n_parallel=self.slots, **options)

    @contextmanager
    def opened(self) -> Iterator[Stream]:
        if self.name in ("stock", "ours"):
            with closing(self.in_process()) as llm:
                yield streamed(llm)
        else:
            with self.serving("model") as (stream,):
                yield stream

    @contextmanager
    def serving(self, *names: str) -> Iterator[list[Stream]]:
        """Streams of the models of a server, of which one is open at a time."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, f"{name}.gguf") for name in names]
            for file in files:
                file.symlink_to(self.model)
            if self.name == "served":
                size = {"n_parallel": self.slots, "n_ctx": CONTEXT, **self.counts}
                models = [{"model": str(file), **size} for file in files]
                server = ServerProcess({"models": models, "models_bytes": 1}, Path(folder, "log"))
                url = f"http://127.0.0.1:{server.port}/v1/completions"
                try:
                    yield [posted(url, "max_tokens", {"model": file.name}, said) for file in files]
                finally:
                    server.process.kill()
                    server.process.wait()
                return
            assert self.program is not None, "it was built"
            router, asked = len(files) > 1, {"return_tokens": True, "cache_prompt": True}
            options = ["-np", str(self.slots), "-c", str(self.slots * CONTEXT), "-t", str(self.threads)]
            options += ["-fa", "auto", "--warmup"]  # its defaults, which tests of exactness change
            options += ["--models-max", "1"] if router else []
            options += [] if self.layers is None else ["-ngl", str(self.layers)]
            with LlamaServer(self.program, Path(folder) if router else files[0], *options) as theirs:
                url = f"{theirs.url}/completion"
                each = [{**asked, "model": name} for name in names]
                yield [posted(url, "n_predict", more, lambda e: e.get("tokens", ())) for more in each]


def said(chunk: Any) -> Iterator[int]:
    """The tokens of a chunk of a completion: `tiny` has one for each byte and for "</think>"."""
    for part in re.split(f"({THOUGHT})", chunk["choices"][0]["text"]):
        yield from [THOUGHT_TOKEN] if part == THOUGHT else part.encode()


def streamed(llm: Any) -> Stream:
    def stream(prompt: list[int], n: int) -> Iterator[int]:
        for chunk in llm.create_completion(list(prompt), max_tokens=n, **ASKED):
            yield from said(chunk)

    return stream


def posted(url: str, limit: str, more: Mapping[str, Any], tokens: Callable[[Any], Iterable[int]]) -> Stream:
    """Streams of a server; `limit`: its name for the most tokens; `tokens`: those of an event."""

    def stream(prompt: list[int], n: int) -> Iterator[int]:
        body = json.dumps({"prompt": prompt, limit: n, **ASKED, **more}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    yield from tokens(json.loads(line[6:]))

    return stream
