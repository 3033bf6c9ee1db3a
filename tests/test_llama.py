"""The drop-in: what it reuses, what it survives, and that it is upstream's in everything else."""

import gc
import itertools
import pickle
import threading

import llama_cpp
import numpy as np
import pytest
import xxhash
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid import Llama, PromptCache
from llamahybrid.errors import Busy, ContextOverflow, DecodeError, LlamaHybridError, SnapshotError
from llamahybrid.evaluate.counters import DecodeCounter
from tests.lab.integrity import check_integrity

PROMPT = [(7 * i + 1) % 200 for i in range(80)]
OTHER = [(11 * i + 5) % 200 for i in range(50)]
SETTINGS = dict(n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)

HYBRID = "qwen35"
KINDS = ("llama", "gemma3", "mamba", "jamba", HYBRID)


@pytest.fixture
def open_model(tiny_model):
    """Ours on a tiny model."""

    def opener(arch=HYBRID, cls=Llama, **kw):
        return cls(str(tiny_model(arch)), **{**SETTINGS, **kw})

    return opener


def take(llm, prompt, n=8, **kw):
    return list(itertools.islice(llm.generate(prompt, temp=0.0, **kw), n))


@pytest.fixture
def fresh(open_model):
    """The answer of a fresh stock context."""

    def answer(prompt, n=8, arch=HYBRID, **kw):
        return take(open_model(arch, llama_cpp.Llama, **kw), prompt, n)

    return answer


# -- what is reused --------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KINDS)
def test_an_exact_repeat_decodes_no_prompt_token(open_model, fresh, arch):
    llm = open_model(arch, swa_full=False)
    first = take(llm, PROMPT)
    counter = DecodeCounter(llm)
    assert take(llm, PROMPT) == first == fresh(PROMPT, arch=arch, swa_full=False)
    answer_only = len(first) - 1  # the last token was sampled, not decoded
    assert counter.take() <= answer_only + (arch == "llama")  # stock replays one token there


def test_the_report_says_what_happened(open_model):
    llm = open_model()
    assert llm.last_request is None
    take(llm, PROMPT)
    report = llm.last_request
    assert (report.total, report.cached, report.left, report.source) == (80, 0, 80, "none")
    take(llm, [*PROMPT, 9])
    report = llm.last_request
    assert (report.total, report.matched, report.cached, report.left) == (81, 80, 80, 1)
    assert report.source == "ram"
    assert report.generated == 8
    assert report.first_token_seconds > 0


def test_usage_names_the_cached_tokens(open_model):
    llm = open_model()
    messages = [{"role": "user", "content": "Hello there"}]
    first = llm.create_chat_completion(messages, max_tokens=4)
    again = llm.create_chat_completion(messages, max_tokens=4)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": again["usage"]["prompt_tokens"]}
    assert llm.create_completion(PROMPT, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_every_finished_request_is_reported(open_model):
    llm = open_model()
    seen = []
    llm.on_request = seen.append
    take(llm, PROMPT)
    llm.create_completion(PROMPT, max_tokens=2)
    list(llm.create_completion(PROMPT, max_tokens=2, stream=True))
    assert [r.cached for r in seen] == [0, 80, 80]


def test_a_continued_sequence_is_planned_too(open_model, fresh):
    llm = open_model()
    llm.eval(PROMPT)
    assert take(llm, OTHER, reset=False) == fresh(PROMPT + OTHER)
    assert llm.last_request.cached == len(PROMPT)


def test_without_the_cache_everything_is_upstreams(open_model, fresh):
    llm = open_model(prompt_cache=False)
    assert take(llm, PROMPT) == fresh(PROMPT)
    assert llm.prompt_cache is None
    assert llm.last_request is None
    assert type(llm._ctx) is llama_cpp._internals.LlamaContext


def test_a_plain_model_makes_no_checkpoints(open_model):
    llm = open_model("llama")
    take(llm, PROMPT)
    take(llm, PROMPT[:40] + OTHER)
    take(llm, [*llm.eval_tokens, *OTHER])
    assert llm.prompt_cache.stats().entries == 0


@pytest.mark.parametrize("arch", KINDS)
def test_logprobs_of_a_restored_prefix_are_those_of_a_fresh_context(open_model, arch):
    ours, stock = open_model(arch, logits_all=True), open_model(arch, llama_cpp.Llama, logits_all=True)
    asked = dict(max_tokens=4, temperature=0.0, logprobs=2, seed=1, echo=True)
    ours.create_completion("Once upon a time there was a king", **asked)
    ours.create_completion("Never before", **asked)
    mine = ours.create_completion("Once upon a time there was a king and", **asked)["choices"][0]
    reference = stock.create_completion("Once upon a time there was a king and", **asked)["choices"][0]
    assert mine["text"] == reference["text"]
    assert mine["logprobs"]["tokens"] == reference["logprobs"]["tokens"]
    numbers, expected = (side["logprobs"]["token_logprobs"][1:] for side in (mine, reference))
    assert np.allclose(numbers, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("arch", KINDS)
def test_with_the_same_cuts_a_restored_prompt_has_the_very_bits_of_a_fresh_one(open_model, arch):
    llm = open_model(arch, swa_full=False)
    take(llm, PROMPT * 2, 20)
    first = llm.requests.last.plan
    prompt = (PROMPT * 2)[:150] + OTHER
    take(llm, prompt, 1)
    second = llm.requests.last.plan
    assert 0 < second.cached < second.total
    mine = llm.runner.live.row.logits().copy()
    stock = open_model(arch, llama_cpp.Llama, swa_full=False)
    ends = sorted({c for c in first.cuts if c < second.cached} | {second.cached, *second.cuts, second.total})
    for start, end in itertools.pairwise([0, *ends]):
        stock.eval(prompt[start:end])
    row = llama_cpp.llama_get_logits_ith(stock.ctx, -1)
    assert np.array_equal(mine, np.ctypeslib.as_array(row, shape=(stock.n_vocab(),)))


# -- the cache -------------------------------------------------------------------------------------


def test_the_budget_is_never_exceeded(open_model, fresh):
    budget = 150_000
    llm = open_model(prompt_cache=PromptCache(ram_bytes=budget))
    for i in range(6):
        take(llm, [*PROMPT[: 10 * i + 20], *OTHER], 20)
        assert 0 < llm.prompt_cache.stats().bytes_ram <= budget
        check_integrity(llm.prompt_cache)
    assert llm.prompt_cache.stats().evictions > 0
    assert take(llm, PROMPT) == fresh(PROMPT)


def test_a_budget_too_small_for_anything_still_answers(open_model, fresh):
    llm = open_model(prompt_cache=PromptCache(ram_bytes=100))
    assert take(llm, PROMPT) == take(llm, PROMPT) == fresh(PROMPT)


def test_models_that_share_a_cache_never_serve_each_other(open_model, fresh):
    cache = PromptCache()
    first, second = open_model("mamba", prompt_cache=cache), open_model("mamba2", prompt_cache=cache)
    take(first, PROMPT)
    assert take(second, PROMPT) == fresh(PROMPT, arch="mamba2")
    assert second.last_request.cached == 0


def test_the_same_model_in_another_context_shares_the_cache(open_model, fresh):
    cache = PromptCache()
    take(open_model("mamba", prompt_cache=cache), PROMPT)
    second = open_model("mamba", prompt_cache=cache)
    assert take(second, PROMPT) == fresh(PROMPT, arch="mamba")
    assert second.last_request.cached == len(PROMPT)


@pytest.mark.parametrize("arch", [HYBRID, "mamba"])
def test_a_damaged_checkpoint_is_dropped_and_decoded_again(open_model, fresh, caplog, arch):
    llm = open_model(arch)
    take(llm, PROMPT)
    for entry in llm.prompt_cache.ram.tree.oldest_entries():
        entry.checkpoint.snapshot.flags.writeable = True
        entry.checkpoint.snapshot[-1] ^= 1
        entry.checkpoint.snapshot.flags.writeable = False
    assert take(llm, PROMPT) == fresh(PROMPT, arch=arch)
    assert llm.last_request.cached == 0
    assert "damaged" in caplog.text


def test_a_state_with_nan_is_found_out_and_everything_decoded_again(open_model, fresh, monkeypatch):
    llm = open_model()
    save = llm.runner.live.native.save_partial

    def poisoned(out):
        save(out)
        out[-4000:] = np.full(1000, np.nan, dtype=np.float32).view(np.uint8)
        return xxhash.xxh3_64_intdigest(out.data)

    monkeypatch.setattr(llm.runner.live.native, "save_partial", poisoned)
    take(llm, PROMPT, 2)
    monkeypatch.undo()
    longer = [*PROMPT, *OTHER]
    assert take(llm, longer) == fresh(longer)
    assert len(PROMPT) not in [entry.position for entry in llm.prompt_cache.ram.tree.oldest_entries()]
    assert take(llm, OTHER) == fresh(OTHER), "NaN stayed in memory"
    check_integrity(llm.prompt_cache)


def test_an_answer_that_is_no_number_makes_no_checkpoints(open_model, monkeypatch):
    llm = open_model()
    take(llm, PROMPT, 2)
    stored = llm.prompt_cache.stats().entries
    nothing = np.full(llm.n_vocab(), np.nan, dtype=np.float32)
    generator = llm.generate([*PROMPT, 4], temp=0.0)
    next(generator)
    stored = llm.prompt_cache.stats().entries
    monkeypatch.setattr(llm.runner.live.native, "logits", lambda n: nothing)
    list(itertools.islice(generator, 130))
    generator.close()
    assert llm.prompt_cache.stats().entries == stored


def test_cells_that_went_missing_in_a_prefill_are_found_out(
    open_model, fresh, lose_cells, monkeypatch, caplog
):
    llm = open_model()
    take(llm, PROMPT, 2)
    live, decode = llm.runner.live, llm.runner.live.decode

    def lossy(tokens, outputs):
        decode(tokens, outputs)
        lose_cells(llm.ctx, 2, 5)
        monkeypatch.setattr(live, "decode", decode)

    monkeypatch.setattr(live, "decode", lossy)
    assert take(llm, PROMPT + OTHER) == fresh(PROMPT + OTHER)
    assert "other cells" in caplog.text


def test_stored_logits_wait_for_an_output_row(open_model, fresh, caplog):
    llm = open_model()
    take(llm, PROMPT, 2)
    llm.runner.live.decode(np.array([1], dtype=np.int32), "none")
    llm.runner.live.recount()
    assert not llm.runner.live.row.exists()
    assert take(llm, PROMPT) == fresh(PROMPT)
    assert llm.last_request.cached > 0
    assert caplog.text == "", "a checkpoint was dropped for want of an output row"
    assert take(llm, PROMPT) == fresh(PROMPT)
    assert llm.last_request.cached == len(PROMPT)


def test_a_warmed_prompt_starts_where_it_was_warmed(open_model, fresh):
    llm = open_model()
    assert llm.warm(PROMPT).left == len(PROMPT)
    take(llm, OTHER)
    assert take(llm, [*PROMPT, 3, 4]) == fresh([*PROMPT, 3, 4])
    assert llm.last_request.cached >= len(PROMPT)


def test_a_system_prompt_is_warmed_for_every_chat(open_model):
    llm = open_model(chat_format="chatml")
    system = {"role": "system", "content": "You know all the rivers of Austria and their springs."}
    llm.warm([system])
    take(llm, OTHER)
    chat = llm.create_chat_completion([system, {"role": "user", "content": "Which?"}], max_tokens=2)
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
    assert llm.warm("some text").total > 0


def test_without_a_cache_there_is_nothing_to_warm(open_model):
    with pytest.raises(LlamaHybridError, match="no prompt cache"):
        open_model(prompt_cache=False).warm(PROMPT)


def test_a_miss_is_explained_in_words(open_model):
    llm = open_model(explain=True)
    take(llm, PROMPT)
    take(llm, [*PROMPT[:50], 7, *PROMPT[51:]])
    new, old = (llm._model.detokenize([t], special=True).decode(errors="replace") for t in (7, PROMPT[50]))
    assert llm.last_request.reason.startswith(f"history differs at token 50 of 80: {new!r} was {old!r};")


# -- what is survived ------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KINDS)
def test_a_generator_closed_half_way_keeps_its_progress(open_model, fresh, arch):
    llm = open_model(arch)
    generator = llm.generate(PROMPT, temp=0.0)
    answer = [next(generator) for _ in range(5)]
    generator.close()
    follow_up = [*PROMPT, *answer[:4], 3]
    assert take(llm, follow_up) == fresh(follow_up, arch=arch)
    assert llm.last_request.cached >= len(PROMPT)


def test_an_old_generator_cannot_touch_a_newer_request(open_model, fresh):
    llm = open_model()
    old = llm.generate(PROMPT, temp=0.0)
    next(old)
    new = llm.generate(OTHER, temp=0.0)
    answer = [next(new)]
    old.close()
    del old
    gc.collect()
    assert [*answer, *itertools.islice(new, 7)] == fresh(OTHER)


def test_a_replaced_request_keeps_its_progress(open_model):
    llm = open_model()
    seen = []
    llm.on_request = seen.append
    old = llm.generate(PROMPT, temp=0.0)
    next(old)
    take(llm, [*PROMPT, 5])
    assert llm.last_request.cached == len(PROMPT)
    old.close()
    assert [r.generated for r in seen] == [8, 1], "each request is told of once, when it is over"


def test_an_aborted_decode_leaves_no_wrong_state(open_model, fresh):
    llm = open_model()
    take(llm, PROMPT, 2)
    polls = itertools.count()

    @llama_cpp.ggml_abort_callback
    def abort(_):
        return next(polls) >= 30

    llama_cpp.llama_set_abort_callback(llm.ctx, abort, None)
    with pytest.raises(DecodeError) as error:
        take(llm, [*PROMPT, *OTHER])
    assert error.value.code == 2
    llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(0), None)
    assert take(llm, [*PROMPT, 4]) == fresh([*PROMPT, 4])
    assert llm.last_request.cached == len(PROMPT)


@pytest.mark.parametrize("after", [True, False])
def test_an_interrupt_in_a_decode_leaves_no_wrong_state(open_model, fresh, monkeypatch, after):
    llm = open_model()
    take(llm, PROMPT, 2)
    decode = type(llm._ctx).decode

    def interrupted(self, batch):
        if after:
            decode(self, batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(llm._ctx), "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take(llm, [*PROMPT, *OTHER])
    monkeypatch.undo()
    assert take(llm, [*PROMPT, 4]) == fresh([*PROMPT, 4])
    assert llm.last_request.cached == len(PROMPT)


def test_an_interrupt_between_batches_keeps_those_that_are_done(open_model, fresh, monkeypatch):
    llm = open_model(n_batch=32)
    mirror = llm.requests.evaluation.mirror
    long = (PROMPT * 3)[:200]

    def interrupted(ids, start=0):
        mirror(ids, start)
        if llm.n_tokens == 96:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.requests.evaluation, "mirror", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take(llm, long)
    monkeypatch.undo()
    assert take(llm, long) == fresh(long, n_batch=32)
    assert llm.last_request.cached == 96


def test_an_exception_in_user_code_between_tokens_keeps_progress(open_model, fresh):
    llm = open_model()

    def stop(ids, logits):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        take(llm, PROMPT, stopping_criteria=stop)
    assert take(llm, PROMPT) == fresh(PROMPT)
    assert llm.last_request.cached == len(PROMPT)


def test_a_prompt_that_does_not_fit_changes_nothing(open_model):
    llm = open_model()
    take(llm, PROMPT)
    with pytest.raises(ContextOverflow):
        take(llm, [1] * 600)
    with pytest.raises(ContextOverflow):
        llm.eval([1] * 600)
    take(llm, PROMPT)
    assert llm.last_request.cached == len(PROMPT)


def test_generating_to_the_end_of_the_context(open_model, fresh):
    llm = open_model(n_ctx=256)
    prompt = [(7 * i + 1) % 200 for i in range(250)]
    generator = llm.generate(prompt, temp=0.0)
    answer = [next(generator) for _ in range(7)]
    with pytest.raises(ContextOverflow):
        next(generator)
    assert answer == fresh(prompt, 7, n_ctx=256)
    assert take(llm, PROMPT) == fresh(PROMPT)


@pytest.mark.parametrize("token", [-1, 10**6, 2**40])
def test_a_token_outside_the_vocabulary_is_refused(open_model, token):
    llm = open_model()
    take(llm, PROMPT)
    with pytest.raises(DecodeError):
        take(llm, [*PROMPT, token])
    take(llm, PROMPT)
    assert llm.last_request.cached == len(PROMPT)


def test_an_empty_prompt_is_refused(open_model):
    with pytest.raises(ContextOverflow):
        take(open_model(), [])


def test_memory_cleared_by_others_is_noticed(open_model, fresh, caplog):
    llm = open_model()
    take(llm, PROMPT)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
    assert take(llm, [*PROMPT, 4]) == fresh([*PROMPT, 4])
    assert "behind our back" in caplog.text


def test_memory_cleared_by_others_is_noticed_by_a_plain_eval(open_model, fresh):
    llm = open_model()
    llm.eval(PROMPT)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
    llm.eval([4])
    assert llm.sample(temp=0.0) == fresh([*PROMPT, 4], 1)[0]


def test_upstreams_reset_of_the_counters_is_no_change_of_memory(open_model, capfd):
    llm = open_model(verbose=True)
    llm.create_completion(PROMPT, max_tokens=2)
    llm.create_completion(PROMPT, max_tokens=2)
    assert llm.last_request.cached == len(PROMPT)


def test_threads_take_turns(open_model, fresh):
    llm = open_model()
    prompts = [[*PROMPT, i] for i in range(4)]
    answers = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: take(llm, prompts[i])})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {i: fresh(prompts[i]) for i in range(4)}


def test_a_second_thread_is_told_when_it_must_not_wait(open_model):
    llm = open_model(wait=False)
    generator = llm.generate(PROMPT, temp=0.0)
    next(generator)
    raised = []

    def second():
        try:
            take(llm, OTHER)
        except Busy as error:
            raised.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    thread.join(10)
    assert len(raised) == 1
    assert next(generator) is not None


# -- upstream's ways -------------------------------------------------------------------------------


def test_sent_tokens_are_checked_like_a_draft(open_model, fresh):
    llm = open_model()
    right = fresh(PROMPT, 12)
    generator = llm.generate(PROMPT, temp=0.0)
    answer = [next(generator)]
    answer.append(generator.send(right[1:3]))  # guessed right
    answer += itertools.islice(generator, 3)
    answer.append(generator.send([(right[5] + 1) % 200, 3]))  # guessed wrong
    answer += itertools.islice(generator, 4)
    assert answer == right[: len(answer)]


@pytest.mark.parametrize("arch", KINDS)
def test_a_draft_changes_nothing_but_the_batches(open_model, fresh, arch):
    prompt = PROMPT[:20] * 6
    llm = open_model(arch, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4))
    assert take(llm, prompt, 40) == fresh(prompt, 40, arch=arch)
    assert take(llm, prompt[:90], 20) == fresh(prompt[:90], 20, arch=arch)


def test_a_long_prompt_with_a_draft_has_room_for_its_scores(open_model):
    llm = open_model(n_ctx=1024, n_batch=256, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2))
    assert len(take(llm, (PROMPT * 9)[:700], 4)) == 4


@pytest.mark.parametrize("arch", KINDS)
def test_a_saved_state_continues_where_it_was(open_model, fresh, arch):
    llm = open_model(arch)
    llm.eval(PROMPT)
    state = pickle.loads(pickle.dumps(llm.save_state()))
    take(llm, OTHER)
    llm.load_state(state)
    assert llm.n_tokens == len(PROMPT)
    assert take(llm, PROMPT) == fresh(PROMPT, arch=arch)
    assert llm.last_request.left <= 1
    other = open_model(arch)
    other.load_state(state)
    assert take(other, [*PROMPT, 4]) == fresh([*PROMPT, 4], arch=arch)
    assert other.last_request.cached == len(PROMPT)


@pytest.mark.parametrize("arch", KINDS)
def test_a_state_that_stock_saved_is_taken(open_model, fresh, arch):
    stock = open_model(arch, llama_cpp.Llama)
    stock.eval(PROMPT)
    llm = open_model(arch)
    llm.load_state(stock.save_state())
    assert take(llm, [*PROMPT, 4]) == fresh([*PROMPT, 4], arch=arch)
    assert llm.last_request.cached == len(PROMPT)


def test_a_damaged_or_foreign_state_is_refused_and_nothing_lost(open_model):
    llm = open_model()
    take(llm, PROMPT)
    state = llm.save_state()
    state.llama_state = state.llama_state[:-1] + bytes([state.llama_state[-1] ^ 1])
    with pytest.raises(SnapshotError, match="damaged"):
        llm.load_state(state)
    state.llama_state = state.llama_state[:-1]
    with pytest.raises(SnapshotError, match="truncated"):
        llm.load_state(state)
    with pytest.raises(SnapshotError, match="another model"):
        open_model("jamba").load_state(llm.save_state())
    take(llm, PROMPT)
    assert llm.last_request.cached == len(PROMPT)


def test_a_state_that_the_library_does_not_take_leaves_nothing_wrong(open_model, fresh):
    stock = open_model(cls=llama_cpp.Llama)
    stock.eval(OTHER)
    state = stock.save_state()
    state.llama_state = state.llama_state[:-8]
    state.llama_state_size -= 8
    llm = open_model()
    llm.eval(PROMPT)
    with pytest.raises(RuntimeError):
        llm.load_state(state)
    assert take(llm, [*PROMPT, 4]) == fresh([*PROMPT, 4])


def test_a_load_that_reports_failure_is_not_believed(open_model, fresh, monkeypatch):
    stock = open_model(cls=llama_cpp.Llama)
    stock.eval((OTHER * 2)[: len(PROMPT)])
    llm = open_model()
    llm.eval(PROMPT)
    load = llama_cpp.llama_cpp.llama_state_set_data
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_state_set_data", lambda *a: load(*a) and 0)
    with pytest.raises(RuntimeError):
        llm.load_state(stock.save_state())
    assert take(llm, [*PROMPT, 4]) == fresh([*PROMPT, 4])


def test_saving_does_not_disturb_a_running_generator(open_model, fresh):
    llm = open_model()
    generator = llm.generate(PROMPT, temp=0.0)
    answer = [next(generator), next(generator)]
    llm.save_state()
    assert [*answer, *itertools.islice(generator, 6)] == fresh(PROMPT)


@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_upstreams_caches_still_serve(open_model, fresh, tmp_path, arch, kind):
    cache = llama_cpp.LlamaRAMCache() if kind == "ram" else llama_cpp.LlamaDiskCache(str(tmp_path))
    writer, reader = open_model(arch), open_model(arch)
    writer.set_cache(cache)
    reader.set_cache(cache)
    asked = dict(max_tokens=4, temperature=0.0)
    text = writer.create_completion(PROMPT, **asked)["choices"][0]["text"]
    assert reader.create_completion(PROMPT, **asked)["choices"][0]["text"] == text
    assert writer.create_completion(PROMPT, **asked)["choices"][0]["text"] == text
    assert take(reader, PROMPT) == fresh(PROMPT, arch=arch)


def test_an_upstream_cache_is_not_loaded_over_better_state(open_model, monkeypatch):
    llm = open_model("mamba")
    llm.set_cache(llama_cpp.LlamaRAMCache())
    llm.create_completion(PROMPT, max_tokens=8)
    loads = []
    monkeypatch.setattr(llm, "load_state", loads.append)
    llm.create_completion(PROMPT, max_tokens=8)
    llm.create_completion([*PROMPT, 4], max_tokens=8)
    assert llm.last_request.cached == len(PROMPT)
    llm.create_completion(OTHER, max_tokens=8)
    llm.create_completion(PROMPT, max_tokens=8)
    assert llm.last_request.cached == len(PROMPT)
    assert loads == []


def test_unknown_arguments_are_swallowed_as_upstream_does(open_model):
    assert take(open_model(no_such_argument=1), PROMPT, 1)


def test_a_pickled_model_comes_back_with_its_settings(open_model):
    llm = open_model(prompt_cache=PromptCache(ram_bytes=123_456), wait=2.5)
    again = pickle.loads(pickle.dumps(llm))
    assert take(again, PROMPT) == take(llm, PROMPT)
    assert again.prompt_cache.ram_bytes == 123_456
    assert again.requests.gate.wait == 2.5


def test_closing_with_a_generator_alive(open_model):
    llm = open_model()
    generator = llm.generate(PROMPT, temp=0.0)
    next(generator)
    llm.close()
    with pytest.raises((RuntimeError, AssertionError)):
        next(generator)
    llm.close()


def test_a_missing_model_is_upstreams_error():
    with pytest.raises(ValueError, match="does not exist"):
        Llama("/no/such/model.gguf", verbose=False)


def test_a_corrupt_model_is_upstreams_error(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match="Failed to load"):
        Llama(str(tmp_path / "bad.gguf"), verbose=False)


def test_a_vocabulary_without_a_model(open_model):
    assert open_model(vocab_only=True).tokenize(b"hi")


def test_embeddings_are_upstreams(open_model):
    ours, stock = open_model("llama", embedding=True), open_model("llama", llama_cpp.Llama, embedding=True)
    assert ours.embed(["Hello", "World"]) == stock.embed(["Hello", "World"])


def test_low_level_calls_do_what_upstreams_do(open_model):
    ours, stock = open_model(), open_model(cls=llama_cpp.Llama)
    for llm in (ours, stock):
        llm.reset()
        llm.eval(PROMPT)
    assert ours.sample(temp=0.0) == stock.sample(temp=0.0)
    for llm in (ours, stock):
        llm.reset()
        assert llm.n_tokens == 0
        llm.eval(OTHER)
    assert ours.sample(temp=0.0) == stock.sample(temp=0.0)
    assert ours.eval_tokens == stock.eval_tokens


def test_a_sequence_shortened_by_hand_is_decoded_right(open_model, fresh):
    llm = open_model()
    llm.eval(PROMPT)
    llm.n_tokens = 50
    llm.eval(OTHER)
    assert llm.sample(temp=0.0) == fresh(PROMPT[:50] + OTHER, 1)[0]


def test_a_turn_behind_a_stored_checkpoint_does_not_store_it_again(open_model):
    llm = open_model()
    take(llm, PROMPT, 1)
    generator = llm.generate([*PROMPT, *OTHER[:12]], temp=0.0)
    answer = [next(generator)]
    assert llm.last_request.cached == len(PROMPT)
    ends = len(llm.requests.last.plan.cuts) + 1
    assert llm.last_request.checkpoints == ends, "cuts, the prompt's end; the tip was there"
    answer += [next(generator) for _ in range(5)]
    generator.close()
    take(llm, [*PROMPT, *OTHER[:12], *answer[:5], *OTHER[:12]], 1)
    positions = [entry.position for entry in llm.prompt_cache.ram.tree.oldest_entries()]
    assert len(PROMPT) + 12 + 5 in positions, "no checkpoint where the turn began"
