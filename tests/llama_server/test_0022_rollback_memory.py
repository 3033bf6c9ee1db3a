"""Rollback planes are given up while the prompt cache saves and loads, and nobody notices."""

from __future__ import annotations

import random

from llama_server import LlamaServer

from tests.lab.server_build import Servers

_DRAW = random.Random(2)
ONE, OTHER = ([_DRAW.randrange(10, 90) for _ in range(300)] for _ in range(2))


def test_the_planes_are_gone_while_the_prompt_cache_works(servers: Servers, tiny_model):
    model = tiny_model("qwen35")
    # this draft model is none of its kind: the server says so and goes on, with planes and without drafts
    planes = ("--spec-type", "draft-eagle3", "--spec-draft-model", str(tiny_model("llama")))
    with LlamaServer(servers.stock, model) as fresh:
        expected = [fresh.complete(prompt, cache_prompt=False).text for prompt in (ONE, OTHER)]
    with LlamaServer(servers.patched, model, *planes, "--verbosity", "4") as patched:
        answers = [patched.complete(prompt) for prompt in (ONE, OTHER, ONE)]
        assert [answer.text for answer in answers] == [*expected, expected[0]]
        assert answers[2].cached == len(ONE) - 4  # it came back from the prompt cache, checkpoint and all
        assert patched.log().count("ran without the 3 rollback planes") == 3
