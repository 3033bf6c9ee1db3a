"""What a request keeps of the chat it leaves, what it must not keep, and what it lets go again."""

import itertools
from contextlib import closing
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.memory.costs import LARGE_BATCH, CostMeter
from llamahybrid.prompt_cache import Costs
from llamahybrid.prompt_cache.placement import prefill_cuts
from llamahybrid.request import runner as runner_module
from llamahybrid.request.boundaries import Boundaries
from llamahybrid.request.cells import Cells
from tests.lab.naive import NaivePromptCache
from tests.lab.real_costs import measure_with

ONE = [(7 * i + 1) % 200 for i in range(120)]
TWO = [(11 * i + 5) % 200 for i in range(160)]


def take(llm, prompt, n=1):
    return list(itertools.islice(llm.generate(prompt, temp=0.0), n))


@pytest.fixture
def open_model(tiny_model, monkeypatch):
    made = []

    def opener(arch="qwen35", **more):
        window = {"window": 16} if arch == "gemma3" else {}
        options = {"n_ctx": 512, "n_threads": 1, "verbose": False, "n_batch": 32, "swa_full": False, **more}
        made.append(Llama(str(tiny_model(arch, **window)), **options))
        monkeypatch.setattr(made[-1].runner.meter, "costs", Costs)  # no checkpoint because it is cheap here
        return made[-1]

    yield opener
    for llm in made:
        llm.close()


# -- what is left ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen35", "mamba", "gemma3"])
def test_a_chat_left_for_a_deeper_one_is_found_again_at_its_tip(open_model, arch):
    llm = open_model(arch)
    take(llm, TWO)
    chat = ONE + take(llm, ONE, 21)[:20]
    assert llm.n_tokens == len(chat)
    take(llm, [*TWO, 3])
    assert llm.last_request.cached >= len(chat)
    take(llm, [*chat, 5, 6])
    assert llm.last_request.cached == len(chat)


def test_a_tip_that_a_cut_goes_back_from_is_found_again(open_model):
    llm = open_model("gemma3")
    chat = ONE + take(llm, ONE, 21)[:20]
    take(llm, [*chat[:-4], 5, 6])
    assert (llm.last_request.cached, llm.last_request.source) == (len(chat) - 4, "live")
    take(llm, [*chat, 7, 8])
    assert llm.last_request.cached == len(chat)


@pytest.mark.parametrize("arch", ["qwen35", "mamba", "llama"])
def test_a_tip_whose_logits_are_no_numbers_is_not_stored(open_model, monkeypatch, arch):
    llm = open_model(arch)
    stream = llm.generate(ONE, temp=0.0)
    list(itertools.islice(stream, 21))
    stored = llm.prompt_cache.stats().entries
    nothing = np.full(llm.n_vocab(), np.nan, np.float32)
    monkeypatch.setattr(llm.runner.live.native, "logits", lambda *_: nothing)
    stream.close()
    assert llm.prompt_cache.stats().entries == stored
    llm.runner.save_tip()
    assert llm.prompt_cache.stats().entries == stored
    monkeypatch.undo()
    llm.runner.save_tip()
    assert llm.prompt_cache.stats().entries == stored + 1


def test_a_prompt_whose_logits_are_no_numbers_leaves_nothing(open_model, monkeypatch):
    llm = open_model()
    nothing = np.full(llm.n_vocab(), np.nan, np.float32)
    monkeypatch.setattr(llm.runner.live.native, "logits", lambda *_: nothing)
    take(llm, TWO, 3)
    assert llm.prompt_cache.stats().entries == 0


def test_a_plain_model_does_not_look_at_its_logits(open_model, monkeypatch, caplog):
    llm = open_model("llama")
    nothing = np.full(llm.n_vocab(), np.nan, np.float32)
    monkeypatch.setattr(llm.runner.live.native, "logits", lambda *_: nothing)
    take(llm, TWO, 3)
    assert caplog.text == ""


def test_a_prompt_whose_logits_are_not_to_be_had_has_no_checkpoint_at_its_end(open_model, monkeypatch):
    llm = open_model()
    monkeypatch.setattr(llm.runner.live.row, "logits", lambda: None)
    assert len(take(llm, ONE)) == 1
    assert llm.last_request.checkpoints == len(llm.requests.last.plan.cuts) == 1


def test_a_prompt_that_lost_cells_is_decoded_again_before_it_is_answered(
    open_model, lose_cells, monkeypatch, caplog
):
    llm, other = open_model(), open_model()
    take(llm, ONE, 2)  # and back from there: what grew by itself would refute the size rule instead
    decode = llm.runner.live.decode

    def lossy(tokens, outputs):
        decode(tokens, outputs)
        lose_cells(llm.ctx, 2, 5)
        monkeypatch.setattr(llm.runner.live, "decode", decode)

    monkeypatch.setattr(llm.runner.live, "decode", lossy)
    take(llm, [*ONE, *TWO])
    take(other, [*ONE, *TWO])
    assert "other cells" in caplog.text
    assert np.allclose(llm.runner.live.row.logits(), other.runner.live.row.logits(), atol=1e-4)


def test_nothing_is_stored_where_a_prefill_refutes_the_size_rule(open_model, monkeypatch):
    llm = open_model()
    live = llm.runner.live

    def refuted():
        live.profile = replace(live.profile, linear=False)
        return True

    monkeypatch.setattr(live, "learn_size_rule", refuted)
    take(llm, TWO)
    assert llm.requests.last.plan.cuts
    assert llm.prompt_cache.stats().entries == 0


def checkpoints(llm, monkeypatch):
    """Where the runner takes checkpoints from now on."""
    runner, taken = llm.runner, []
    checkpoint = runner.checkpoints.checkpoint
    monkeypatch.setattr(
        runner.checkpoints, "checkpoint", lambda *a, **k: taken.append(runner.live.n) or checkpoint(*a, **k)
    )
    return taken


def test_where_a_cut_goes_back_to_is_not_stored(open_model, monkeypatch):
    llm = open_model("gemma3")
    chat = ONE + take(llm, ONE, 21)[:20]
    taken = checkpoints(llm, monkeypatch)
    take(llm, [*chat[:-4], *TWO[:20]])
    assert llm.last_request.cached == len(chat) - 4
    assert len(chat) - 4 not in taken


def test_an_answer_is_stored_on_schedule(open_model, monkeypatch):
    llm = open_model()
    stream = llm.generate(ONE, temp=0.0)
    next(stream)
    taken = checkpoints(llm, monkeypatch)
    for _ in range(100):
        next(stream)
    assert taken == [128, 192]
    assert llm.last_request.steps == 100


def test_a_border_that_several_tokens_pass_at_once_counts(open_model, monkeypatch):
    llm = open_model()
    stream = llm.generate(ONE, temp=0.0)
    next(stream)
    taken = checkpoints(llm, monkeypatch)
    llm.runner.live.decode(TWO[:12], "last")
    llm.runner.before_token(llm.requests.last)
    stream.close()
    assert taken == [len(ONE) + 12]


def test_the_end_of_any_answer_is_stored_while_nobody_waits_for_it(open_model, monkeypatch):
    """Costs forbid it here: but who switches to another chat would pay for it, before its first token."""
    llm = open_model()
    monkeypatch.setattr(llm.runner.meter, "costs", lambda: Costs(token_seconds=0.1, snapshot_seconds=1.0))
    taken = checkpoints(llm, monkeypatch)
    take(llm, ONE, 4)
    assert taken == [len(ONE), len(ONE) + 3]
    take(llm, TWO)
    assert taken == [len(ONE), len(ONE) + 3, len(TWO)]


@pytest.mark.parametrize(("due", "tokens", "at_end"), [(999, 64, [184]), (999, 63, []), (190, 90, [])])
def test_where_chats_are_not_kept_an_end_is_stored_if_no_checkpoint_is_near(
    open_model, monkeypatch, due, tokens, at_end
):
    llm = open_model()
    llm.runner.live.profile = replace(llm.runner.live.profile, pager=None)
    stream = llm.generate(ONE, temp=0.0)
    next(stream)
    llm.requests.last.schedule.next_due = due
    for _ in range(tokens):
        next(stream)
    taken = checkpoints(llm, monkeypatch)
    stream.close()
    assert taken == at_end


def test_a_plain_models_long_answer_is_not_stored(open_model):
    llm = open_model("llama")
    take(llm, ONE, 80)
    assert llm.prompt_cache.stats().entries == 0


@pytest.mark.parametrize("tokens", [70, 20])
def test_an_answer_is_not_stored_once_its_memory_is_known_to_defy_proof(open_model, tokens):
    """Another request may learn it while this one waits: neither on schedule, nor at the end."""
    llm = open_model()
    llm.runner.meter.costs = lambda: Costs(1e-2, 1e-3, 1e-6)  # a snapshot costs nothing: any end is due
    stream = llm.generate(ONE, temp=0.0)
    next(stream)
    stored, live = llm.prompt_cache.stats().entries, llm.runner.live
    live.profile = replace(live.profile, linear=False)
    llm.requests.last.schedule.next_due = len(ONE) + 50 if tokens == 70 else 999
    list(itertools.islice(stream, tokens))
    stream.close()
    assert llm.prompt_cache.stats().entries == stored


def test_a_tip_that_a_few_tokens_are_added_to_is_not_stored(open_model):
    llm = open_model()
    chat = ONE + take(llm, ONE, 21)[:20]
    stored = llm.prompt_cache.stats().entries
    take(llm, [*chat, 5])
    assert llm.last_request.cached == len(chat)
    assert llm.prompt_cache.stats().entries == stored + 1, "the prompt's end, and nothing else"


def test_a_message_that_is_edited_starts_at_its_beginning(open_model):
    llm = open_model()
    found = Boundaries(llm._model.vocab, llm.n_vocab()).find
    opens = next(t for t in range(200, llm.n_vocab()) if found(np.array([5, t])))
    take(llm, [*ONE[:118], opens, *TWO[:12]])
    take(llm, [*ONE[:118], opens, *TWO[50:62]])
    assert llm.last_request.cached == 118


def test_a_tip_that_is_stored_is_not_copied_again(open_model, monkeypatch):
    llm = open_model()
    take(llm, ONE)
    live, copied = llm.runner.live, []
    snapshot = live.snapshot
    monkeypatch.setattr(live, "snapshot", lambda *a, **k: copied.append(live.n) or snapshot(*a, **k))
    take(llm, TWO)
    assert copied
    assert len(ONE) not in copied


def test_an_answer_is_known_though_nothing_of_it_is_stored(open_model):
    llm = open_model()
    chat = ONE + take(llm, ONE, 6)[:5]
    take(llm, TWO)
    take(llm, [*chat, 9])
    assert llm.last_request.matched == len(chat)


def test_logits_are_asked_for_at_the_end_only(open_model, monkeypatch):
    llm, asked = open_model(), []
    decode = llm.runner.live.decode
    monkeypatch.setattr(
        llm.runner.live, "decode", lambda t, outputs: asked.append(outputs) or decode(t, outputs)
    )
    take(llm, TWO)
    assert len(asked) > 3
    assert asked.index("last") == len(asked) - 1


def test_a_state_is_copied_once(open_model, monkeypatch):
    llm = open_model()
    live, copied = llm.runner.live, []
    snapshot = live.snapshot
    monkeypatch.setattr(live, "snapshot", lambda *a, **k: copied.append(live.n) or snapshot(*a, **k))
    take(llm, ONE)
    assert len(set(copied)) == len(copied) > 3


# -- what is let go --------------------------------------------------------------------------------


def test_nothing_stays_pinned_behind_a_request(open_model):
    llm = open_model()
    for prompt in (ONE, TWO, ONE, [*TWO, 3]):
        take(llm, prompt)
        llm.runner.checkpoints.depth(np.array(ONE, np.int32))
    assert llm.prompt_cache.stats().entries > 0
    llm.prompt_cache.ram_bytes = 0
    assert llm.prompt_cache.stats().entries == 0


def test_a_request_that_is_over_holds_no_bytes_of_the_cache(open_model):
    llm = open_model()
    take(llm, ONE)
    take(llm, TWO)
    stream = llm.generate(ONE, temp=0.0)
    next(stream)
    assert llm.requests.last.plan.checkpoint is not None, "nothing was at stake"
    stream.close()
    plan = llm.requests.last.plan
    assert (plan.checkpoint, plan.logits, plan.segments) == (None, None, ())


def test_a_cut_that_the_library_refuses_costs_the_prompt_and_nothing_else(open_model, monkeypatch):
    llm, fresh = open_model("llama"), open_model("llama")
    take(llm, ONE)
    monkeypatch.setattr(llm.runner.live.native, "cut", lambda position: False)
    asked = [*ONE[:50], 3]
    assert take(llm, asked, 4) == take(fresh, asked, 4)
    assert llm.last_request.cached == 0


def test_other_tokens_in_the_place_of_ours_are_noticed(open_model):
    llm, fresh = open_model("llama"), open_model("llama")
    take(llm, ONE)
    others = (llama_cpp.llama_token * 10)(*[3] * 10)
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm.ctx), 0, len(ONE) - len(others), -1)
    assert llama_cpp.llama_decode(llm.ctx, llama_cpp.llama_batch_get_one(others, len(others))) == 0
    assert take(llm, [*ONE, 4], 5) == take(fresh, [*ONE, 4], 5)
    assert llm.last_request.cached == 0


def test_what_we_know_to_be_spoilt_is_nobody_elses_doing(open_model, caplog):
    llm = open_model()
    take(llm, ONE)
    llm.runner.live.invalidate()
    take(llm, ONE)
    assert caplog.text == ""


def test_what_is_wrong_is_said_once(open_model, caplog):
    llm = open_model()
    for _ in range(2):
        take(llm, ONE)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
        take(llm, [*ONE, 4])
    assert caplog.text.count("behind our back") == 1


def test_a_limit_of_reuse_holds_though_there_is_no_output_row(open_model):
    llm = open_model("llama")
    take(llm, ONE)
    live = llm.runner.live
    live.decode((1,), "none")
    live.recount()
    assert llm.runner.begin(np.array(ONE, np.int32), 50).plan.cached == live.n == 50


# -- what is measured and reported -----------------------------------------------------------------


class Noting(CostMeter):
    """Keeps every sample, and says nothing: no checkpoint because it is cheap here."""

    def __init__(self, batch_tokens):
        super().__init__(batch_tokens)
        self.batches, self.saves, self.restores = [], [], []

    def decoded(self, tokens, seconds):
        self.batches.append((tokens, seconds))
        super().decoded(tokens, seconds)

    def saved(self, n_bytes, seconds):
        self.saves.append(n_bytes)
        super().saved(n_bytes, seconds)

    def restored(self, seconds, tokens):
        self.restores.append((tokens, seconds))
        super().restored(seconds, tokens)

    def costs(self):
        return Costs()

    def large(self):
        """Seconds of each batch that says what prefill costs."""
        return [seconds for tokens, seconds in self.batches if tokens >= LARGE_BATCH]


def test_what_a_request_took_is_measured(open_model):
    llm = open_model(n_batch=128)
    measure_with(llm.runner, meter := Noting(128))
    stream = llm.generate(ONE, temp=0.0)
    next(stream)
    assert len(meter.saves) == llm.last_request.checkpoints == 2
    assert set(meter.saves) == {llm.runner.live.snapshot_bytes()}
    (prefill,) = meter.large()
    assert 0 < prefill <= llm.last_request.prefill_seconds
    batches = len(meter.batches)
    next(stream)
    llm.eval([5])
    assert [tokens for tokens, _ in meter.batches[batches:]] == [1, 1]
    take(llm, TWO)
    assert not meter.restores
    take(llm, [*ONE, 5])
    ((loaded, seconds),) = meter.restores
    assert 0 < loaded <= len(ONE)
    assert 0 < seconds <= llm.last_request.restore_seconds


def test_each_large_batch_of_a_prompt_is_measured_by_itself(open_model):
    llm = open_model(n_batch=64)
    measure_with(llm.runner, meter := Noting(64))
    take(llm, ONE)
    large = [b - a for a, b in itertools.pairwise([0, *range(64, len(ONE), 64), len(ONE)]) if b - a >= 64]
    assert 1 <= len(meter.large()) <= len(large)
    assert sum(meter.large()) <= llm.last_request.prefill_seconds


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_the_naive_twin_runs_under_the_runner(open_model, arch):
    """The runner asks for nothing that is not of the abstract cache, and both give it the same."""
    ours, twin = open_model(arch), open_model(arch)
    twin.runner.cache = twin.runner.checkpoints.cache = NaivePromptCache()
    for prompt in (ONE, [*ONE, 3], TWO, [*ONE[:60], *TWO], ONE):
        assert take(twin, prompt, 4) == take(ours, prompt, 4)
        assert twin.last_request.cached == ours.last_request.cached
    assert twin.runner.cache.stats().hits >= 2


class Knowing(Noting):
    """Says nothing, and after the first large batch everything: cuts cost next to nothing."""

    def costs(self):
        known = Costs(1e-3, 1e-3, 1e-6) if self.large() else Costs()
        return replace(known, batch_tokens=64)


def test_what_the_first_batches_measure_decides_the_cuts_near_the_end(open_model):
    """Planned before anything is known, cut as by somebody who knew: later than the batch that told."""
    llm = open_model(n_batch=64, n_ctx=1024)
    measure_with(llm.runner, meter := Knowing(64))
    prompt = (ONE * 8)[:600]
    take(llm, prompt)
    plan, schedule = llm.requests.last.plan, llm.requests.last.schedule
    assert schedule.cuts != plan.cuts
    knew = prefill_cuts(plan.outline, meter.costs())
    assert [c for c in schedule.cuts if c > 160] == [c for c in knew if c > 160]
    assert len(knew) > len(plan.cuts)
    cache, live = llm.runner.cache, llm.runner.live
    stored = {
        e.position for e in cache.ram.tree.match(live.fingerprint.hex(), np.array(prompt, np.int32)).entries()
    }
    assert set(schedule.cuts) <= stored


def test_only_the_prompt_counts_as_prefill(open_model):
    llm = open_model()
    stream = llm.generate(ONE, temp=0.0)
    next(stream)
    took = llm.last_request.prefill_seconds
    assert took > 0
    stream.send([7])
    stream.close()
    assert llm.last_request.prefill_seconds == took


def test_a_difference_is_spelt_only_where_the_reason_speaks_of_one(open_model):
    llm = open_model()
    take(llm, ONE)
    take(llm, TWO)
    assert llm.last_request.reason == "nothing in common with anything known"


def test_a_sequence_that_is_extended_past_a_known_fork_is_said_to_be_extended(open_model):
    llm = open_model("llama")
    take(llm, ONE)
    take(llm, ONE[:50])
    take(llm, [*ONE[:55], 3])
    assert llm.last_request.matched == 55
    assert llm.last_request.reason == "live sequence extended by 6 tokens"


@pytest.mark.parametrize("room", [True, False])
def test_what_finds_no_cells_is_not_taken_for_damaged(tiny_model, monkeypatch, room):
    """Others may hold those that a load counted on: it is tried again once there is room."""
    options = {"n_ctx": 512, "n_threads": 1, "verbose": False, "n_batch": 32}
    with closing(Llama(str(tiny_model("qwen35")), n_parallel=2, **options)) as llm:
        take(llm, ONE, 3)
        for slot in llm.slots.all:
            slot.evaluation.runner.save_tip()
            slot.evaluation.runner.live.empty()
        apply, free, faults = runner_module.apply_plan, Cells.free, ["the library refused stored attention"]
        full, waited, dropped = [], [], []

        def refused_once(*args):
            if not faults:
                return apply(*args)
            full.extend(() if room else (1,))
            return faults.pop()

        monkeypatch.setattr(runner_module, "apply_plan", refused_once)
        monkeypatch.setattr(Cells, "free", lambda self, without=None: 5 if full else free(self, without))
        monkeypatch.setattr(Cells, "wait", lambda self, live, needed: (waited.append(needed()), full.clear()))
        monkeypatch.setattr(llm.prompt_cache, "drop", dropped.append)
        take(llm, [*ONE, 3])
        cached = llm.last_request.cached
        assert cached == len(ONE)
        assert waited == [len(ONE) + 2, cached], "for the prompt, and for what did not fit"
        assert bool(dropped) == room
