"""Which request gets which slot."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.errors import DecodeError, RequestSuperseded
from llamahybrid.memory.state import unknown_ids
from llamahybrid.request.job import BatchLost
from llamahybrid.request.slots import Slot

ROWS = {"n_ctx": 1024, "n_threads": 1, "verbose": False, "logits_all": True}
WORDS = np.random.default_rng(1).integers(1, 200, 300).tolist()


@pytest.fixture
def llm(tiny_model):
    # without flash attention idle slots would be emptied (`Cells.release_idle`)
    options = {"n_ctx": 1024, "n_threads": 1, "verbose": False, "flash_attn": True}
    llm = Llama(str(tiny_model("llama")), n_parallel=3, **options)
    yield llm
    llm.close()


def ask(llm, prompt):
    stream = llm.generate(prompt, temp=0.0)
    next(stream)
    slot = llm.slots.current
    stream.close()
    return slot


def test_a_prompt_goes_where_most_of_it_is_live(llm):
    one, two = ask(llm, WORDS[:80]), ask(llm, WORDS[100:180])
    assert one is not two
    assert ask(llm, WORDS[100:200]) is two
    assert ask(llm, WORDS[:90]) is one


def test_what_is_in_use_is_not_given_away(llm):
    stream = llm.generate(WORDS[:80], temp=0.0)
    next(stream)
    used = llm.slots.current
    assert ask(llm, WORDS[:80]) is not used
    stream.close()
    assert llm.slots.user(used) is None


def test_an_unknown_prompt_goes_where_longest_nothing_was_asked(llm):
    first = ask(llm, WORDS[:80])
    others = {ask(llm, WORDS[100:180]), ask(llm, WORDS[200:280])}
    assert ask(llm, [9, 8, 7, 6]) is first
    assert first not in others


def test_each_thread_finds_what_it_left(llm):
    llm.eval(WORDS[:20])
    mine = llm.slots.here()

    def elsewhere():
        llm.eval(WORDS[50:60])
        seen.append((llm.slots.here(), llm.n_tokens))

    seen = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert llm.slots.here() is mine
    assert llm.n_tokens == 20
    assert seen[0][0] is not mine
    assert seen[0][1] == 10


def test_a_thread_that_did_nothing_yet_goes_on_with_nothing_of_anothers(llm):
    for _ in llm.slots.all:
        stream = llm.generate(WORDS[:30], temp=0.0)
        next(stream)
        stream.close()
    llm.eval(WORDS[50:60])
    mine = llm.n_tokens

    def elsewhere():
        llm.eval(WORDS[:10])
        return llm.n_tokens

    counts = [in_thread(elsewhere) for _ in range(4)]
    assert counts == [10] * 4
    assert llm.n_tokens == mine == 40


def test_what_a_thread_left_comes_with_it_where_others_have_its_slot(llm):
    def leave(i):
        llm.eval(WORDS[i : i + 20])
        left.wait(60)
        read = llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()
        llm.eval([7])
        return read, llm.input_ids[: llm.n_tokens].tolist()

    left = threading.Barrier(5)
    with ThreadPoolExecutor(5) as pool:
        for i, (read, ids) in enumerate(pool.map(leave, range(5))):
            assert read == (20, WORDS[i : i + 20])
            assert ids == [*WORDS[i : i + 20], 7]


def test_who_ends_what_others_gave_up_finds_its_own(llm):
    """A stream that was dropped is ended by whoever comes next, in the slot that it had."""
    llm.eval(WORDS[:20])
    mine = llm.slots.here()

    def drop():
        stream = llm.generate(WORDS[50:60], temp=0.0)
        next(stream)
        circle.append(stream)
        circle.append(circle)

    circle = []
    thread = threading.Thread(target=drop)
    thread.start()
    thread.join(60)
    circle.clear()
    gc.collect()
    llm.eval([7])
    assert llm.slots.here() is mine
    assert llm.input_ids[: llm.n_tokens].tolist() == [*WORDS[:20], 7]


def test_what_a_thread_sets_is_its_own(llm):
    stream = llm.generate(WORDS[:20], temp=0.0)
    first = next(stream)

    def meddle():
        seen.append(llm.n_tokens)
        llm.n_tokens = 3
        seen.append(llm.n_tokens)

    seen = []
    thread = threading.Thread(target=meddle)
    thread.start()
    thread.join(60)
    assert seen == [20, 3]
    assert llm.n_tokens == 20
    second = next(stream)
    assert llm.input_ids[: llm.n_tokens].tolist() == [*WORDS[:20], first]
    assert second >= 0


def test_the_idle_one_that_is_emptied_is_the_oldest(llm):
    oldest = ask(llm, WORDS[:80])
    ask(llm, WORDS[100:180])
    newest = ask(llm, WORDS[200:280])
    idle = llm.slots.idle(newest.evaluation.runner.live, ())
    assert idle is oldest.evaluation.runner
    stream = llm.generate(WORDS[:90], temp=0.0)
    next(stream)
    assert llm.slots.idle(newest.evaluation.runner.live, ()) is not oldest.evaluation.runner
    ticket = llm.slots.user(oldest)
    assert llm.slots.idle(newest.evaluation.runner.live, [ticket]) is not None
    stream.close()


# -- what a thread did last ------------------------------------------------------------------------


def in_thread(work):
    """What `work()` returned in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def by_hand(llm, prompt, n, between=int):
    """reset, eval, sample, ... as code for upstream's does, with something else before each."""
    said = []
    llm.reset()
    between()
    llm.eval(prompt)
    for _ in range(n):
        between()
        said.append(llm.sample(temp=0.0))
        between()
        llm.eval(said[-1:])
    return said


@pytest.fixture(params=["llama", "qwen35", "mamba"])
def any_llm(tiny_model, request):
    llm = Llama(str(tiny_model(request.param)), n_ctx=1024, n_threads=1, verbose=False, n_parallel=2)
    yield llm
    llm.close()


def test_what_a_thread_evaluates_by_hand_is_its_own_whoever_comes_between(any_llm):
    llm = any_llm
    alone = by_hand(llm, WORDS[:80], 6)

    def others():
        in_thread(lambda: [ask(llm, WORDS[i : i + 90]) for i in (0, 40, 120)])

    assert by_hand(llm, WORDS[:80], 6, others) == alone
    others()
    assert llm.input_ids[: llm.n_tokens].tolist() == WORDS[:80] + alone
    assert llm.save_state().input_ids[:86].tolist() == WORDS[:80] + alone


def test_two_threads_that_evaluate_by_hand(any_llm):
    llm = any_llm
    prompts = [WORDS[:80], WORDS[100:200], WORDS[50:120]]
    alone = [by_hand(llm, prompt, 6) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda prompt: by_hand(llm, prompt, 6), prompts)) == alone


def test_ending_anothers_stream_is_nothing_a_thread_did(any_llm):
    llm, left = any_llm, []

    def begin():
        left.append(llm.generate(WORDS[100:150], temp=0.0))
        next(left[0])

    alone = by_hand(llm, WORDS[:80], 1)
    in_thread(begin)
    llm.reset()
    llm.eval(WORDS[:80])
    left.pop().close()
    assert llm.input_ids[: llm.n_tokens].tolist() == WORDS[:80]
    assert llm.sample(temp=0.0) == alone[0]


def test_parking_streams_is_nothing_a_thread_did(any_llm):
    streams = [any_llm.generate(WORDS[i : i + 50], temp=0.0) for i in (100, 200)]
    for stream in streams:
        next(stream)
    any_llm.reset()
    any_llm.eval(WORDS[:80])
    state = any_llm.save_state()
    assert state.input_ids[: state.n_tokens].tolist() == WORDS[:80]


def test_a_sampler_is_not_left_to_the_next_request(any_llm):
    seen = []

    def watch(ids, scores):
        seen.append(len(ids))
        return scores

    for i in range(3):
        ask_watched = any_llm.generate(
            WORDS[i:80], temp=0.0, logits_processor=llama_cpp.LogitsProcessorList([watch])
        )
        next(ask_watched)
        ask_watched.close()
    assert seen
    seen.clear()
    in_thread(lambda: by_hand(any_llm, WORDS[:40], 2))
    assert not seen


def test_rows_of_all_tokens_are_a_threads_own_too(tiny_model):
    llm = Llama(
        str(tiny_model("qwen35")), n_ctx=512, n_threads=1, verbose=False, n_parallel=2, logits_all=True
    )
    try:
        in_thread(lambda: [ask(llm, WORDS[:30]), llm.reset()])
        llm.reset()
        llm.eval(WORDS[:60])
        mine = llm.scores[:60].copy()
        in_thread(lambda: [ask(llm, WORDS[i : i + 90]) for i in (0, 40, 120)])
        llm.eval(WORDS[60:62])
        assert llm.scores[:60] == pytest.approx(mine, abs=1e-3)  # decoded again, in other batches
        assert llm.scores[61].any()
    finally:
        llm.close()


def test_one_thread_goes_on_behind_its_own_open_stream(llm):
    stream = llm.generate(WORDS[:20], temp=0.0)
    first = next(stream)
    assert llm.n_tokens == 20
    llm.eval([first, 7])
    assert llm.input_ids[: llm.n_tokens].tolist() == [*WORDS[:20], first, 7]
    second = next(stream)
    assert llm.input_ids[: llm.n_tokens].tolist() == [*WORDS[:20], first]
    assert second >= 0


def fill(llm, prompt=WORDS[100:120]):
    """Other threads have every slot, one after the other."""
    held = threading.Barrier(3)

    def one(i):
        stream = llm.generate(prompt[i:], temp=0.0)
        next(stream)
        held.wait(60)
        stream.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, range(3)))


def as_if_native(llm):
    """The sixth token was decoded natively; the tokens up to it."""
    slot = llm.slots.here()
    live = slot.evaluation.runner.live
    live.state.ids[5] = next(unknown_ids)
    slot.arrays.note_native(live.tokens)
    return live.tokens[:6].tolist()


def test_what_a_chat_handler_decoded_is_told_when_its_slot_was_given_away(llm):
    llm.eval(WORDS[:20])
    evaluation = llm.slots.here().evaluation
    assert llm.slots.rests_on() is None
    image = as_if_native(llm)
    evaluation.handoff = True
    assert llm.slots.rests_on().tolist() == image
    fill(llm)
    assert not any(slot.evaluation.handoff or len(slot.arrays.native) for slot in llm.slots.all)
    assert llm.slots.rests_on().tolist() == image
    with pytest.raises(RequestSuperseded):
        llm.create_completion(WORDS[:20], max_tokens=2)
    assert llm.create_completion(WORDS[:20], max_tokens=2)


def test_what_a_chat_handler_decoded_and_lost_to_want_of_cells_is_not_answered_as_text(llm):
    llm.eval(WORDS[:20])
    as_if_native(llm)
    slot = llm.slots.here()
    slot.evaluation.handoff = True
    slot.evaluation.runner.live.empty()
    with pytest.raises(RequestSuperseded):
        llm.create_completion(WORDS[:20], max_tokens=2)


@pytest.mark.parametrize("generates", [False, True])
def test_natively_decoded_content_that_was_given_away_is_not_decoded_as_text(llm, generates):
    llm.eval(WORDS[:20])
    as_if_native(llm)
    fill(llm)
    stream = llm.generate([7], temp=0.0, reset=False)
    with pytest.raises(DecodeError, match="natively decoded content is gone"):
        next(stream) if generates else llm.eval([7])


def test_natively_decoded_content_that_was_lost_while_a_batch_waited_is_not_decoded_as_text(llm, monkeypatch):
    llm.eval(WORDS[:20])
    as_if_native(llm)
    runner = llm.slots.here().evaluation.runner

    def lost(*_):
        monkeypatch.undo()
        runner.live.lose()
        raise BatchLost("others had its cells")

    monkeypatch.setattr(runner, "decode", lost)
    with pytest.raises(DecodeError, match="natively decoded content is gone"):
        llm.eval(WORDS[20:30])
    assert llm.slots.here().arrays.n_tokens == 20


def test_native_content_of_another_request_is_not_taken_for_the_own(llm):
    """The texts around it are the same, and so is what `input_ids` shows in its place."""
    llm.eval(WORDS[:20])
    as_if_native(llm)
    fill(llm)
    for slot in llm.slots.all:
        live = slot.evaluation.runner.live
        live.empty()
        live.decode(np.array(WORDS[:20], np.int32), "last")
        live.state.ids[5] = next(unknown_ids)
    with pytest.raises(DecodeError, match="natively decoded content is gone"):
        llm.eval([7])


def test_rows_that_were_given_away_serve_no_other_prompt(tiny_model):
    with closing(Llama(str(tiny_model("llama")), n_parallel=3, **ROWS)) as llm:
        llm.eval(WORDS[:20])
        text = "some words that are no others"
        prompt = llm.tokenize(text.encode())
        fill(llm, [*prompt, 1, 2, 3])
        made = llm.create_completion(text, max_tokens=1, temperature=0, logprobs=1, echo=True)
    with closing(llama_cpp.Llama(str(tiny_model("llama")), **ROWS)) as stock:
        wanted = stock.create_completion(text, max_tokens=1, temperature=0, logprobs=1, echo=True)
    ours, theirs = (m["choices"][0]["logprobs"]["token_logprobs"] for m in (made, wanted))
    assert ours[1:] == pytest.approx(theirs[1:], abs=1e-3)


def test_what_a_thread_left_goes_with_it(llm):
    def leave():
        llm.eval(WORDS[:20])

    for _ in range(5):
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(60)
    fill(llm)
    ask(llm, WORDS[:9])
    gc.collect()
    assert len(llm.slots._homes) <= 4


def test_a_thread_that_is_new_here_takes_no_slot_from_a_chat(tiny_model):
    options = {"n_ctx": 1024, "n_threads": 1, "verbose": False, "flash_attn": True}
    with closing(Llama(str(tiny_model("qwen35")), n_parallel=2, **options)) as llm:
        chat = ask(llm, WORDS[:80])
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(ask, llm, WORDS[100:180]).result() is not chat
        assert ask(llm, WORDS[:90]) is chat
        assert (llm.last_request.cached, llm.last_request.source) == (80, "live")


def test_what_is_live_is_nobody_s_while_a_slot_changes_hands():
    """Its name is read, its tokens come, and it is another tenant's meanwhile."""

    class Identity:
        namespace = "mine"
        fingerprint = b"before"

    class Live:
        identity = Identity()

        @property
        def tokens(self):
            self.identity.fingerprint = b"after"
            return np.ones(3, np.int32)

    class Changing:
        class evaluation:  # noqa: N801
            class runner:  # noqa: N801
                live = Live()

    slot = Changing()
    assert [len(part) for part in Slot.glimpse(slot)] == [0, 0]
