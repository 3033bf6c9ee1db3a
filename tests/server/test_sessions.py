"""Sessions of agents, as they are recorded in `sessions/`, replayed on three APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import Llama
from llamahybrid.harness.counters import DecodeCounter
from tests.lab.costs import decide_by
from tests.lab.in_process import heard, oracle_ratio
from tests.lab.serving import Serving, serving
from tests.lab.sessions import replay, session

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def api(tiny_model: TinyModel) -> Iterator[Serving]:
    """A server with room for the longest session in bytes, which are the tokens of this vocabulary."""
    with serving(tiny_model("qwen35"), model={"n_ctx": 12288}) as server:
        decide_by(server.llm)  # the ratio follows from what a snapshot costs, and that from the machine
        yield server


@pytest.mark.parametrize(
    ("agent", "path", "options"),
    [
        ("opencode", "/v1/chat/completions", {"repeat_penalty": 1.0}),
        ("codex", "/v1/responses", {"temperature": 0.0, "max_output_tokens": 24}),
        ("claude-code", "/v1/messages", {"temperature": 0.0}),
    ],
)
def test_session_of_an_agent_decodes_little_more_than_the_least(
    api: Serving, agent: str, path: str, options: dict[str, Any]
) -> None:
    """Without errors; the last answer is a fresh context's."""
    requests = session(agent, **options)
    with heard(api.llm, DecodeCounter(api.llm)) as records:
        told = replay(api, path, requests)
    assert len(records) == len(requests)
    assert all(record.generated for record in records)
    assert oracle_ratio(records) <= 1.05
    last = records[-1]
    fresh = Llama(
        api.llm.model_path,
        n_ctx=api.llm.n_ctx(),
        prompt_cache=False,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )
    with closing(fresh):
        tokens = fresh.generate(list(last.prompt), temp=0.0, repeat_penalty=1.0)
        assert tuple(next(tokens) for _ in last.generated) == last.generated
    ends = {"opencode": "choices", "codex": "response", "claude-code": "type"}
    assert all(ends[agent] in events[-1] for events in told)
