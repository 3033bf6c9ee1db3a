"""The same chats on the stock and the patched server: one text, and no more work than before."""

from __future__ import annotations

import pytest
from llama_server import LlamaServer
from scripts import SCRIPTS, Messages

from tests.lab.server_build import Servers

MODELS = ("qwen35", "jamba", "mamba")


def play(server: LlamaServer, script: str, **options: object) -> tuple[list[str], int]:
    """The answers, and how many prompt tokens were decoded for them."""
    answers: list[str] = []
    decoded = 0

    def ask(messages: Messages) -> str:
        nonlocal decoded
        answer = server.chat(messages, **options)
        answers.append(answer.text)
        decoded += answer.decoded
        return answer.text

    SCRIPTS[script](ask)
    return answers, decoded


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("arch", MODELS)
def test_patched_server_answers_as_a_fresh_one_for_no_more_work(
    servers: Servers, tiny_model, arch: str, script: str
):
    model = tiny_model(arch)
    with LlamaServer(servers.stock, model, "--cache-ram", "0", "--ctx-checkpoints", "0") as fresh:
        expected, everything = play(fresh, script, cache_prompt=False)
    with LlamaServer(servers.stock, model) as server:
        _, stock = play(server, script)
    with LlamaServer(servers.patched, model) as server:
        answers, patched = play(server, script)
    print(f"{arch} {script}: prompt tokens decoded: fresh {everything}, stock {stock}, patched {patched}")
    assert answers == expected
    assert patched <= stock < everything
