"""The model of llama-server's rules says what llama-server does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from llama_server import LlamaServer

from llamahybrid import Llama
from llamahybrid.harness.conversation import Answer, Conversation, Request
from llamahybrid.harness.workloads.speech import Speech
from tests.lab.in_process import WORKLOADS, played
from tests.lab.server_build import Servers
from tests.lab.server_rules import ServerRules, Sizes

TOLD = ("thinking stripped", "edit a middle message", "tool calls and pages", "mid-generation")
CROWDS = ("four users", "shared system prompt", "few-shot", "document questions", "two agents")
USER = [{"role": "user", "delimiter": "<|im_start|>\x01\x02"}]
USER_HEAD = [257, 1, 2]
"""The tokens that `Speech` opens a user's message with, in the vocabulary of tiny models."""

Model: TypeAlias = tuple[Path, Sizes, Callable[[], Speech]]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Model:
    """A model, what its states take, and speech in its vocabulary."""
    path = tiny_model("qwen35")
    llm = Llama(str(path), n_ctx=512, verbose=False)
    profile = llm.runner.live.profile
    return path, Sizes(profile.snapshot_bytes, profile.attention_per_token), lambda: Speech(llm)


def wander(speech: Speech, seed: int) -> Conversation:
    """Chats that grow, are cut back anywhere, left and taken up again, in no order at all."""
    chance = random.Random(seed)
    known = [speech.message(40, "system")]
    for _ in range(60):
        history = chance.choice(known[-12:])
        if chance.random() < 0.4:
            history = history[: chance.randrange(len(history) // 3, len(history) + 1)]
        for _ in range(chance.randrange(3)):
            history = history + speech.message(chance.randrange(3, 200))
        prompt = history + speech.reply()
        answer = yield Request(chance.randrange(2, 40), prompt)
        known.append(prompt + list(answer.tokens))


def compare(servers: Servers, model: Model, conversation: Conversation, cache_mib: int, most: int) -> None:
    """Each request costs the server what the rules say."""
    path, sizes, _ = model
    rules = ServerRules(sizes, cache_mib << 20, most)
    options = ("-np", "-1", "-c", "8192", "--cache-ram", str(cache_mib), "--ctx-checkpoints", str(most))
    with LlamaServer(servers.stock, path, *options) as server:

        def ask(request: Request) -> tuple[tuple[int, int], Answer]:
            prompt, n = list(request.tokens), request.max_tokens
            answer = server.complete(prompt, n, return_tokens=True, message_delimiters=USER)
            least = rules.request(prompt, user_starts(prompt), answer.tokens) - (n - 1)
            return (answer.decoded, least), Answer(answer.tokens, str)

        found, expected = zip(*played(conversation, ask), strict=True)
    assert found == expected


@pytest.mark.parametrize("name", [*TOLD, *CROWDS])
def test_workloads_cost_as_many_tokens_as_the_rules_count(servers: Servers, model: Model, name: str) -> None:
    compare(servers, model, WORKLOADS[name].start(model[2]()), 8192, 32)


@pytest.mark.parametrize(("cache_mib", "checkpoints"), [(8192, 32), (1, 3), (2, 6)])
@pytest.mark.parametrize("seed", [1, 2])
def test_prompts_in_random_order_cost_as_many_tokens_as_the_rules_count(
    servers: Servers, model: Model, seed: int, cache_mib: int, checkpoints: int
) -> None:
    compare(servers, model, wander(model[2](), seed), cache_mib, checkpoints)


def user_starts(prompt: list[int]) -> list[int]:
    return [i for i in range(len(prompt)) if prompt[i : i + 3] == USER_HEAD]
