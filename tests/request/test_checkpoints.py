"""Which chats a request finds again, what it stores of them, and what it must not store."""

import itertools
from threading import Event

import llama_cpp
import numpy as np
import pytest

from llamahybrid import PromptCache, configure
from llamahybrid.capi.calls import NativeContext
from llamahybrid.core import loop
from llamahybrid.harness.counters import DecodeCounter
from llamahybrid.memory.costs import FEW, SLOW_READ, CostMeter
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache import Costs
from tests.lab.integrity import check_integrity
from tests.lab.naive import NaivePromptCache
from tests.request.asking import ARCHS, CUTS, Batches, begin, take

ONE = [(7 * i + 1) % 200 for i in range(120)]
TWO = [(11 * i + 5) % 200 for i in range(160)]
THREE = [(13 * i + 2) % 200 for i in range(150)]


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    """Costs are not known: no checkpoint is taken because it is cheap here."""
    monkeypatch.setattr(CostMeter, "costs", lambda _: Costs())


@pytest.fixture
def open_one(opened):
    return lambda arch="qwen35", *cls, **more: opened(arch, *cls, **{"n_ctx": 512, "n_batch": 32, **more})


def entries(llm):
    return llm.prompt_cache.stats().entries


@pytest.fixture
def no_numbers(monkeypatch):
    """`no_numbers()`: from now on every row of logits is NaN."""

    def begin_with_it():
        row = NativeContext.logits

        def spoilt(*args):
            found = row(*args)
            return None if found is None else np.full_like(found, np.nan)

        monkeypatch.setattr(NativeContext, "logits", spoilt)

    return begin_with_it


# -- what is found again ---------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen35", "mamba", "gemma3"])
def test_chat_left_for_a_deeper_one_is_found_again_at_its_tip(open_one, arch):
    llm = open_one(arch)
    take(llm, TWO)
    chat = ONE + take(llm, ONE, 21)[:20]
    take(llm, [*TWO, 3])
    assert llm.last_request.cached >= len(TWO)
    take(llm, [*chat, 5, 6])
    assert llm.last_request.cached == len(chat)


def test_tip_that_a_cut_goes_back_from_is_found_again(open_one):
    llm = open_one("gemma3")
    chat = ONE + take(llm, ONE, 21)[:20]
    take(llm, [*chat[:-4], 5, 6], 1)
    assert (llm.last_request.cached, llm.last_request.source) == (len(chat) - 4, "live")
    take(llm, [*chat, 7, 8], 1)
    assert llm.last_request.cached == len(chat)


def test_long_answer_is_found_again_in_its_middle(open_one):
    llm = open_one()
    answer = take(llm, ONE, 150)
    take(llm, TWO)
    take(llm, [*ONE, *answer[:130], 3], 1)
    assert len(ONE) + 60 <= llm.last_request.cached < llm.last_request.matched == len(ONE) + 130


def test_edited_message_starts_at_its_beginning(open_one):
    llm = open_one()
    messages = [("system", "You answer in one word, always."), ("user", "What is the tallest mountain?")]
    spelt = "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in messages)
    head = llm.tokenize(spelt.encode(), special=True)
    opens = llm.tokenize(b"<|im_start|>", add_bos=False, special=True)
    for question in (b"user\nIs it cold?", b"user\nWas it warm there?"):
        take(llm, [*head, *opens, *llm.tokenize(question, add_bos=False)], 1)
    assert len(opens) == 1, "messages are marked"
    assert llm.last_request.cached == len(head)


def test_thinking_that_is_stripped_costs_no_more_than_its_answer(open_one):
    llm = open_one()
    head = llm.tokenize(b"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", special=True)
    think = llm.tokenize(b"<think>\nhm, what to say\n</think>\nHello", add_bos=False, special=True)
    take(llm, [*head, *think], 1)
    take(llm, [*head, *llm.tokenize(b"Hello", add_bos=False)], 1)
    assert llm.last_request.cached == len(head)


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_naive_twin_serves_the_same(open_one, arch):
    ours, twin = open_one(arch), open_one(arch)
    twin.runner.cache = twin.runner.checkpoints.cache = NaivePromptCache()
    for prompt in (ONE, [*ONE, 3], TWO, [*ONE[:60], *TWO], ONE):
        assert take(twin, prompt, 4) == take(ours, prompt, 4)
        assert twin.last_request.cached == ours.last_request.cached


# -- how much is stored ----------------------------------------------------------------------------


def test_repeated_prompt_is_not_stored_again(open_one):
    llm = open_one()
    for _ in range(2):
        take(llm, ONE, 1)
    assert llm.last_request.cached == len(ONE)
    assert llm.last_request.checkpoints == 0


def test_tip_that_a_few_tokens_are_added_to_is_not_stored(open_one):
    llm = open_one()
    chat = ONE + take(llm, ONE, 21)[:20]
    stored = entries(llm)
    take(llm, [*chat, 5], 1)
    assert llm.last_request.cached == len(chat)
    assert entries(llm) == stored + 1, "the prompt's end, and nothing else"


def test_nothing_stays_pinned_behind_a_request(open_one):
    llm = open_one()
    for prompt in (ONE, TWO, ONE, [*TWO, 3]):
        take(llm, prompt)
    assert entries(llm) > 0
    llm.prompt_cache.ram_bytes = 0
    assert entries(llm) == 0
    take(llm, THREE, 3)
    assert llm.last_request.checkpoints == 0, "refused ones are not counted"
    check_integrity(llm.prompt_cache)


def test_request_goes_on_where_nothing_can_be_saved(open_one, stock, monkeypatch):
    llm = open_one()
    monkeypatch.setattr(NativeContext, "save_partial", lambda *_: False)
    for prompt in (TWO, [*TWO, 3], ONE, [*TWO, 4]):
        assert take(llm, prompt, 5) == stock()(prompt, 5)


# -- attention -------------------------------------------------------------------------------------


@pytest.fixture
def beside(opened):
    """`beside(**options)`: a model on which an answer is open, that answer, what one said beside it."""

    def make(**options):
        llm = opened(n_parallel=2, flash_attn=True, **options)
        stream, _ = begin(llm, TWO)
        return llm, stream, take(llm, ONE, 3)

    return make


def again(llm, said):
    """The chat that ended beside the answer goes on; how much of it was found, and where."""
    take(llm, [*ONE, *said[:2], 3], 3)
    return llm.last_request.cached, llm.last_request.source


def test_attention_is_stored_when_another_chat_gets_its_slot(beside, stock):
    llm, stream, said = beside()
    take(llm, THREE, 2)
    cached, source = again(llm, said)
    assert cached >= len(ONE) + 1
    assert source == "ram"
    stream.close()


def test_attention_is_stored_once_no_request_waits(beside):
    llm, stream, said = beside()
    stream.close()
    for prompt in (TWO, THREE, TWO[::-1]):
        take(llm, prompt, 2)
    assert again(llm, said)[0] >= len(ONE) + 1


def test_another_model_of_the_same_cache_finds_a_chat_at_once(beside, opened):
    cache = PromptCache(1 << 26)
    other = opened(n_parallel=2, flash_attn=True, prompt_cache=cache)
    _, stream, said = beside(prompt_cache=cache)
    assert again(other, said)[0] >= len(ONE)
    stream.close()


def test_attention_that_is_to_outlive_the_process_is_stored_at_once(beside, opened, tmp_path):
    llm, stream, said = beside(prompt_cache=PromptCache(1 << 26, tmp_path))
    llm.prompt_cache.flush()
    later = opened(n_parallel=2, flash_attn=True, prompt_cache=PromptCache(1 << 26, tmp_path))
    cached, source = again(later, said)
    assert cached >= len(ONE)
    assert source == "disk"
    stream.close()


@pytest.mark.parametrize("deed", ["reset", "begin by hand", "load a state", "close"])
def test_chat_whose_slot_is_given_up_by_hand_is_found_again(opened, deed):
    cache = PromptCache(1 << 26)
    llm = opened(n_parallel=2, prompt_cache=cache)
    state = llm.save_state()
    running, _ = begin(llm, TWO)
    take(llm, ONE, 2)
    if deed == "reset":
        llm.reset()
    elif deed == "begin by hand":
        llm.n_tokens = 0
        llm.eval([1, 2, 3])
    elif deed == "load a state":
        llm.load_state(state)
    else:
        llm.close()
    running.close()
    if deed == "close":
        llm = opened(n_parallel=2, prompt_cache=cache)
    take(llm, [*ONE, 3], 1)
    assert llm.last_request.cached == len(ONE)


# -- what must not be stored -----------------------------------------------------------------------


def test_prompt_whose_logits_are_no_numbers_leaves_nothing(open_one, no_numbers):
    llm = open_one()
    no_numbers()
    take(llm, TWO, 3)
    assert entries(llm) == 0


@pytest.mark.parametrize("arch", ["qwen35", "gemma3", "mamba", "llama"])
def test_answer_whose_logits_are_no_numbers_is_not_stored(open_one, no_numbers, arch):
    llm = open_one(arch)
    stream, _ = begin(llm, ONE, 21)
    stored = entries(llm)
    no_numbers()
    list(itertools.islice(stream, 70))
    stream.close()
    assert entries(llm) == stored


def test_prompt_that_lost_cells_is_decoded_again_before_it_is_answered(open_one, stock, lose_cells, caplog):
    llm = open_one()
    take(llm, ONE, 2)
    batches = Batches(llm)
    batches.after[0] = lambda: lose_cells(llm.ctx, 2, 5)
    assert take(llm, [*ONE, *TWO]) == stock()([*ONE, *TWO])
    assert "does not hold the decoded cells" in caplog.text


@pytest.mark.parametrize("arch", CUTS)
def test_memory_that_others_cleared_is_noticed_and_said_once(open_one, stock, caplog, arch):
    llm, right = open_one(arch), stock(arch)
    for by_hand in (False, True):
        take(llm, ONE, 1)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
        if by_hand:
            llm.eval([4])
            assert llm.sample(temp=0.0) == right([*ONE, 4], 1)[0]
        else:
            assert take(llm, [*ONE, 4]) == right([*ONE, 4])
    assert caplog.text.count("changed context memory") == 1


def test_cut_that_the_library_refuses_costs_the_prompt_and_nothing_else(open_one, stock, monkeypatch):
    llm = open_one("llama")
    take(llm, ONE, 1)
    monkeypatch.setattr(NativeContext, "cut", lambda *_: False)
    assert take(llm, [*ONE[:50], 3], 4) == stock("llama")([*ONE[:50], 3], 4)
    assert llm.last_request.cached == 0


# -- what it costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_no_token_is_decoded_twice(open_one, arch):
    llm = open_one(arch)
    counter = DecodeCounter(llm)
    for prompt in (ONE, TWO, [*ONE[:60], *TWO]):
        answer = take(llm, prompt)
        assert counter.take() == llm.last_request.left + len(answer) - 1


def test_logits_are_asked_for_at_the_end_of_a_prompt_only(open_one, monkeypatch):
    llm, asked = open_one(), []
    decode = NativeContext.decode_parts

    def noted(self, parts):
        asked.extend(outputs for *_, outputs in parts)
        return decode(self, parts)

    monkeypatch.setattr(NativeContext, "decode_parts", noted)
    take(llm, TWO, 1)
    assert len(asked) > 3
    assert asked == ["none"] * (len(asked) - 1) + ["last"]


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_state_is_saved_once_for_each_checkpoint(open_one, monkeypatch, arch):
    """Memory that can be cut is not saved at all, and none before a single token."""
    llm, saved = open_one(arch), []
    save = NativeContext.save_partial
    monkeypatch.setattr(NativeContext, "save_partial", lambda *a: (saved.append(1), save(*a))[1])
    take(llm, TWO, 3)
    batches = -(-len(TWO) // 32)
    assert len(saved) <= (0 if arch == "llama" else llm.last_request.checkpoints + batches)
    saved.clear()
    llm.eval([5])
    assert saved == []


@pytest.mark.parametrize("prefill", [0.0, 1e-4])
def test_attention_is_read_until_it_is_known_not_to_pay(open_one, monkeypatch, prefill):
    """The cost of a prompt stays unknown while no large batch is decoded alone."""
    monkeypatch.setattr(CostMeter, "costs", lambda _: Costs(prefill_seconds=prefill))
    llm = open_one("qwen35", n_parallel=2)  # stock reads a slot's attention as a whole
    take(llm, ONE)
    runner = max(llm.slots.runners, key=lambda each: each.live.n)
    for _ in range(FEW):
        runner.meter.read(1.0, 1)
    whole = runner.live.profile.pager.reads_whole
    assert runner.checkpoints.worth_reading(1) is (prefill == 0 or not whole)


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_conversation_that_leaves_its_slot_is_stored_whatever_reading_costs(open_one, monkeypatch, arch):
    """Four chats in turn on two slots, whose prompts begin with the same header of a message."""
    monkeypatch.setattr(CostMeter, "costs", lambda _: Costs(prefill_seconds=1e-5))
    monkeypatch.setattr(CostMeter, "read_seconds", 1e-5)
    llm = open_one(arch, n_parallel=2)
    chats = [[1, 2, 3, *part] for part in (ONE, TWO, THREE, [*THREE[::-1]])]
    for chat in chats:
        take(llm, chat)
    for chat in chats:
        take(llm, [*chat, 9, 9])
        assert llm.last_request.cached >= len(chat) - 1


def test_an_answer_does_not_wait_for_attention_that_is_read_slowly(open_one, monkeypatch):
    """As on a GPU without flash attention; it is stored once nobody has asked for a while."""
    llm, began, may, read, waited = open_one(), Event(), Event(), LiveSequence.page_out, []
    for _ in range(FEW):
        llm.slots.runners[0].meter.read(SLOW_READ, 1)

    def slow(*given, **more):
        began.set()
        waited.append(not may.wait(30))
        return read(*given, **more)

    monkeypatch.setattr(LiveSequence, "page_out", slow)
    monkeypatch.setattr(loop, "REST_SECONDS", 1e6)
    answer = take(llm, ONE)
    chat = [*ONE, *answer, 1]
    chat += take(llm, chat, 4)
    assert not began.is_set(), "a turn that comes at once waits for it"
    monkeypatch.setattr(loop, "REST_SECONDS", 0.0)
    take(llm, [*chat, 1], 1)
    assert began.wait(30)
    assert not waited, "an answer waits for what the one before left"
    may.set()
    take(llm, TWO)
    take(llm, [*chat, 1, 1], 2)
    assert llm.last_request.cached == len(chat) + 1


@pytest.mark.parametrize("cache", ["given", "configured", "own"])
def test_closing_stores_attention_that_no_answer_waited_for(open_one, monkeypatch, cache):
    """It is for the models that open the same cache later; one that goes with the model gets nothing."""
    read, reads, given = LiveSequence.page_out, [], PromptCache() if cache == "given" else None
    monkeypatch.setattr(loop, "REST_SECONDS", 1e6)
    monkeypatch.setattr(LiveSequence, "page_out", lambda *one, **more: reads.append(1) or read(*one, **more))
    configure(ram="1GiB" if cache == "configured" else None)
    try:
        llm = open_one(prompt_cache=given)
        for _ in range(FEW):
            llm.slots.runners[0].meter.read(SLOW_READ, 1)
        chat = [*ONE, *take(llm, ONE), 1]
        take(llm, chat, 2)
        assert not reads, "it is not stored before"
        llm.close()
        stored = bool(reads)
        later = open_one(prompt_cache=given)
        take(later, [*chat, 2], 1)
    finally:
        configure(ram=None)
    assert stored is (later.last_request.cached > len(ONE)) is (cache != "own")
