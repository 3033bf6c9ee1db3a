"""Chats of models whose attention is all of their state: they go on from any token that was decoded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid import PromptCache
from llamahybrid.harness.counters import DecodeCounter
from llamahybrid.prompt_cache.placement import MIN_SPACING
from tests.lab.integrity import check_integrity
from tests.request.asking import in_thread, take

Opened = Callable[..., Any]
MORE = ("llama-flash", "gpt-oss-full")
SYSTEM = [(7 * i + 3) % 200 for i in range(80)]
ONE = SYSTEM + [(11 * i + 1) % 200 for i in range(60)]
TWO = SYSTEM + [(13 * i + 5) % 200 for i in range(50)]
OTHER = [(17 * i + 9) % 200 for i in range(90)]


class Models:
    """The model under test, and the answers of a fresh context of upstream's."""

    def __init__(self, arch: str, opened: Opened, stock: Opened) -> None:
        self._arch, _, flash = arch.partition("-flash")
        self._options = {"n_batch": 512, "flash_attn": bool(flash) or arch == "gpt-oss-full"}
        self._opened, self.stock = opened, stock(self._arch, **self._options)

    def open(self, **more: Any) -> Any:
        return self._opened(self._arch, **self._options, **more)


@pytest.fixture(
    params=["llama", "gemma3-full", *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)
def models(request: pytest.FixtureRequest, opened: Opened, stock: Opened) -> Models:
    return Models(request.param, opened, stock)


@pytest.fixture
def llama(opened: Opened, stock: Opened) -> Models:
    return Models("llama", opened, stock)


def asked(llm: Any, models: Models, prompt: list[int]) -> Any:
    """Ask, hold the answer against upstream's, and the report against the library's counters; the report."""
    counter = DecodeCounter(llm)
    answer = take(llm, prompt)
    decoded = counter.take()
    assert answer == models.stock(prompt)
    report = llm.last_request
    assert decoded == report.left + len(answer) - 1
    check_integrity(llm.prompt_cache)
    return report


def segment_bytes(llm: Any) -> int:
    return int(llm.prompt_cache.stats().extra["segment_bytes"])


# -- what is found again ---------------------------------------------------------------------------


def test_chats_in_turn_decode_new_tokens_alone(models: Models) -> None:
    llm = models.open()
    chats = [ONE, TWO, OTHER, [*OTHER[:40], *ONE]]
    known = [0, len(SYSTEM), 0, 40]
    for turn in range(4):
        for i, chat in enumerate(chats):
            report = asked(llm, models, chat)
            assert report.cached == report.matched >= known[i]
            assert report.source == "ram" or not turn
            known[i] = len(chat) + 7
            chats[i] = [*chat, *models.stock(chat), *((i + 3 * turn + j) % 200 for j in range(20))]


def test_a_chat_that_is_edited_in_the_middle_starts_at_the_edit(models: Models) -> None:
    llm = models.open()
    asked(llm, models, ONE)
    asked(llm, models, OTHER)
    for place in (121, 100, 61, 133):
        edited = [*ONE[:place], 7, 8, 9, *ONE[place:]]
        report = asked(llm, models, edited)
        assert report.cached == report.matched >= place
        asked(llm, models, OTHER)


def test_a_message_edited_in_the_live_chat_can_be_gone_back_on(models: Models) -> None:
    """Only what the edit takes away is stored: the rest is live, and is stored when it goes itself."""
    llm = models.open()
    asked(llm, models, ONE)
    asked(llm, models, [*ONE[:100], 5, 6, 7])
    tail = segment_bytes(llm)
    report = asked(llm, models, [*ONE, 1, 2])
    assert (report.cached, report.source) == (len(ONE), "ram")
    asked(llm, models, OTHER)
    assert 0 < tail < 0.6 * segment_bytes(llm)


def test_a_regenerated_answer_leaves_nothing(llama: Models) -> None:
    llm = llama.open()
    for _ in range(3):
        take(llm, ONE, MIN_SPACING)  # the last token of an answer is never decoded
    assert segment_bytes(llm) == 0
    take(llm, ONE, MIN_SPACING + 1)
    take(llm, ONE, 2)
    assert segment_bytes(llm) > 0


def first_row(llm: Any, prompt: list[int]) -> bytes:
    """The logits that an answer's first token is sampled from."""
    rows: list[bytes] = []

    def note(_: Any, scores: Any) -> Any:
        rows.append(np.array(scores).tobytes())
        return scores

    take(llm, prompt, 1, logits_processor=llama_cpp.LogitsProcessorList([note]))
    return rows[0]


def test_a_regenerated_answer_decodes_nothing_of_its_prompt(models: Models) -> None:
    llm = models.open()
    sampled_from = first_row(llm, ONE)
    assert first_row(llm, ONE) == sampled_from
    for _ in range(2):
        assert asked(llm, models, ONE).left == 0
        assert first_row(llm, ONE) == sampled_from, "the very logits"
    assert llm.prompt_cache.stats().entries == 0, "no attention is stored for that"
    asked(llm, models, [*ONE, 7])
    assert asked(llm, models, ONE).left == 1, "another prompt's end is live now"
    assert asked(llm, models, ONE).left == 0


def test_logits_of_a_prompts_end_serve_that_prompt_alone(llama: Models) -> None:
    llm = llama.open()
    asked(llm, llama, ONE)
    others = [(19 * i + 2) % 200 for i in range(len(ONE))]
    llm.reset()
    llm.eval([*others, 1, 2])  # a sequence that is as long, and no request's
    assert asked(llm, llama, others).left == 1


def test_nothing_is_stored_while_one_chat_goes_on(models: Models) -> None:
    llm, chat = models.open(), ONE
    for turn in range(3):
        report = asked(llm, models, chat)
        assert report.cached == report.matched
        chat = [*chat, *models.stock(chat), turn, 8, 9]
    stats = llm.prompt_cache.stats()
    assert (stats.entries, stats.segments) == (0, 0)


def test_of_stored_attention_only_what_agrees_with_a_prompt_is_taken(models: Models) -> None:
    """The deeper prefix serves where a prompt shares one with live and with stored histories."""
    llm = models.open()
    asked(llm, models, ONE)
    asked(llm, models, TWO)
    report = asked(llm, models, [*ONE[:120], 3])
    assert (report.cached, report.source) == (120, "ram")
    report = asked(llm, models, [*ONE[:120], 3, 4, 5])
    assert (report.cached, report.source) == (121, "live")


# -- after a restart -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "cached"), [(TWO, len(SYSTEM)), ([*ONE[:110], 5, *ONE[110:]], 110), (ONE, len(ONE) - 1)]
)
def test_another_process_finds_the_shared_part_of_a_chat(
    models: Models, tmp_path: Path, prompt: list[int], cached: int
) -> None:
    first = models.open(prompt_cache=PromptCache(1 << 26, tmp_path))
    asked(first, models, ONE)
    first.close()
    again = models.open(prompt_cache=PromptCache(1 << 26, tmp_path))
    report = asked(again, models, prompt)
    assert (report.cached, report.source) == (cached, "disk")


# -- what is not sound -----------------------------------------------------------------------------


def segments_of(llm: Any) -> list[Any]:
    return [s for node in llm.prompt_cache.tree.oldest_nodes() for s in node.segments]


def spoil(llm: Any) -> None:
    for segment in segments_of(llm):
        segment.record.flags.writeable = True
        segment.record[len(segment.record) // 2] ^= 1


@pytest.mark.parametrize("end", [0, 100], ids=["whole", "cut in two"])
def test_damaged_attention_is_dropped(models: Models, end: int) -> None:
    llm = models.open()
    chat = ONE + take(llm, ONE, 21)[:20]
    asked(llm, models, OTHER)
    spoil(llm)
    assert asked(llm, models, [*chat[: end or len(chat)], 3]).cached == 0
    assert llm.prompt_cache.stats().extra["damaged"] == 1


def test_cells_behind_the_window_of_a_loaded_state_are_not_used(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """The library overwrites it first after `load_state` (its search for a free cell starts at 0)."""
    llm = models.open()
    asked(llm, models, ONE)
    asked(llm, models, [*ONE[:80], 7])
    state = llm.save_state()
    asked(llm, models, [*ONE[:40], 8])
    asked(llm, models, OTHER)
    for prompt in ([*ONE[:130], 9], [*ONE[:40], 8, 9], [*ONE[:80], 7, 6], [*ONE[:15], 9]):
        llm.load_state(state)
        llm.eval([3, 4])
        report = asked(llm, models, prompt)
        assert report.cached > len(prompt) - 1 - MIN_SPACING
    assert caplog.text == ""


# -- what it may be used for, and for how long ------------------------------------------------------


def test_a_reset_costs_the_live_tokens_alone(models: Models) -> None:
    llm = models.open()
    asked(llm, models, ONE)
    asked(llm, models, OTHER)
    llm.reset()
    assert asked(llm, models, [*ONE, 3]).source == "ram"
    assert asked(llm, models, [*OTHER, 3]).cached == 0


@pytest.mark.parametrize("chats_that_fit", [0.5, 1.5])
def test_the_budget_is_kept_and_chats_within_it_serve(models: Models, chats_that_fit: float) -> None:
    llm = models.open()
    take(llm, ONE)
    take(llm, OTHER)
    budget = int(chats_that_fit * segment_bytes(llm))
    llm.prompt_cache.clear()
    llm.prompt_cache.ram_bytes = budget
    chats, cached = [ONE, OTHER, [*OTHER[:30], *TWO]], 0
    for turn in range(4):
        for i, chat in enumerate(chats):
            cached += asked(llm, models, chat).cached
            chats[i] = [*chat[:100], turn, i, 5, 6]
        gc.collect()  # a plan keeps what it names
        assert llm.prompt_cache.stats().bytes_ram <= budget
    assert (cached > 300) == (chats_that_fit > 1)


def test_without_a_second_sequence_nothing_is_stored(models: Models) -> None:
    llm = models.open(paging=False)
    asked(llm, models, ONE)
    asked(llm, models, OTHER)
    assert asked(llm, models, [*ONE, 3]).cached == 0
    assert llm.prompt_cache.stats().entries == 0


# -- several at once -------------------------------------------------------------------------------


def test_what_stayed_live_in_one_slot_is_found_from_another(llama: Models) -> None:
    """Tokens that it gave up are stored; the tokens that stayed are stored when they are asked for."""
    llm = llama.open(n_parallel=2)
    take(llm, ONE)
    held = llm.generate([*ONE[:100], 3, 4], temp=0.0)  # goes back to what both share
    next(held)
    counter = DecodeCounter(llm)
    assert in_thread(take, llm, [*ONE, 5]) == llama.stock([*ONE, 5])
    assert counter.take() <= 1 + 8
    held.close()
