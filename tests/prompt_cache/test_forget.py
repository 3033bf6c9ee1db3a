"""`forget`: gone from RAM, disk, live memory and from what is queued; and it stays gone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, PromptCache
from llamahybrid.prompt_cache.base import Tokens
from tests.lab.fake_engine import FakeEngine, Kind
from tests.lab.naive import NaivePromptCache

from .test_segments import PATH, store

AMPLE = 1 << 22
SECRET = list(range(1000, 1200))
OTHER = list(range(50, 150))
KINDS: tuple[Kind, ...] = ("recurrent", "hybrid", "window", "plain", "paged")


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)


def known(cache: PromptCache | NaivePromptCache, namespace: str = "model") -> int:
    """Tokens of the secret that the cache knows, live memory aside."""
    plan = cache.plan(ids(SECRET), FakeEngine(cache, namespace=namespace).view(), (), Costs())
    cache.release(plan)
    return plan.matched


@pytest.fixture(params=[lambda: PromptCache(AMPLE), NaivePromptCache])
def cache(request: pytest.FixtureRequest) -> PromptCache | NaivePromptCache:
    made: PromptCache | NaivePromptCache = request.param()
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "generated"), [(1, 0), (20, 80), (200, 0), (230, 80)])
def test_the_next_request_does_not_bring_forgotten_tokens_back(
    cache: PromptCache | NaivePromptCache, kind: Kind, length: int, generated: int
) -> None:
    engine = FakeEngine(cache, kind)
    engine.prefill(SECRET)
    engine.generate(range(7000, 7000 + generated))
    cache.forget([*SECRET, *range(7000, 7080)][:length])
    engine.prefill(OTHER)
    assert known(cache) == 0
    assert engine.prefill([*SECRET, 5]).cached == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_forgotten_prompt_does_not_start_from_live_memory(
    cache: PromptCache | NaivePromptCache, kind: Kind
) -> None:
    engine = FakeEngine(cache, kind)
    engine.prefill(SECRET)
    cache.forget(SECRET[:20])
    plan = engine.prefill([*SECRET, 5])
    assert (plan.cached, plan.source, plan.matched) == (0, "none", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_that_go_on_from_what_is_forgotten_go_too(
    cache: PromptCache | NaivePromptCache, kind: Kind
) -> None:
    for more in range(2000, 2800, 200):  # they part in two places
        prompt = [*SECRET[: 120 + more % 400], *range(more, more + 60)]
        FakeEngine(cache, kind).request(prompt, answer=[7] * 40)
    cache.forget(SECRET[:100])
    assert known(cache) == 0
    assert cache.stats().entries == 0


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_chat_is_forgotten_whose_end_was_evicted(kind: Kind) -> None:
    cache = PromptCache(AMPLE)
    FakeEngine(cache, kind, pages=False).prefill(SECRET[:2])
    cache.ram_bytes = 0
    cache.ram_bytes = AMPLE
    engine = FakeEngine(cache, kind, pages=False)
    engine.prefill(SECRET[:1])
    assert engine.checkpoint()
    assert known(cache) == 1
    cache.forget(SECRET[:2])
    assert (known(cache), cache.stats().bytes_ram) == (0, 0)


def test_every_context_that_shares_the_cache_forgets(cache: PromptCache | NaivePromptCache) -> None:
    engines = [FakeEngine(cache, "hybrid", name) for name in ("a", "a", "b")]
    for engine in engines:
        engine.prefill(SECRET)
    bystander = FakeEngine(cache, "hybrid", "a")
    bystander.prefill([*SECRET[:10], *OTHER])
    cache.forget(SECRET[:50])
    for engine in engines:
        engine.prefill(OTHER)
    assert (known(cache, "a"), known(cache, "b")) == (10, 0)
    assert bystander.prefill([*SECRET[:10], *OTHER, 1]).source == "live"


def test_a_request_that_runs_meanwhile_leaves_nothing_behind(cache: PromptCache | NaivePromptCache) -> None:
    engine = FakeEngine(cache, "hybrid")
    assert cache.follow(engine.followed, ids(SECRET))
    engine.decode(SECRET[:30])
    cache.forget(SECRET[:100])  # it has not come so far
    assert not engine.checkpoint()
    engine.decode(SECRET[30:])
    assert not engine.checkpoint(engine.logits)
    view = engine.view()
    assert (cache.missing(view), cache.unstored(view)) == ([], 0)
    assert not cache.store_segment(view, engine.attention_of([], SECRET[:20]))
    assert cache.peek(ids(SECRET), view, Costs()) == 0
    engine.generate(range(100))
    assert known(cache) == 0
    assert engine.prefill([*SECRET, 5]).cached == 0


def test_a_request_that_has_decoded_nothing_yet_leaves_nothing_behind(
    cache: PromptCache | NaivePromptCache,
) -> None:
    engine = FakeEngine(cache, "hybrid")
    assert cache.follow(engine.followed, ids(SECRET))
    cache.forget(SECRET[:100])
    engine.decode(SECRET)
    assert not engine.checkpoint(engine.logits)


def test_tokens_decoded_without_a_request_are_forgotten_too(cache: PromptCache | NaivePromptCache) -> None:
    engine = FakeEngine(cache, "hybrid")
    engine.prefill(OTHER)
    engine.state = list(SECRET)
    cache.forget(SECRET[:100])
    engine.prefill(OTHER)
    assert known(cache) == 0


def test_attention_of_a_forgotten_context_is_not_stored_for_a_new_one(
    cache: PromptCache | NaivePromptCache,
) -> None:
    old, new = FakeEngine(cache, "hybrid"), FakeEngine(cache, "hybrid", pages=False)
    old.prefill(SECRET)
    cache.forget(SECRET)
    new.prefill(SECRET)
    new.pages = True
    assert cache.missing(new.view()) != []
    assert cache.missing(old.view()) == []
    assert not cache.store_segment(old.view(), old.attention_of([], SECRET[:20]))


def test_a_chat_that_parts_before_the_forgotten_tokens_goes_on(cache: PromptCache | NaivePromptCache) -> None:
    engine = FakeEngine(cache, "hybrid")
    engine.prefill([*SECRET[:50], *OTHER])
    cache.forget(SECRET[:60])
    cache.forget([])
    plan = engine.prefill([*SECRET[:50], *OTHER, 1])
    assert (plan.source, plan.cached) == ("live", 50 + len(OTHER))


def test_forgotten_bytes_go_with_their_last_reader() -> None:
    cache = PromptCache(AMPLE)
    FakeEngine(cache, "recurrent").prefill(SECRET)
    plan = cache.plan(ids([*SECRET, 1]), FakeEngine(cache).view(), (), Costs())
    taken = cache.plan(ids([*SECRET, 1]), FakeEngine(cache, "recurrent").view(), (), Costs())
    assert taken.checkpoint is not None
    before = taken.checkpoint.snapshot.tobytes()
    cache.forget(SECRET)
    assert taken.checkpoint.snapshot.tobytes() == before, "who reads it may go on"
    del plan, taken
    assert cache.stats().bytes_ram == 0


def test_a_replaced_checkpoint_in_use_goes_with_its_last_reader() -> None:
    cache = PromptCache(AMPLE)
    engine = FakeEngine(cache, "recurrent")
    engine.prefill(SECRET)
    plan = cache.plan(ids([*SECRET, 1]), FakeEngine(cache, "recurrent").view(), (), Costs())
    engine.checkpoint()
    cache.forget(SECRET)
    cache.release(plan)
    del plan
    assert cache.stats().bytes_ram == 0


def test_a_path_that_was_looked_up_before_it_was_forgotten_is_not_restorable() -> None:
    cache = PromptCache(AMPLE)
    for end in (SECRET[60:], OTHER):
        FakeEngine(cache, "recurrent").prefill([*SECRET[:60], *end])
    view = FakeEngine(cache, "recurrent").view()
    leaves = list(cache.tree.leaves(view.namespace))
    assert all(cache.restorable(leaf, view) for leaf in leaves)
    cache.forget([*SECRET[:60], *OTHER])  # the other path's edges are joined
    cache.forget(SECRET)
    assert not any(cache.restorable(leaf, view) for leaf in leaves)


def test_forgetting_while_a_checkpoint_is_admitted_keeps_it_out() -> None:
    cache = PromptCache(AMPLE)
    engine = FakeEngine(cache)
    engine.prefill(SECRET)

    class Logits:
        """Forgets the prompt where they are copied."""

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            cache.forget(SECRET)
            return np.zeros(4, np.float32)

    snapshot = cache.buffer(64)
    snapshot[:] = 1
    assert not cache.admit(engine.view(), len(SECRET), snapshot, Logits())  # type: ignore[arg-type]
    assert known(cache) == 0


def test_forget_cuts_no_attention_of_paths_of_which_nothing_goes() -> None:
    """The forgotten path leaves a stored one before the end of the pinned prefix."""
    made = PromptCache(AMPLE)
    store(made, PATH, 150, 250)
    pinned = [*PATH[:60], *range(9000, 9060)]
    made.pin(pinned)
    assert made.forget([*pinned, 1, 2, 3]) == 0
    assert made.stats().segments == 1
