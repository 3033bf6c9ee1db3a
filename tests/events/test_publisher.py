"""KV events: exactly the resumable prefixes of each tier, and none of salted requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamahybrid import Llama, PromptCache, events
from llamahybrid.events import EventPublisher
from tests.events.subscriber import Subscriber

SIZE = 8
ANY = "tcp://127.0.0.1:0"


def tokens(seed: int, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(5, 250, n)]


@pytest.fixture
def opened(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Llama]]:
    with ExitStack() as stack:

        def open_(arch: str, cache: PromptCache, **more: Any) -> Llama:
            llm = Llama(str(tiny_model(arch)), n_ctx=512, prompt_cache=cache, verbose=False, **more)
            return stack.enter_context(closing(llm))

        yield open_


@pytest.fixture
def told() -> Iterator[Callable[..., Subscriber]]:
    """Publish, and subscribe."""
    with ExitStack() as stack:

        def tell(llm: Llama, **more: Any) -> Subscriber:
            publisher = EventPublisher(llm, ANY, block_size=SIZE, interval=0.02, **more)
            stack.enter_context(publisher)
            subscriber = Subscriber(publisher.endpoint, more.get("topic", ""))
            stack.callback(subscriber.close)
            return subscriber

        yield tell


def ask(llm: Llama, prompt: list[int], n: int = 4, **more: Any) -> None:
    llm.create_completion(prompt, max_tokens=n, temperature=0.0, **more)


def most_told(paths: list[list[int]], whole: list[int]) -> int:
    """The longest of these that a prompt begins with."""
    return max((len(path) for path in paths if path == whole[: len(path)]), default=0)


def blocks(n: int) -> int:
    return n // SIZE * SIZE


@pytest.mark.parametrize(
    "arch", ["qwen35", "gemma3", *(pytest.param(a, marks=pytest.mark.full) for a in ("mamba", "llama"))]
)
def test_published_blocks_are_exactly_the_resumable_ones(
    arch: str, opened: Callable[..., Llama], told: Callable[..., Subscriber]
) -> None:
    cache = PromptCache(ram_bytes=64 << 20)
    llm = opened(arch, cache)
    router = told(llm)
    prompts = [tokens(1, 80), tokens(1, 60) + tokens(2, 40), tokens(3, 90)]
    said: list[list[int]] = []
    for prompt in prompts:
        ask(llm, prompt)
        said.append([int(t) for t in llm.input_ids[: llm.n_tokens]])
    ask(llm, tokens(4, 20))  # the last one's attention is stored when another comes
    live = [int(t) for t in llm.input_ids[: llm.n_tokens]]
    router.until(lambda: most_told(router.paths().get("GPU", []), live) == blocks(len(live)))
    in_ram = router.paths()["CPU"]  # told in the same message
    fresh = opened(arch, cache)
    for whole in said:
        ask(fresh, [*whole, 7, 8])
        cached = blocks(fresh.last_request.cached)
        assert cached == most_told(in_ram, whole) >= 80
        fresh.reset()
    ask(llm, [*live, 9])
    assert llm.last_request.cached == len(live)


def test_forgotten_blocks_are_removed(opened: Callable[..., Llama], told: Callable[..., Subscriber]) -> None:
    cache = PromptCache(ram_bytes=64 << 20)
    llm = opened("qwen35", cache)
    router = told(llm)
    ask(llm, tokens(1, 64))
    ask(llm, tokens(2, 64))
    router.until(lambda: len(router.paths().get("CPU", ())) == 2)
    view = llm.slots.runners[0].live.blank_view(llm.slots.runners[0].live.identity.namespace)
    leaves = list(cache.tree.leaves(view.namespace))
    assert len({cache.restorable(leaf, view) for leaf in leaves}) == 2
    cache.forget(tokens(1, 64))
    assert sum(not cache.restorable(leaf, view) for leaf in leaves) == 1, "one went between two looks"
    router.until(lambda: [path[:8] for path in router.paths()["CPU"]] == [tokens(2, 64)[:8]])
    cache.clear()
    llm.reset()
    router.until(lambda: not any(router.paths().values()))


def test_folder_is_a_medium_of_its_own(
    opened: Callable[..., Llama], told: Callable[..., Subscriber], tmp_path: Path
) -> None:
    cache = PromptCache(ram_bytes=64 << 20, disk_dir=tmp_path)
    llm = opened("qwen35", cache)
    router = told(llm)
    ask(llm, tokens(1, 100))
    said = [int(t) for t in llm.input_ids[: llm.n_tokens]]
    ask(llm, tokens(2, 30))
    assert cache.flush()
    router.until(lambda: any(path[:50] == tokens(1, 50) for path in router.paths().get("DISK", ())))
    (path,) = (path for path in router.paths()["DISK"] if path[:50] == tokens(1, 50))
    later = opened("qwen35", PromptCache(ram_bytes=64 << 20, disk_dir=tmp_path))
    ask(later, [*said, 7])
    assert blocks(later.last_request.cached) == len(path)
    assert later.last_request.source == "disk"


def test_blocks_have_at_least_one_token(opened: Callable[..., Llama]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        EventPublisher(opened("qwen35", PromptCache(ram_bytes=64 << 20)), ANY, block_size=0)


def test_salted_requests_are_not_published(
    opened: Callable[..., Llama], told: Callable[..., Subscriber]
) -> None:
    llm = opened("qwen35", PromptCache(ram_bytes=64 << 20))
    router = told(llm)
    ask(llm, tokens(1, 64), cache_salt="a secret")
    ask(llm, tokens(2, 64))
    ask(llm, tokens(3, 64), cache_salt="a secret")
    router.until(lambda: router.paths().get("CPU"))
    for _ in range(10):
        router.receive(0.05)
    said = [path[:8] for paths in router.paths().values() for path in paths]
    assert set(map(tuple, said)) == {tuple(tokens(2, 64)[:8])}


def test_late_subscribers_are_told_all_blocks(opened: Callable[..., Llama]) -> None:
    llm = opened("qwen35", PromptCache(ram_bytes=64 << 20))
    with EventPublisher(llm, ANY, block_size=SIZE, interval=0.02, topic="kv@a@b") as publisher:
        first = Subscriber(publisher.endpoint, "kv@")
        ask(llm, tokens(1, 64))
        first.until(lambda: knows(first, 1))
        ask(llm, tokens(2, 64))
        late = Subscriber(publisher.endpoint, "kv@")
        late.until(lambda: knows(late, 2))
        first.until(lambda: knows(first, 2))
        assert first.topics == late.topics == {"kv@a@b"}
        first.close()
        late.close()
    publisher.close()  # again does no harm


def test_closing_does_not_wait_for_the_next_message(
    opened: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "REST", 1e9)
    publisher = EventPublisher(opened("qwen35", True), ANY, block_size=SIZE, interval=0.02)
    ends = threading.Thread(target=publisher.close, daemon=True)
    ends.start()
    ends.join(30)
    assert not ends.is_alive()


def test_a_cache_that_did_not_change_is_not_walked_again(
    opened: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new subscriber is told all of it; an answer's attention may be stored after its end."""
    restorable, walked = PromptCache.restorable, list[int]()

    def counted(cache: PromptCache, *args: Any) -> bytes:
        walked.append(1)
        return restorable(cache, *args)

    monkeypatch.setattr(PromptCache, "restorable", counted)
    llm = opened("qwen35", PromptCache(ram_bytes=64 << 20))
    ask(llm, tokens(1, 64))
    counts = list[int]()
    with EventPublisher(llm, ANY, block_size=SIZE, interval=0.02) as publisher:
        while len(counts) < 20 and (len(counts) < 2 or counts[-1] != counts[-2]):
            late = Subscriber(publisher.endpoint)
            late.until(lambda late=late: knows(late, 1))  # type: ignore[misc]
            late.close()
            counts.append(len(walked))
    assert 0 < counts[-1] == counts[-2]


def test_large_cache_is_looked_at_seldom_and_for_each_subscription(
    opened: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = PromptCache.look, list[int]()

    def counted(cache: PromptCache, see: Callable[..., Any]) -> Any:
        looks.append(1)
        return look(cache, see)

    monkeypatch.setattr(PromptCache, "look", counted)
    monkeypatch.setattr(events, "REST", 1e9)  # as if a look took long
    llm = opened("qwen35", PromptCache(ram_bytes=64 << 20))
    with EventPublisher(llm, ANY, block_size=SIZE, interval=0.02) as publisher:
        for conversation in range(1, 4):
            ask(llm, tokens(conversation, 64))
            router = Subscriber(publisher.endpoint)
            router.until(lambda router=router, n=conversation: knows(router, n))  # type: ignore[misc]
            assert len(looks) == 1 + conversation
            router.close()


def knows(router: Subscriber, conversations: int) -> bool:
    return len({tuple(path[:8]) for paths in router.paths().values() for path in paths}) == conversations
