"""Sessions of clients, as they are recorded in `sessions/`, replayed on the APIs that they speak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import Llama
from llamahybrid.harness.counters import DecodeCounter
from tests.lab import infill
from tests.lab.costs import decide_by
from tests.lab.in_process import ONE_THREAD, Record, heard, oracle_ratio
from tests.lab.serving import Serving, serving
from tests.lab.sessions import replay, session

TinyModel = Callable[..., Path]
MOST = 1.05
ENDS = {"/v1/messages": "type", "/v1/responses": "response", "/infill": "content"}
"""A field of the last event of a stream, or of a whole answer."""


@contextmanager
def api(model: Path) -> Iterator[Serving]:
    """A server with room for the longest session in bytes, which are the tokens of the tiny vocabulary."""
    with serving(model, model={"n_ctx": 12288}) as server:
        decide_by(server.llm)  # the ratio follows from what a snapshot costs, and that from the machine
        yield server


def fresh(server: Serving, **options: Any) -> Llama:
    """The server's model in a context that knows nothing, for comparison."""
    options = {"n_ctx": server.llm.n_ctx(), "prompt_cache": False, **ONE_THREAD, **options}
    return Llama(server.llm.model_path, **options)


def played(
    server: Serving, path: str, requests: list[dict[str, Any]]
) -> tuple[list[Record], list[list[dict[str, Any]]]]:
    """Replay requests; what each decoded, and its events."""
    with heard(server.llm, DecodeCounter(server.llm)) as records:
        told = replay(server, path, requests)
    assert len(records) == len(requests)
    assert all(record.generated for record in records)
    return records, told


@pytest.fixture
def models(tiny_model: TinyModel, tmp_path: Path) -> Callable[[str], Path]:
    """`models(vocabulary)`: a model by its vocabulary, one of `tiny` or "infill"."""

    def model(vocabulary: str) -> Path:
        if vocabulary == "infill":
            return infill.make(tmp_path / "infill.gguf")
        return tiny_model("qwen35", vocab=vocabulary)

    return model


@pytest.mark.parametrize(
    ("client", "path", "options", "vocabulary"),
    [
        ("opencode", "/v1/chat/completions", {"repeat_penalty": 1.0}, "tiny"),
        ("codex", "/v1/responses", {"temperature": 0.0, "max_output_tokens": 24}, "tiny"),
        ("claude-code", "/v1/messages", {"temperature": 0.0}, "tiny"),
        ("openai", "/v1/chat/completions", {"repeat_penalty": 1.0}, "tiny"),
        ("litellm", "/v1/chat/completions", {"repeat_penalty": 1.0}, "tiny"),
        ("langchain", "/v1/chat/completions", {"repeat_penalty": 1.0}, "qwen35"),
        ("open-webui", "/v1/chat/completions", {"repeat_penalty": 1.0}, "tiny"),
        ("open-webui", "/v1/chat/completions", {"repeat_penalty": 1.0}, "qwen35"),
        ("llama.vim", "/infill", {"top_k": 1}, "infill"),
    ],
)
def test_session_of_a_client_decodes_little_more_than_the_least(
    models: Callable[[str], Path], client: str, path: str, options: dict[str, Any], vocabulary: str
) -> None:
    """Without errors; the last answer is a fresh context's.

    Few-shot prompts of LangChain lack room for a cut in bytes: a role and a mark of thinking, 3 real tokens,
    are as far apart there as messages, and 1.08 was reached.
    """
    with api(models(vocabulary)) as server:
        records, told = played(server, path, session(client, **options))
        assert oracle_ratio(records) <= MOST
        last = records[-1]
        with closing(fresh(server)) as llm:
            tokens = llm.generate(list(last.prompt), temp=0.0, repeat_penalty=1.0)
            assert tuple(next(tokens) for _ in last.generated) == last.generated
        assert all(ENDS.get(path, "choices") in events[-1] for events in told if events[-1])


def test_scored_prompts_are_decoded_once_at_most(models: Callable[[str], Path]) -> None:
    """lm-evaluation-harness asks for the logits behind every token of a prompt, which no checkpoint holds.

    The least is then each whole prompt, unless rows of the request before are still there: how many are
    depends on threads. Of the states alone more are known, with whose least `oracle_ratio` is 1.6 to 2.4.
    """
    with api(models("tiny")) as server:
        records, told = played(server, "/v1/completions", session("lm-eval"))
        assert all(record.decoded <= len(record.prompt) for record in records)
        asked = {**session("lm-eval")[-1], "model": None}
        with closing(fresh(server, logits_all=True, prompt_cache=True)) as llm:
            right = llm.create_completion(**asked)
        assert told[-1][0]["choices"][0]["logprobs"] == right["choices"][0]["logprobs"]
