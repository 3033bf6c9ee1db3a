"""A `Llama` in a process of its own, so that each target has its own library; speaks JSON lines.

``python -m llamahybrid.harness.targets.child`` reads {"id", "do", ...} and writes {"id", "reply"} or
{"id", "error"}. Output of the model's code goes to stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from operator import index
from pathlib import Path
from typing import Any, TextIO

import llama_cpp

from llamahybrid.capi.gguf import quiet
from llamahybrid.configuration import own_cache
from llamahybrid.engine import bindings, loaded
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.counters import DecodeCounter
from llamahybrid.harness.report import Sameness
from llamahybrid.harness.targets.base import STATE_TOKENS, Reply
from llamahybrid.harness.targets.reference import compare, fresh_context, last_row, pieces_of
from llamahybrid.harness.workloads.speech import Vocabulary

WORDS = 4096
"""Number of words of a vocabulary that prompts are made of."""


def maker(kind: str) -> Callable[..., Any]:
    """Return the class of a kind of target: "stock", "stock+ram", "stock+disk", "ours", "class:FILE:NAME"."""
    if kind == "ours":
        from llamahybrid.llama import Llama

        return Llama
    if kind.startswith("class:"):
        path, _, name = kind.removeprefix("class:").rpartition(":")
        spec = importlib.util.spec_from_file_location("target", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["target"] = module
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            raise ImportError(f"there is no {name} in {path}")
        made: Callable[..., Any] = getattr(module, name)
        return made
    stock: Callable[..., Any] = llama_cpp.Llama
    return stock


class _Seen(threading.local):
    """Prompt and tokens of this thread's call of `generate`."""

    def begin(self) -> None:
        self.prompt: tuple[int, ...] = ()
        self.tokens: list[int] = []
        self.first: float | None = None
        self.row: Any = None
        self.ahead = False
        """Tokens may be decoded before they are read."""


@dataclass(frozen=True)
class _Answer:
    """Data for the comparison of an answer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    greedy: bool
    row: Any
    """Logits of the first token; None: several requests are decoded at once, or no rows are kept."""
    pieces: Sequence[int]
    """Begins of the native batches of stock's own prefix reuse."""


class Child:
    """Runs requests on a `Llama`, of which there is one at a time."""

    def __init__(self) -> None:
        self.llm: Any = None
        self._seen = _Seen()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._answers: list[_Answer] = []
        self._noting = threading.Lock()
        self._parallel = 1
        self._kind = ""
        self._keeps_rows = True

    def open(self, kind: str, model: str, options: Mapping[str, Any], n_ctx: int, parallel: int) -> Any:
        """Open a model in place of the current one; return its properties.

        Raises ValueError with llama.cpp's reason.
        """
        self.close()
        self._kind, self._keeps_rows = kind, True
        several = kind == "ours" and parallel > 1
        more: dict[str, Any] = {"n_parallel": parallel} if several else {}
        if kind == "ours":  # not the cache of LLAMAHYBRID_RAM, which is shared
            more["prompt_cache"] = own_cache()
        self._parallel = parallel if several else 1
        with quiet() as said:
            try:
                options = {"verbose": False, **options, **more, "n_ctx": n_ctx}
                self.llm = maker(kind)(model_path=model, **options)
            except ValueError as error:
                reason = " | ".join(said[-3:])
                raise ValueError(f"{error}: {reason}" if reason else str(error)) from error
        self._completes = kind in ("stock+ram", "stock+disk")
        if kind == "stock+ram":
            self.llm.set_cache(llama_cpp.LlamaRAMCache())
        elif kind == "stock+disk":
            self._folder = tempfile.TemporaryDirectory(prefix="llamahybrid-target-")
            self.llm.set_cache(llama_cpp.LlamaDiskCache(self._folder.name))
        self._counter, self._whole = DecodeCounter(self.llm), DecodeCounter(self.llm)
        self._watch()
        self._counter.take()
        self._whole.take()
        return {
            "pid": os.getpid(),
            "parallel": self._parallel,
            "template": "tokenizer.chat_template" in self.llm.metadata,
            "salts": self._salts(),
            "vocabulary": asdict(Vocabulary.of(self.llm, WORDS)),
        }

    def _salts(self) -> bool:
        """Tell whether the `Llama` keeps salts apart; ours does not if the environment leaves it no cache."""
        knows = hasattr(self.llm, "request") and hasattr(type(self.llm), "cache_salt")
        return knows and getattr(self.llm, "prompt_cache", True) is not None

    def state_bytes(self) -> int:
        """Return the size of the state of `STATE_TOKENS` tokens, by a context made for it."""

        def measured() -> int:
            with fresh_context(self.llm, 256) as (context, decode):
                for begin in range(0, STATE_TOKENS, 16):
                    decode([1] * 16, begin)
                return int(llama_cpp.llama_state_seq_get_size(context.ctx, 0))

        with ThreadPoolExecutor(1) as apart:  # OpenMP keeps a thread pool for each computing thread
            return apart.submit(measured).result()

    def _watch(self) -> None:
        """Record calls of `generate`, and the logits of the first token."""
        llm, seen = self.llm, self._seen
        generate, size = llm.generate, llm.n_vocab()

        def watched(tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
            seen.prompt = tuple(map(int, tokens))
            for token in generate(tokens, *args, **kwargs):
                if seen.first is None:
                    seen.first = time.perf_counter()
                    seen.row = self._row(size)
                seen.tokens.append(int(token))
                yield token

        llm.generate = watched

    def _row(self, size: int) -> Any:
        """Return the logits that the first token was sampled from; None: not known.

        The loop of ours decodes chats ahead of their reader, and keeps a copy of each row that it decoded.
        """
        if self._parallel > 1 or not self._keeps_rows:
            return None
        if self._kind == "ours" and self._seen.ahead:
            view = self.llm.requests.seen
            return view.tail[-1] if view.tail is not None and view.tail_end == view.n_tokens else None
        return last_row(self.llm._ctx.ctx, size)

    def close(self) -> None:
        """Close the model."""
        if self.llm is not None:
            del self.llm.generate
            self.llm.close()
            self.llm = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        self._answers.clear()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Answer a request."""
        wanted, seen = Request(**request), self._seen
        seen.begin()
        if self._parallel == 1:
            self._counter.take()
        began = time.perf_counter()
        if wanted.salt and hasattr(self.llm, "request"):
            with self.llm.request(cache_salt=wanted.salt):
                self._send(wanted)
        else:
            self._send(wanted)
        seconds = time.perf_counter() - began
        tokens = tuple(seen.tokens)
        told = getattr(self.llm, "last_request", None)
        cached = getattr(told, "cached", None)
        reply = Reply(
            text=self.spell(tokens),
            seconds=seconds,
            ttft=None if seen.first is None else seen.first - began,
            prompt=seen.prompt,
            tokens=tokens,
            total=len(seen.prompt),
            reported=None if cached is None else index(cached),  # of any integer type, as numpy's
            decoded=self._counter.take() if self._parallel == 1 else None,
            reason=getattr(told, "reason", None),
        )
        reused = reply.reused if reply.decoded is not None else reply.reported
        with self._noting:  # several requests at once
            pieces = self._pieces(seen.prompt, tokens, reused or 0)
            self._answers.append(_Answer(seen.prompt, tokens, wanted.seed is None, seen.row, pieces))
            return {**asdict(reply), "extra": {"number": len(self._answers) - 1}}

    def keep_no_rows(self) -> None:
        """See `Session.keep_no_rows`."""
        self._keeps_rows = False

    def _pieces(self, prompt: tuple[int, ...], answer: tuple[int, ...], reused: int) -> list[int]:
        """Return the begins of native batches if the first `reused` tokens are an earlier request's."""
        reused, before = max(0, min(reused, len(prompt) - 1)), [0]
        for earlier in reversed(self._answers):
            if reused and (earlier.prompt + earlier.tokens[:-1])[:reused] == prompt[:reused]:
                before = [*(begin for begin in earlier.pieces if begin < reused), reused]
                break
        return pieces_of(len(prompt), len(answer), self.llm.n_batch, before)

    def _send(self, ask: Request) -> None:
        temperature = 0.0 if ask.seed is None else 1.0
        options: dict[str, Any] = {"max_tokens": ask.max_tokens, "temperature": temperature, "seed": ask.seed}
        if ask.messages:
            self._seen.ahead = ask.seed is None
            if ask.seed is not None:  # ours decodes no token ahead then
                options["logits_processor"] = llama_cpp.LogitsProcessorList([lambda ids, row: row])
            tools = list(ask.tools) or None
            self.llm.create_chat_completion(messages=list(ask.messages), tools=tools, **options)
        elif ask.text or self._completes:
            self.llm.create_completion(prompt=ask.text or list(ask.tokens), **options)
        else:
            if ask.seed is not None:
                self.llm.set_seed(ask.seed)
            stream = self.llm.generate(list(ask.tokens), temp=temperature)
            for _ in islice(stream, ask.max_tokens):
                pass
            stream.close()

    def check(self, number: int) -> tuple[Sameness, str]:
        """Compare answer `number` with a fresh context's."""
        answer = self._answers[number]
        return compare(self.llm, answer.prompt, answer.tokens, answer.greedy, answer.row, answer.pieces)

    def spell(self, tokens: Sequence[int], special: bool = True) -> str:
        """Return the text of tokens; `special`: with control tokens."""
        return str(self.llm.detokenize(list(tokens), special=special).decode("utf-8", errors="replace"))

    def decoded(self) -> int:
        """Return the tokens decoded since the last call."""
        return self._whole.take()

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages and the engine that run here."""
        library = Path(self.library()).name
        with suppress(OSError):  # one of its files was replaced since
            library += f" ({loaded.engine_digest().hex()[:8]})"
        return {
            "llama-cpp-python": str(llama_cpp.__version__),
            "llamahybrid": bindings.version("llamahybrid") or "",
            "library": library,
        }

    def library(self) -> str:
        """Return the path of the loaded libllama; empty: unknown."""
        return str(getattr(llama_cpp.llama_cpp._lib, "_name", ""))


def main() -> None:
    """Serve until stdin ends."""
    asked: TextIO = os.fdopen(os.dup(0), encoding="utf-8")
    out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # classes under test must not read the commands
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    child, lock = Child(), threading.Lock()

    def serve(call: dict[str, Any]) -> None:
        number, do = call.pop("id"), call.pop("do")
        try:
            answer = json.dumps({"id": number, "reply": getattr(child, do)(**call)})
        except Exception as error:
            answer = json.dumps({"id": number, "error": f"{type(error).__name__}: {error}"})
        with lock:
            print(f"\n{answer}", file=out, flush=True)  # the current line may be unfinished

    pool = ThreadPoolExecutor(16)
    for line in asked:
        call = json.loads(line)
        if call["do"] == "ask" and child._parallel > 1:
            pool.submit(serve, call)
        else:
            serve(call)
    pool.shutdown()
    child.close()


if __name__ == "__main__":
    main()
