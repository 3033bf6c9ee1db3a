"""Checkpoints of other branches: kept, within their limit, and never taken for this one's."""

from __future__ import annotations

import random

import pytest
from llama_server import LlamaServer
from scripts import QUESTIONS, transcript, user
from test_chats import play

from tests.lab.server_build import Servers

_DRAW = random.Random(1)


def _tokens(n: int) -> list[int]:
    return [_DRAW.randrange(10, 90) for _ in range(n)]


TRUNK = _tokens(200)
LEFT, RIGHT, THIRD = ([*TRUNK, *_tokens(n)] for n in (200, 150, 200))


def test_a_recurrent_branch_is_found_again(servers: Servers, tiny_model):
    model = tiny_model("mamba")
    with LlamaServer(servers.stock, model) as stock, LlamaServer(servers.patched, model) as patched:
        for prompt in (LEFT, RIGHT):
            assert patched.complete(prompt) == stock.complete(prompt)
        for prompt in (LEFT, RIGHT, LEFT):
            before, now = stock.complete(prompt), patched.complete(prompt)
            assert now.text == before.text
            assert before.decoded == len(prompt)
            assert now.decoded == 4  # the server's checkpoint before the end of a prompt


def test_another_branch_of_the_same_length_is_not_taken(servers: Servers, tiny_model):
    with LlamaServer(servers.patched, tiny_model("mamba"), "--cache-ram", "0") as patched:
        patched.complete(LEFT)
        third = patched.complete(THIRD)
        assert third.cached == 0
        assert patched.complete(LEFT).cached == len(LEFT) - 4
        assert third.text == patched.complete(THIRD, cache_prompt=False).text


def test_the_deepest_checkpoint_is_taken_whenever_it_was_made(servers: Servers, tiny_model):
    with LlamaServer(servers.patched, tiny_model("mamba"), "--cache-ram", "0") as patched:
        for prompt in (LEFT, LEFT[:300], LEFT):
            answer = patched.complete(prompt)
        assert answer.decoded == 4


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_a_shallower_checkpoint_of_another_branch_is_not_taken(servers: Servers, tiny_model, arch: str):
    longer = [*RIGHT, *_tokens(150)]
    edited = [*longer[:450], *_tokens(10)]
    with LlamaServer(servers.patched, tiny_model(arch), "--cache-ram", "0") as patched:
        patched.complete(LEFT)  # its checkpoint lies before the edit
        patched.complete(longer)
        answer = patched.complete(edited)
        assert answer.cached == 0
        assert answer.text == patched.complete(edited, cache_prompt=False).text


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_a_draft_model_is_never_left_behind(servers: Servers, tiny_model, arch: str):
    draft = ("--spec-type", "draft-simple", "--spec-draft-model", str(tiny_model("llama")))
    with (
        LlamaServer(servers.stock, tiny_model(arch)) as plain,
        LlamaServer(servers.patched, tiny_model(arch), *draft) as patched,
    ):
        for prompt in (LEFT, RIGHT, LEFT, RIGHT):
            assert patched.complete(prompt).text == plain.complete(prompt, cache_prompt=False).text


def test_the_limit_holds_and_takes_other_branches_first(servers: Servers, tiny_model):
    longer = [*LEFT, *_tokens(100)]
    options = ("--cache-ram", "0", "--ctx-checkpoints", "3")
    with LlamaServer(servers.patched, tiny_model("qwen35"), *options) as patched:
        for prompt in (RIGHT, LEFT, longer, [*longer, *_tokens(100)]):
            patched.complete(prompt)
        assert patched.complete([*LEFT[:-2], *_tokens(5)]).cached == len(LEFT) - 4
    options = ("--cache-ram", "0", "--ctx-checkpoints", "1")
    with LlamaServer(servers.patched, tiny_model("mamba"), *options) as patched:
        patched.complete(LEFT)
        patched.complete(RIGHT)
        assert patched.complete(LEFT).cached == 0


def test_a_hybrid_finds_its_own_checkpoint_after_another_branch(servers: Servers, tiny_model):
    model = tiny_model("qwen35")
    with LlamaServer(servers.stock, model) as stock, LlamaServer(servers.patched, model) as patched:
        before, now = (play(server, "branches") for server in (stock, patched))
    assert now[0] == before[0]
    assert now[1] < before[1]


def test_checkpoints_are_spaced_within_their_own_branch(servers: Servers, tiny_model):
    mine, other = transcript(QUESTIONS), transcript(QUESTIONS[::-1] * 3)
    edited = [*mine[:7], user("And the course before noon?")]
    options = ("--cache-ram", "0", "--checkpoint-min-step", "16", "--ubatch-size", "64")

    def cached(*chats: list[dict[str, str]]) -> int:
        with LlamaServer(servers.patched, tiny_model("qwen35"), *options) as patched:
            for chat in chats:
                patched.chat(chat)
            return patched.chat(edited).cached

    assert cached(other, mine) == cached(mine) > cached(transcript(QUESTIONS[:2]))
