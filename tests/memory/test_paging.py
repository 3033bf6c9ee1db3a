"""Attention KV leaves the context in segments and comes back exactly, or not at all."""

import itertools
from contextlib import ExitStack, closing

import numpy as np
import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.memory import paging
from llamahybrid.memory.restore import restore
from tests.conftest import SETTINGS, take
from tests.lab.integrity import check_integrity

from .conftest import ids, new

pytestmark = [pytest.mark.patched]

ONE = [(7 * i + 1) % 200 for i in range(120)]
TWO = [(11 * i + 5) % 200 for i in range(90)]
WINDOW = {"swa_full": False, "n_batch": 32, "n_ubatch": 32}
FULL = pytest.mark.full
MODELS = [
    pytest.param(("qwen35", {}), id="qwen35"),
    pytest.param(("qwen35", {"flash_attn": True}), id="qwen35-flash"),
    pytest.param(("gemma3", WINDOW), id="gemma3-window"),
    pytest.param(("gemma3", {}), id="gemma3"),
    pytest.param(("gemma3", {"flash_attn": True}), id="gemma3-flash"),
    pytest.param(("llama", {}), id="llama", marks=FULL),
    pytest.param(("llama", {"flash_attn": True}), id="llama-flash", marks=FULL),
    pytest.param(("jamba", {}), id="jamba", marks=FULL),
    pytest.param(("lfm2", {}), id="lfm2", marks=FULL),
    pytest.param(("gpt-oss", WINDOW), id="gpt-oss-window", marks=FULL),
    pytest.param(("gpt-oss", {"flash_attn": True}), id="gpt-oss-flash", marks=FULL),
]


def saved(live):
    """The other arguments of `restore`."""
    return None if live.profile.attention_is_all else live.snapshot(new)


def greedy(llm, prompt, n=6):
    return take(llm, prompt, n)


@pytest.fixture(params=MODELS)
def open_model(request, tiny_model):
    arch, kind = request.param
    model = tiny_model(arch, **({"window": 16} if arch in ("gemma3", "gpt-oss") else {}))
    with ExitStack() as stack:

        def make(**more):
            return stack.enter_context(closing(Llama(str(model), **{**SETTINGS, **kind, **more})))

        yield make


@pytest.fixture
def live(open_model):
    llm = open_model()
    llm.eval(ONE)
    return llm.runner.live


@pytest.mark.parametrize(
    ("kept", "least", "most"), [(0, None, None), (30, None, None), (0, 0, 30), (30, 1 << 40, 30)]
)
def test_a_restore_from_segments_goes_on_to_the_very_logits(live, monkeypatch, kept, least, most):
    """`least`: bytes that are too many to be joined; `most`: cells that are joined at once."""
    if most is not None:
        monkeypatch.setattr(paging, "SMALL_BYTES", least)
        monkeypatch.setattr(paging, "JOINED_BYTES", live.profile.pager.layout.size(most))
    record = saved(live)
    borders = [kept, 31, 40, 50, 80, len(ONE)]
    segments = [live.page_out(a, b, new) for a, b in itertools.pairwise(borders)]
    live.decode([3], "last")
    wanted = live.row.logits().copy()
    live.empty()
    for token in [*ONE[:kept], *TWO]:
        live.decode([token], "none")
    assert restore(live, record, ids(ONE), segments, kept) is None
    live.decode([3], "last")
    apart = np.abs(live.row.logits() - wanted).max() / np.ptp(wanted)
    assert apart <= 5e-3  # what is put back wrongly lies 0.03 and more apart


def test_two_chats_find_their_state_again(open_model):
    llm, fresh = open_model(), open_model(prompt_cache=False)
    one, two = ONE + greedy(llm, ONE), TWO + greedy(llm, TWO)
    for chat in (one, two, one, two):
        chat += [9, 8, 7, *chat[:12]]
        asked = list(chat)
        answer = greedy(llm, asked)
        fresh.reset()
        assert answer == greedy(fresh, asked)
        assert llm.last_request.source == "ram"
        assert llm.last_request.cached >= llm.last_request.matched - 8
        chat += answer


def test_a_library_that_refuses_is_a_fault_and_the_cache_forgets(open_model, monkeypatch, caplog):
    llm, fresh = open_model(), open_model(prompt_cache=False)
    greedy(llm, ONE)
    greedy(llm, TWO)
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.runner.live.profile.pager), "append", lambda *_: False)
        asked = [*ONE, 5, 6]
        assert greedy(llm, asked) == greedy(fresh, asked)
    assert "refused stored attention" in caplog.text
    assert llm.last_request.cached == 0
    check_integrity(llm.prompt_cache)
    greedy(llm, TWO)
    greedy(llm, asked)
    assert llm.last_request.cached >= len(ONE), "the state decoded instead was stored"


def test_a_cache_shared_by_two_models_of_one_kind(open_model):
    cache = PromptCache(64 << 20)
    first, second = open_model(prompt_cache=cache), open_model(prompt_cache=cache)
    greedy(first, ONE)
    first.runner.save_tip()  # where attention is all of the state, it is stored when it is given up
    answer = greedy(second, [*ONE, 5, 6])
    assert second.last_request.source == "ram"
    assert second.last_request.cached >= len(ONE) - 1
    fresh = open_model(prompt_cache=False)
    assert answer == greedy(fresh, [*ONE, 5, 6])


def test_each_token_is_stored_once(open_model):
    """Bytes of segments over those of distinct tokens, after chats that branch: at most 1.10 on stock."""
    llm = open_model()
    layout = llm.runner.live.profile.pager.layout
    per_token = layout.size(2) - layout.size(1)
    seen = set()
    for tail in (3, 40, 70):
        for number in range(3):
            prompt = ONE[: 120 - tail] + [(number * 31 + i) % 200 for i in range(60)]
            greedy(llm, prompt)
            seen |= {tuple(prompt[:i]) for i in range(1, len(prompt) + 1)}
    llm.runner.save_tip()
    stored = llm.prompt_cache.stats().extra["segment_bytes"]
    assert 0.9 <= stored / (per_token * len(seen)) <= 1.10
