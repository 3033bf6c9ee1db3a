"""A draft model that cannot drop its last tokens: the stock server dies of it, the patched one answers.

The target may be one that has no such trouble, or one with rollback planes: these do not reach back to before
a batch, which is where a rejected draft starts again.
"""

from __future__ import annotations

import random

import pytest
from llama_server import LlamaServer, ServerDied

from tests.lab.server_build import Servers

_DRAW = random.Random(1)
TRUNK = [_DRAW.randrange(10, 90) for _ in range(200)]
LEFT, RIGHT = ([*TRUNK, *(_DRAW.randrange(10, 90) for _ in range(n))] for n in (60, 40))


@pytest.fixture(params=["qwen35", "mamba"])
def draft(request: pytest.FixtureRequest, tiny_model) -> tuple[str, ...]:
    return ("--spec-type", "draft-simple", "--spec-draft-model", str(tiny_model(request.param)))


def test_a_rejected_draft_token_starts_again_from_the_checkpoint(servers: Servers, tiny_model, draft):
    model = tiny_model("llama")
    with (
        LlamaServer(servers.stock, model, *draft) as stock,
        pytest.raises(ServerDied, match="failed to remove sequence"),
    ):
        stock.complete(LEFT, 32)
    with LlamaServer(servers.stock, model) as plain, LlamaServer(servers.patched, model, *draft) as patched:
        assert patched.complete(LEFT, 32).text == plain.complete(LEFT, 32).text


def test_a_prompt_that_leaves_the_cached_one_costs_the_slot_its_cache(servers: Servers, tiny_model, draft):
    model = tiny_model("llama")
    with LlamaServer(servers.stock, model, *draft) as stock:
        stock.complete(LEFT, 1)  # one token: nothing is drafted
        with pytest.raises(ServerDied, match="failed to remove sequence"):
            stock.complete(RIGHT, 1)
    with LlamaServer(servers.stock, model) as plain, LlamaServer(servers.patched, model, *draft) as patched:
        for prompt, cached in ((LEFT, 0), (RIGHT, 0), ([*RIGHT, *LEFT], len(RIGHT))):
            answer = patched.complete(prompt, 1)
            assert answer.text == plain.complete(prompt, 1).text
            assert answer.cached == cached


PREDICTED = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
DRAWN = {"temperature": 1.0, "seed": 7}  # this layer's greedy drafts are all right: no other is ever rejected


def test_a_target_with_planes_starts_again_from_its_checkpoint(servers: Servers, tiny_model):
    """Its own prediction layer drafts, in a context whose memory is a hybrid's, and without planes."""
    model = tiny_model("nemotron_h", predictors=1)
    with (
        LlamaServer(servers.stock, model, *PREDICTED) as stock,
        pytest.raises(ServerDied, match="failed to remove sequence"),
    ):
        stock.complete(LEFT, 32, **DRAWN)
    with (
        LlamaServer(servers.patched, model) as plain,
        LlamaServer(servers.patched, model, *PREDICTED) as patched,
    ):
        for prompt in (LEFT, RIGHT, LEFT):
            expected = plain.complete(prompt, 32, cache_prompt=False, **DRAWN)
            assert patched.complete(prompt, 32, **DRAWN).text == expected.text
        assert "draft acceptance = 0." in patched.log()  # some were rejected
