"""Time to the first token of a conversation whose model was closed meanwhile, over HTTP.

Two Qwen3.5-architecture models, of which one at a time fits, and a chat with each that gets a short message a
round. "kept": the model comes back with its prompt cache. "forgotten": what it knew was dropped, as where a
router ends the process of a model (llama-server's router, ollama). "stayed": it was not closed. Rounds are
interleaved; medians. Opening the model is part of each time but the last.
Run: python -m benchmarks.comeback [--tokens N] [--rounds N] [--params N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llamahybrid.harness.tables import machine
from llamahybrid.server.settings import ModelSettings
from llamahybrid.tiny import make
from tests.lab.serving import Serving, serving

SUBJECTS = ("forgotten", "kept", "stayed")


class Chat:
    """A conversation of about so many tokens with the model of that name; a letter is a token."""

    def __init__(self, server: Serving, model: str, tokens: int) -> None:
        self._server = server
        self._model = model
        self.messages: list[Any] = [{"role": "system", "content": ("You are brief. " * tokens)[:tokens]}]

    def turn(self) -> tuple[float, int]:
        """Seconds to the first token of the next turn, and tokens of its prompt that were decoded."""
        self.messages.append({"role": "user", "content": "And then?"})
        asked = {"model": self._model, "messages": self.messages, "max_tokens": 4, "temperature": 0}
        more = {"stream": True, "stream_options": {"include_usage": True}}
        first, text, usage = 0.0, "", dict[str, Any]()
        began = time.perf_counter()
        with (
            self._server.client(timeout=None) as client,
            client.stream("POST", "/v1/chat/completions", json={**asked, **more}) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    said = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                    first = first or (time.perf_counter() - began if said else 0.0)
                    text, usage = text + said, chunk.get("usage") or usage
        self.messages.append({"role": "assistant", "content": text})
        return first, usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def measured(tokens: int, rounds: int, params: int) -> dict[str, list[tuple[float, int]]]:
    """(seconds, decoded tokens) of each round, by subject."""
    times: dict[str, list[tuple[float, int]]] = {subject: [] for subject in SUBJECTS}
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            ModelSettings(
                **{"model": str(make("qwen35", Path(folder) / f"{name}.gguf", params=params, seed=seed))},
                **{"model_alias": name, "n_ctx": tokens + 2048, "n_parallel": 1, "flash_attn": True},
            )
            for seed, name in enumerate(("asked", "other"))
        ]
        with serving(*settings, models_bytes=1) as server:
            chat, other = Chat(server, "asked", tokens), Chat(server, "other", 64)
            chat.turn()
            for _ in range(rounds):
                for subject in SUBJECTS:
                    if subject != "stayed":
                        other.turn()
                    if subject == "forgotten":
                        server.service.models.caches["asked"].clear()
                    times[subject].append(chat.turn())
    return times


def main(tokens: int, rounds: int, params: int) -> int:
    console, times = Console(), measured(tokens, rounds, params)
    table = Table(title=f"a chat of {tokens:,} tokens, {params / 1e6:.0f}M parameters, {rounds} rounds")
    for head in ("", "first token ms", "decoded", "/ kept"):
        table.add_column(head, justify="right")
    kept = statistics.median(seconds for seconds, _ in times["kept"])
    for subject in SUBJECTS:
        seconds = statistics.median(each for each, _ in times[subject])
        decoded = statistics.median(each for _, each in times[subject])
        table.add_row(subject, f"{seconds * 1e3:,.0f}", f"{decoded:,.0f}", f"{seconds / kept:.2f}")
    console.print(table)
    console.print(machine(), style="dim")
    new = max(decoded for _, decoded in times["stayed"])
    return 0 if max(decoded for _, decoded in times["kept"]) <= new else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--params", type=int, default=100_000_000)
    arguments = parser.parse_args()
    sys.exit(main(arguments.tokens, arguments.rounds, arguments.params))
