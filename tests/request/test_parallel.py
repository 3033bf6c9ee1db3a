"""Several requests at once: each is answered as if it had the model to itself, whatever the others do."""

import pickle
import random
import threading
from contextlib import contextmanager
from itertools import islice

import llama_cpp
import pytest

from llamahybrid import PromptCache
from llamahybrid.core import scheduler
from llamahybrid.core.runner import Runner
from llamahybrid.devices import ggml
from llamahybrid.engine import loaded
from llamahybrid.errors import Busy, DecodeError
from llamahybrid.memory.shared import SharedContext
from tests.lab.inside import MergedBatches, posted, set_wait, waiting
from tests.lab.integrity import check_integrity
from tests.lab.waiting import wait_until
from tests.request.asking import ARCHS, CUTS, DEADLINE, WORDS, Batches, Started, begin, each, in_thread, take

pytestmark = [pytest.mark.patched]
KINDS = [
    *ARCHS,
    pytest.param("gemma3-full", marks=pytest.mark.full),
    pytest.param("deepseek4", marks=pytest.mark.full),
]


@pytest.fixture
def opened(opened):
    """Models of three slots; one whose batches of f16 differ (`parallel_fuzz`) keeps its cells in f32."""

    def open_one(arch="qwen35", *cls, **more):
        cells = {"type_k": 0, "type_v": 0} if arch == "deepseek4" else {}
        slots = {} if cls else {"n_parallel": 3}
        return opened(arch, *cls, **{"n_ctx": 2048, **slots, **cells, **more})

    return open_one


@contextmanager
def answering(llm):
    """Answers are decoded in another thread meanwhile, one token after the other."""
    over, begun = threading.Event(), threading.Event()

    def answer():
        while not over.is_set():
            for _ in islice(llm.generate(WORDS[300:350], temp=0.0), 500):
                begun.set()
                if over.is_set():
                    return

    thread = Started(answer)
    assert begun.wait(DEADLINE)
    try:
        yield
    finally:
        over.set()
        thread.result()


@pytest.fixture
def rejected(monkeypatch):
    """`rejected(prompt, times)`: its logits are no numbers for so many requests; a list that notes each."""

    def reject_prompt(prompt, times):
        prompt_done, noted = Runner.prompt_done, []

        def reject(runner, progress):
            if progress.prompt.tolist() != prompt or progress in noted or len(noted) >= times:
                return prompt_done(runner, progress)
            noted.append(progress)
            progress.prefilling = False
            runner.live.require_zeroing()
            return False

        monkeypatch.setattr(Runner, "prompt_done", reject)
        return noted

    return reject_prompt


def have_buffers_zeroed(llm):
    """Forgotten tokens are zeroed together with all other slots, which are emptied."""
    in_thread(take, llm, WORDS[200:240])
    llm.prompt_cache.forget(WORDS[200:240])
    in_thread(take, llm, [*WORDS[200:240], 5])


# -- the same answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KINDS)
def test_chats_of_several_threads(opened, stock, arch):
    llm, right = opened(arch), stock(arch)

    def chat(seed):
        chance = random.Random(seed)
        history, wrong = WORDS[: chance.randrange(20, 200)], []
        for _ in range(4):
            history = [*history, *(chance.randrange(1, 200) for _ in range(chance.randrange(3, 40)))]
            n = chance.randrange(2, 10)
            said = take(llm, history, n)
            if said != right(history, n):
                wrong.append((seed, len(history), said))
            if chance.random() < 0.4:
                history = history[: chance.randrange(10, len(history))]
            else:
                history += said
        return wrong

    assert each(chat, range(5)) == [[]] * 5
    check_integrity(llm.prompt_cache)


@pytest.mark.parametrize("arch", KINDS)
def test_answers_are_decoded_together(opened, stock, arch):
    llm, right = opened(arch), stock(arch)
    prompts = [WORDS[:50], WORDS[20:90], WORDS[:80]]
    begun = threading.Barrier(3, timeout=DEADLINE)
    batches = []

    def answer(prompt):
        stream, first = begin(llm, prompt)
        if begun.wait() == 0:
            batches.append(Batches(llm))
        begun.wait()
        return [*first, *islice(stream, 29)]

    assert each(answer, prompts) == [right(p, 30) for p in prompts]
    assert sum(batches[0].sizes) == 3 * 29
    assert 3 in batches[0].sizes


@pytest.mark.parametrize("arch", ["plamo2", "rwkv6qwen2", "arwkv7"])
def test_where_batches_of_several_are_wrong_each_is_decoded_alone_unless_a_patch_mends_it(
    opened, stock, arch
):
    llm, right = opened(arch), stock(arch)
    merged, prompts = MergedBatches(llm), [WORDS[:50], WORDS[20:90], WORDS[:80]]
    assert each(lambda p: take(llm, p, 20), prompts) == [right(p, 20) for p in prompts]
    assert bool(merged.batches) == ("0035" in loaded.patches())


@pytest.mark.parametrize(
    "more",
    [
        {"n_parallel": 0},
        {"n_parallel": 2, "prompt_cache": False},
        {"n_parallel": 64},
        {"n_parallel": 300, "n_batch": 512},
    ],
)
def test_impossible_numbers_of_slots_are_refused(opened, more):
    with pytest.raises(ValueError, match="n_parallel"):
        opened(**more)


# -- flash attention -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "flash"),
    [
        ({"n_gpu_layers": -1}, True),
        ({"n_gpu_layers": -1, "flash_attn": False}, False),
        ({"n_gpu_layers": -1, "n_parallel": 1}, True),
        ({}, False),
        ({"flash_attn": True}, True),
    ],
)
def test_flash_attention_is_the_default_on_a_gpu(opened, monkeypatch, options, flash):
    monkeypatch.setattr(ggml, "gpus", lambda: ["a GPU"])
    llm = opened(**options)
    assert llm.runner.live.profile.pager.layout.transposed is not flash  # values lie so without it
    again = pickle.loads(pickle.dumps(llm))
    assert again.runner.live.profile.pager.layout.transposed is not flash
    again.close()


def test_a_library_that_hides_its_devices_opens_models(opened, monkeypatch):
    def hidden():
        raise AttributeError("ggml has no ggml_backend_dev_count")

    monkeypatch.setattr(ggml, "gpus", hidden)
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    layout = opened(n_gpu_layers=-1).runner.live.profile.pager.layout
    assert not layout.transposed, "flash attention is on"


def test_state_serves_no_model_that_computes_otherwise(opened, monkeypatch):
    monkeypatch.setattr(ggml, "gpus", lambda: ["a GPU"])
    options = {"prompt_cache": PromptCache(), "n_gpu_layers": -1}
    take(opened(**options), WORDS[:200])
    other = opened(**options, flash_attn=False)
    take(other, WORDS[:200])
    assert other.last_request.cached == 0


# -- who gets a slot -------------------------------------------------------------------------------


def test_more_requests_than_slots_may_be_refused(opened, patient):
    llm = opened(n_parallel=2, wait=False)
    held = each(lambda prompt: begin(llm, prompt)[0], [WORDS[:20], WORDS[5:20]])
    with pytest.raises(Busy):
        take(llm, WORDS[:30])
    held.pop().close()
    assert take(llm, WORDS[:30], 2)


@pytest.mark.parametrize("arch", CUTS)
def test_request_resumes_in_the_slot_where_most_of_it_is_live(opened, arch):
    llm = opened(arch, flash_attn=True, prompt_cache=PromptCache(ram_bytes=0))
    chats = [[*prompt, *take(llm, prompt)] for prompt in (WORDS[:100], WORDS[200:300])]
    for chat in (chats[1], chats[0]):
        take(llm, [*chat, 7, 8], 2)
        assert llm.last_request.cached >= len(chat) - 1


def test_new_thread_takes_no_slot_from_a_chat(opened):
    llm = opened(n_parallel=2, flash_attn=True)
    chat = [*WORDS[:80], *take(llm, WORDS[:80])]
    in_thread(take, llm, WORDS[100:180])
    take(llm, [*chat, 3])
    assert (llm.last_request.cached, llm.last_request.source) == (len(chat) - 1, "live")


def test_unknown_prompt_goes_where_longest_nothing_was_asked(opened):
    llm = opened("llama", flash_attn=True)
    prompts = [WORDS[:80], WORDS[100:180], WORDS[200:280]]
    for prompt in (*prompts, [9, 8, 7, 6]):
        take(llm, prompt)
    for prompt in prompts[1:]:
        take(llm, [*prompt, 5])
        assert llm.last_request.source == "live"


@pytest.mark.parametrize("arch", CUTS)
def test_chat_moves_beside_a_running_answer_without_decoding_again(opened, stock, arch):
    """With a slot between them each step of both takes a native batch for each."""
    llm, right = opened(arch), stock(arch)
    prompts = [WORDS[:80], WORDS[100:180], WORDS[200:280]]
    chats = [[*prompt, *take(llm, prompt)] for prompt in prompts]
    assert max(llm.slots, key=lambda slot: slot.used) is llm.slots.all[2]
    running, said = begin(llm, chats[0])
    longer = [*chats[2], 7, 8]
    assert in_thread(take, llm, longer) == right(longer)
    assert llm.requests.last.plan.cached >= len(chats[2]) - 1
    assert [live.n for live in llm.runner.live.shared.members][1] > len(longer)
    assert [*said, *islice(running, 5)] == right(chats[0], 6)


def test_prompt_that_another_one_begins_with_is_decoded_once(opened):
    llm = opened()

    def one(i):
        take(llm, [*WORDS[:300], 10 + i, 20 + i], 2)
        return llm.last_request.cached

    with answering(llm):  # between its tokens prompts are decoded piece by piece
        cached = sorted(each(one, range(2)))
    assert cached[0] == 0
    assert cached[1] >= 256


@pytest.mark.parametrize("arch", ["qwen35", "gemma3", pytest.param("lfm2", marks=pytest.mark.full)])
def test_prompt_of_a_running_answer_is_shared(opened, stock, arch):
    llm, right = opened(arch), stock(arch)
    running, said = begin(llm, WORDS[:300], 2)
    longer = [*WORDS[:300], 7, 8]
    assert take(llm, longer, 4) == right(longer, 4)
    assert llm.last_request.cached == 300
    assert [*said, *islice(running, 6)] == right(WORDS[:300], 8)


def test_answers_have_a_token_beside_each_chunk_of_a_prompt(opened, monkeypatch):
    for name in ("CHUNK_STEPS", "CHUNK_SECONDS"):
        monkeypatch.setattr(scheduler, name, 0)  # else small ones follow each other
    llm = opened()
    with answering(llm):
        for start in range(20):  # on a busy machine the answer's reader comes too late now and then
            merged, batches = MergedBatches(llm), Batches(llm)
            take(llm, WORDS[start : start + 300], 1)
            mixed, prompts = merged.batches, sum(size > 1 for size in batches.sizes)
            llm.prompt_cache.clear()
            if prompts > 4 and mixed >= prompts // 2:
                break
        else:
            pytest.fail("a token of the answer goes with a chunk of the prompt")


# -- whose it is -----------------------------------------------------------------------------------


def test_each_thread_has_its_own_last_request(opened):
    llm = opened()

    def one(n):
        take(llm, WORDS[:n], 5)
        return llm.last_request.total

    assert each(one, [30, 50, 70]) == [30, 50, 70]


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", CUTS)
def test_each_request_may_hold_as_many_tokens_as_n_ctx_says(opened, stock, arch):
    llm, right = opened(arch, n_ctx=512), stock(arch)
    assert (llm.n_ctx(), len(llm.input_ids)) == (512, 512)
    prompts = [WORDS[i : i + 430] for i in (0, 10, 20)]
    assert each(lambda p: take(llm, p, 60), prompts) == [right(p, 60) for p in prompts]


@pytest.mark.parametrize("n_ctx", [0, 300])
def test_context_of_a_request_is_that_of_one_slot(opened, n_ctx):
    llm, one = opened(n_ctx=n_ctx, n_parallel=2), opened(n_ctx=n_ctx, n_parallel=1)
    for model in (llm, one):
        model.eval(WORDS[:40])
    assert llm.n_ctx() == one.n_ctx()
    assert llm.__getstate__()["n_ctx"] == one.__getstate__()["n_ctx"]
    assert len(llm.input_ids) == len(one.input_ids)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["refused", "faulty"])
def test_failed_batch_of_several_is_decoded_by_each_alone(opened, stock, monkeypatch, how):
    llm, right = opened(n_parallel=2), stock()
    failed, begun = [], threading.Barrier(2, timeout=DEADLINE)
    step = SharedContext.decode_parts

    def fail_once(self, parts):
        if len(parts) == 1 or failed:
            return step(self, parts)
        failed.append(parts)
        if how == "refused":
            raise DecodeError(1, "no slot")
        step(self, parts)
        for live, _, _ in parts:
            live.invalidate_tip()
        return ["another size" for _ in parts]

    monkeypatch.setattr(SharedContext, "decode_parts", fail_once)

    def answer(prompt):
        stream, first = begin(llm, prompt)
        begun.wait()
        return [*first, *islice(stream, 29)]

    prompts = [WORDS[:40], WORDS[100:150]]
    assert each(answer, prompts) == [right(p, 30) for p in prompts]
    assert failed


def test_answer_beside_a_prompt_whose_logits_are_no_numbers(opened, stock, rejected, measured_costs):
    """The buffers are zeroed for that one; what this one is sampled from is its own all the same."""
    llm, right, noted = opened(n_parallel=3), stock(), rejected(WORDS[200:241], 10)

    def answer(prompt):
        stream, said = begin(llm, prompt)
        begun.wait()
        while len(noted) < 10 and len(said) < 900:
            said.append(next(stream))
        return [*said, *islice(stream, 20)]

    prompts, begun = (WORDS[:50], WORDS[100:150]), threading.Barrier(3, timeout=DEADLINE)
    answers = [Started(answer, prompt) for prompt in prompts]
    begun.wait()
    while len(noted) < 10:
        take(llm, WORDS[200:241], 1)
        llm.prompt_cache.clear()
    for prompt, said in zip(prompts, (answer.result() for answer in answers), strict=True):
        assert said == right(prompt, len(said))


@pytest.mark.parametrize("longer", [0, 150])
def test_request_that_waits_while_a_prompt_that_fails_has_the_buffers_zeroed(
    opened, stock, monkeypatch, measured_costs, longer
):
    """In the midst of an answer, or of a prompt; it is decoded alone from then on."""
    llm, right, prompt_done = opened(n_parallel=2, n_batch=24), stock(n_batch=24), Runner.prompt_done

    def fail(runner, progress):
        if progress.prompt.tolist() != WORDS[200:241]:
            return prompt_done(runner, progress)
        runner.live.require_zeroing()
        runner.live.empty()
        raise LookupError("mine")

    monkeypatch.setattr(Runner, "prompt_done", fail)
    for start in range(30):
        prompt = WORDS[start : start + 50 + longer]
        answer = Started(take, llm, prompt, 20)
        with pytest.raises(LookupError, match="mine"):
            take(llm, WORDS[200:241], 1)
        assert answer.result() == right(prompt, 20)


def test_request_that_was_let_in_before_is_never_refused(opened, stock, patient):
    """Its time to wait is over; it lost its slot, and asks for the next token while another one has that."""
    llm, right = opened(n_parallel=1, wait=False), stock()
    first, said = begin(llm, WORDS[:50])
    set_wait(llm, True)
    second, others = begin(llm, WORDS[100:150])
    token = Started(next, first)
    wait_until(lambda: waiting(llm) or not token.is_alive())
    others.append(next(second))
    second.close()
    said.append(token.result())
    assert said == right(WORDS[:50], 2)
    assert others == right(WORDS[100:150], 2)


@pytest.mark.parametrize("arch", ARCHS)
def test_answer_whose_reader_is_away_while_buffers_are_zeroed_goes_on_right(opened, stock, arch):
    llm, right = opened(arch), stock(arch)
    stream, said = begin(llm, WORDS[:50], 3)
    have_buffers_zeroed(llm)
    assert take(llm, WORDS[300:340]) == right(WORDS[300:340])
    assert [*said, *islice(stream, 5)] == right(WORDS[:50], 8)


def test_answer_that_is_decoded_anew_beside_a_prompt_that_has_the_buffers_zeroed(
    opened, stock, monkeypatch, rejected
):
    """In one batch: what the answer has just got is gone when it is its turn."""
    llm, right, meddled = opened(), stock(), []
    prompts = WORDS[:9], WORDS[20:30], WORDS[40:51]
    noted, run = rejected(prompts[0], 1), llm.requests.loop.run

    def meddle(*given):  # between the prompt of the second one and its answer
        result = run(*given)
        if not meddled:
            meddled.append(True)
            in_thread(early.close)
            have_buffers_zeroed(llm)
            llm.prompt_cache.clear()
            batches = Batches(llm)
            batches.before[0] = lambda: wait_until(lambda: posted(llm) >= 2)
            meddled.append(Started(next, third))
            wait_until(lambda: batches.sizes)
            meddled.append(Started(next, first))
        return result

    first, (early, _) = llm.generate(prompts[0], temp=0.0), begin(llm, WORDS[60:70])  # in the first slot
    third, said = begin(llm, prompts[2], 2)
    monkeypatch.setattr(llm.requests.loop, "run", meddle)
    answer = take(llm, prompts[1], 3)
    said.append(meddled[1].result())
    answers = [[meddled[2].result()], answer, said]
    assert answers == [right(prompt, n) for prompt, n in zip(prompts, (1, 3, 3), strict=True)]
    assert noted


def test_answer_samples_from_its_prompt_though_buffers_were_zeroed_since(opened, stock, monkeypatch):
    """Between a prompt and the first token of its answer."""
    llm, right, meddled = opened(), stock(), []
    run = llm.requests.loop.run

    def meddle(*given):
        result = run(*given)
        if not meddled:
            meddled.append(True)
            have_buffers_zeroed(llm)
        return result

    monkeypatch.setattr(llm.requests.loop, "run", meddle)
    assert take(llm, WORDS[:50], 5) == right(WORDS[:50], 5)
    assert meddled


def test_error_of_a_criterion_ends_its_own_request_alone(opened, stock):
    llm, right = opened(n_parallel=2), stock()
    other, said = begin(llm, WORDS[:60])

    def fail(*_):
        raise LookupError("mine")

    criteria = llama_cpp.StoppingCriteriaList([fail])
    with pytest.raises(LookupError, match="mine"):
        in_thread(lambda: take(llm, WORDS[100:160], stopping_criteria=criteria))
    assert [*said, *islice(other, 5)] == right(WORDS[:60], 6)
    assert take(llm, WORDS[100:160]) == right(WORDS[100:160])


# -- the whole context -----------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
def test_a_tip_that_other_code_damaged_is_not_stored_for_another_slot(opened, stock, damaged):
    """A cell that is missing shows in the size of memory alone, and counts no decode."""
    llm = opened("llama", flash_attn=True)
    right, said = stock("llama", flash_attn=True)(WORDS[:300], 4), take(llm, WORDS[:300], 4)
    assert said == right
    slot = next(each for each in llm.slots.all if each.runner.live.n)
    if damaged:
        memory = llama_cpp.llama_get_memory(llm._ctx.ctx)
        assert llama_cpp.llama_memory_seq_rm(memory, llm.slots.all.index(slot), 40, 41)
    slot.runner.share()
    assert llm.prompt_cache.stats().entries == (not damaged)
