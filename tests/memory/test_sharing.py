"""Attention that several sequences hold: one set of cells, each right whatever becomes of the others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp

from llamahybrid.memory.paging import Pager
from tests.lab.real_costs import decide_by

pytestmark = [pytest.mark.patched]

WORDS = np.random.default_rng(3).integers(1, 200, 900).tolist()
HELD = ("qwen35", "llama", pytest.param("jamba", marks=pytest.mark.full))

HOLDER_BYTES = 4
"""What a state says of each sequence that holds a cell (src/llama-kv-cache.cpp, state_write_meta)."""

Opener = Callable[..., Any]


@pytest.fixture
def opened(open_model: Opener) -> Opener:
    """A model with three slots."""

    def opener(arch: str = "qwen35", **more: Any) -> Any:
        return open_model(arch, **{"n_parallel": 3, "n_ctx": 1024, "n_batch": 256, **more})

    return opener


@pytest.fixture
def borrows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges of tokens whose cells were lent."""
    ranges, borrow = list[tuple[int, int]](), Pager.borrow

    def noted(self: Pager, seq: int, start: int, end: int) -> bool:
        ranges.append((start, end))
        return borrow(self, seq, start, end)

    monkeypatch.setattr(Pager, "borrow", noted)
    return ranges


def begin(llm: Any, prompt: Sequence[int]) -> tuple[Any, list[int]]:
    """A request in its answer, and the first token."""
    stream = llm.generate(list(prompt), temp=0.0)
    return stream, [next(stream)]


def alone(llm: Any, prompt: Sequence[int], n: int) -> list[int]:
    """What a model with one slot says."""
    return list(itertools.islice(llm.generate(list(prompt), temp=0.0), n))


def lives(llm: Any) -> list[Any]:
    return list(llm.runner.live.shared.members)


# -- what a model does -------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", HELD)
def test_a_common_beginning_lies_in_the_context_once(
    arch: str, opened: Opener, open_model: Opener, borrows: list[tuple[int, int]]
) -> None:
    llm, one = opened(arch), open_model(arch, n_ctx=1024, n_batch=256)
    prompts = [WORDS[:300], WORDS[:300], [*WORDS[:300], *WORDS[400:410]]]
    streams = [begin(llm, prompt) for prompt in prompts]
    assert len(borrows) == 2
    held = llm.runner.live.shared.cells_held()
    assert held <= 300 + 10 + 3 * 2
    assert held < sum(live.n for live in lives(llm)) - 590
    for stream, said in streams:
        said += itertools.islice(stream, 12)
    assert [said for _, said in streams] == [alone(one, prompt, 13) for prompt in prompts]
    for stream, _ in streams:
        stream.close()


@pytest.mark.parametrize("arch", HELD)
def test_the_lender_of_cells_may_go(arch: str, opened: Opener, open_model: Opener) -> None:
    """It is emptied, and its next prompt takes other cells than those that it has lent."""
    llm, one = opened(arch), open_model(arch, n_ctx=1024, n_batch=256)
    first, _ = begin(llm, WORDS[:300])
    second, said = begin(llm, WORDS[:300])
    shared = llm.runner.live.shared
    lives(llm)[0].empty()
    assert shared.cells_held() == lives(llm)[1].n
    third, _ = begin(llm, WORDS[400:800])
    assert shared.cells_held() == sum(live.n for live in lives(llm))
    said += itertools.islice(second, 12)
    assert said == alone(one, WORDS[:300], 13)
    for stream in (first, second, third):
        stream.close()


def test_there_is_room_for_several_answers_where_there_is_none_for_several_prompts(
    opened: Opener, open_model: Opener, borrows: list[tuple[int, int]]
) -> None:
    llm, one = opened(n_ctx=512), open_model("qwen35", n_ctx=512, n_batch=256)
    prompt = WORDS[:400]
    streams = [begin(llm, prompt) for _ in range(3)]
    assert len(borrows) == 2
    assert [live.n >= 400 for live in lives(llm)] == [True] * 3, "nobody had to give way"
    for stream, said in streams:
        said += itertools.islice(stream, 12)
        stream.close()
    assert [said for _, said in streams] == [alone(one, prompt, 13)] * 3


@pytest.mark.parametrize("arch", ["gemma3", "mamba"])
def test_nothing_is_lent_behind_windows_and_where_there_is_no_attention(
    arch: str, opened: Opener, open_model: Opener, borrows: list[tuple[int, int]]
) -> None:
    llm, one = opened(arch), open_model(arch, n_ctx=1024, n_batch=256)
    streams = [begin(llm, WORDS[:100]) for _ in range(3)]
    for stream, said in streams:
        said += itertools.islice(stream, 12)
        stream.close()
    assert [said for _, said in streams] == [alone(one, WORDS[:100], 13)] * 3
    assert not borrows


@pytest.mark.parametrize("arch", HELD)
def test_a_chat_from_ram_takes_of_another_what_both_begin_with(
    arch: str,
    opened: Opener,
    open_model: Opener,
    borrows: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far as a stored segment goes; the rest is loaded."""
    llm, one = opened(arch), open_model(arch, n_ctx=1024, n_batch=256)
    library = Library(llm)
    decide_by(llm)
    chats = [[*WORDS[:300], *WORDS[a : a + 60]] for a in (400, 500)]
    chats = [chat + alone(llm, chat, 4) for chat in chats]
    for live in lives(llm):
        llm.requests.alone(lambda _, live=live: llm.slots.runner_of(live).save_tip())
        live.empty()
    borrows.clear()
    loaded: list[int] = []
    append = Pager.append

    def noted(self: Pager, payloads: Sequence[Any]) -> bool:
        loaded.append(sum(self.layout.count(payload) for payload in payloads))
        return append(self, payloads)

    monkeypatch.setattr(Pager, "append", noted)
    streams = [begin(llm, [*chat, 7]) for chat in chats]
    assert borrows == [(0, 300)]
    assert loaded[0] > 350
    assert loaded[1] < 70
    held = llm.runner.live.shared.cells_held()
    assert held == library.cells == sum(live.n for live in lives(llm)) - 300
    for stream, said in streams:
        said += itertools.islice(stream, 12)
        stream.close()
    assert [said for _, said in streams] == [alone(one, [*chat, 7], 13) for chat in chats]


# -- who lends ---------------------------------------------------------------------------------------


def test_a_sequence_that_has_lost_cells_lends_none(
    opened: Opener,
    open_model: Opener,
    borrows: list[tuple[int, int]],
    lose_cells: Callable[[Any, int, int], None],
) -> None:
    llm, one = opened("llama"), open_model("llama", n_ctx=1024, n_batch=256)
    alone(llm, WORDS[:300], 3)
    lose_cells(llm.ctx, 2, 5)
    streams = [begin(llm, WORDS[:300]) for _ in range(2)]
    for stream, said in streams:
        said += itertools.islice(stream, 5)
        stream.close()
    assert [said for _, said in streams] == [alone(one, WORDS[:300], 6)] * 2


def test_nobody_lends_to_another_salt(opened: Opener, borrows: list[tuple[int, int]]) -> None:
    llm = opened()
    streams = []
    for salt in ("a", "b"):
        with llm.request(cache_salt=salt):
            streams.append(begin(llm, WORDS[:100]))
    assert not borrows
    assert streams[0][1] == streams[1][1]
    for stream, _ in streams:
        stream.close()


@pytest.mark.parametrize("arch", HELD)
def test_after_a_refusal_attention_is_loaded(
    arch: str, opened: Opener, open_model: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, one = opened(arch), open_model(arch, n_ctx=1024, n_batch=256)
    first, _ = begin(llm, WORDS[:100])
    monkeypatch.setattr(Pager, "borrow", lambda self, *range: False)
    second, said = begin(llm, WORDS[:100])
    assert llm.last_request.cached >= 99
    said += itertools.islice(second, 5)
    assert said == alone(one, WORDS[:100], 6)
    assert llm.runner.live.shared.cells_held() == sum(live.n for live in lives(llm))
    for stream in (first, second):
        stream.close()


# -- the account -------------------------------------------------------------------------------------


class Library:
    """How many cells the library has taken: a whole state has each once, and who holds it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._members = lives(llm)
        sizes = list[int]()
        for lengths in ((20, 0), (40, 0), (40, 20)):
            for live, n in zip(self._members, lengths, strict=False):
                live.empty()
                if n:
                    live.decode(np.array(WORDS[:n], np.int32), "last")
            sizes.append(self._size())
        self._cell = (sizes[1] - sizes[0]) // 20 - HOLDER_BYTES
        self._member = sizes[2] - sizes[1] - 20 * (self._cell + HOLDER_BYTES)
        self._base = sizes[0] - self._member - 20 * (self._cell + HOLDER_BYTES)
        for live in self._members:
            live.empty()

    def _size(self) -> int:
        return int(llama_cpp.llama_state_get_size(self._llm.ctx))

    @property
    def cells(self) -> float:
        holders = sum(live.n for live in self._members)
        members = sum(live.n > 0 for live in self._members)
        taken = self._size() - self._base - members * self._member - HOLDER_BYTES * holders
        return taken / self._cell


@pytest.mark.parametrize("arch", HELD)
@pytest.mark.parametrize("seed", range(2))
def test_the_account_is_the_librarys(arch: str, seed: int, opened: Opener) -> None:
    llm, chance = opened(arch, n_ctx=2048), random.Random(seed)
    library, shared, most = Library(llm), llm.runner.live.shared, 0
    streams: list[Any] = []
    for _ in range(40):
        start = chance.choice((0, 200))
        common = WORDS[start : start + chance.choice((30, 60, 100, 140))]
        prompt = common + [chance.randrange(1, 200) for _ in range(chance.choice((0, 3, 20)))]
        if len(streams) == 3 or (streams and chance.random() < 0.3):
            streams.pop(chance.randrange(len(streams))).close()
        stream = llm.generate(prompt, temp=0.0)
        streams.append(stream)
        for _ in range(chance.randrange(1, 6)):
            next(stream)
        if chance.random() < 0.1:
            lives(llm)[chance.randrange(3)].empty()
        held = shared.cells_held()
        assert held == library.cells
        assert shared.cells_held(without=lives(llm)[0]) <= held
        most = max(most, sum(live.n for live in lives(llm)) - held)
    assert most > 50
    for stream in streams:
        stream.close()
