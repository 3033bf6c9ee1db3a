"""Requests of different salts: what one tenant asked shows in nothing that another is told, or waits for."""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama, ModelDraft, PromptCache
from llamahybrid.errors import LlamaHybridError, RequestSuperseded, SnapshotError
from llamahybrid.evaluate.counters import DecodeCounter
from llamahybrid.prompt_cache.base import Segment
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, header_of
from llamahybrid.request import runner as runner_module
from llamahybrid.request.runner import RequestRunner
from llamahybrid.request.salt import SALT_BYTES, SHARED, digest
from llamahybrid.request.ticket import Ticket
from llamahybrid.speculation.draft_length import Chance
from tests.lab.draft_fuzz import EveryDraft
from tests.lab.integrity import check_integrity
from tests.request.test_slots import as_if_native

ARCHS = ("qwen35", "mamba", "gemma3", "llama")
A, B = "tenant-a, whose salt is long", "tenant-b"
SECRET = [(7 * i + 3) % 150 for i in range(120)]
OTHER = [(11 * i + 5) % 200 for i in range(50)]
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "verbose": False, "n_batch": 64, "swa_full": False}
UNKNOWN = (0, 0, "none", "nothing in common with anything known")


@pytest.fixture
def opened(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(arch: str = "qwen35", kind: Any = Llama, **more: Any) -> Any:
        window = {"window": 16} if arch == "gemma3" else {}
        made.append(kind(str(tiny_model(arch, **window)), **{**OPTIONS, **more}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def take(llm: Any, prompt: Sequence[int], n: int = 8, **options: Any) -> list[int]:
    return list(itertools.islice(llm.generate(list(prompt), temp=0.0, **options), n))


def ask(llm: Any, salt: str | None, prompt: Sequence[int], n: int = 8) -> list[int]:
    """The answer to a request of one salt, made in a thread of its own."""

    def work() -> list[int]:
        with llm.request(salt):
            return take(llm, prompt, n)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def told(llm: Any) -> tuple[int, int, str, str]:
    """What a request is told of how its prompt began: that of the last one of all."""
    report = llm.requests.report(llm.requests._last)
    return report.matched, report.cached, report.source, report.reason


def stock(opened: Callable[..., Any], arch: str, prompt: Sequence[int], n: int = 8) -> list[int]:
    return take(opened(arch, llama_cpp.Llama), prompt, n)


# -- the digest --------------------------------------------------------------------------------------


def test_a_digest_has_one_length_and_none_is_the_shared_default() -> None:
    found = [digest(salt) for salt in ("a", "b", "a" * 10_000, "\ud800", "ä")]
    assert {len(one) for one in found} == {SALT_BYTES}
    assert len(set(found)) == len(found)
    assert digest("") == SHARED == b""


@pytest.mark.parametrize("salt", [b"bytes", 7, ["a"]])
def test_a_salt_is_a_text(salt: Any) -> None:
    with pytest.raises(TypeError, match="cache_salt"):
        digest(salt)


def test_a_models_salt_is_a_text_or_not_given(opened: Callable[..., Any]) -> None:
    """`request` takes None, too."""
    llm = opened(cache_salt=None)
    assert llm.cache_salt == ""
    llm.cache_salt = "mine"
    llm.cache_salt = None
    assert llm.cache_salt == ""
    for wrong in (5, b"bytes"):
        with pytest.raises(TypeError, match="cache_salt"):
            opened(cache_salt=wrong)
        with pytest.raises(TypeError, match="cache_salt"):
            llm.cache_salt = wrong


# -- across salts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_parallel", [1, 3])
@pytest.mark.parametrize("arch", ARCHS)
def test_who_asks_what_another_one_asked_is_told_what_the_first_was(
    opened: Callable[..., Any], arch: str, n_parallel: int
) -> None:
    """Not by tokens, reasons, or work; and each finds its own again."""
    llm = opened(arch, n_parallel=n_parallel)
    counter, longer = DecodeCounter(llm), [*SECRET, 5, 6, 7]
    expected = stock(opened, arch, SECRET), stock(opened, arch, longer)
    work = []
    for salt in (A, B, None):
        assert ask(llm, salt, SECRET) == expected[0]
        assert told(llm) == UNKNOWN
        work.append(counter.take())
    assert work == [work[0]] * 3, "the second one decodes what the first did"
    for salt in (A, B, None):
        assert ask(llm, salt, longer) == expected[1]
        assert told(llm)[1] >= len(SECRET) - 1, "of its own salt everything is known"
    assert ask(llm, "tenant-c", [*SECRET[:60], 9, 9]) == stock(opened, arch, [*SECRET[:60], 9, 9])
    assert told(llm) == UNKNOWN
    check_integrity(llm.prompt_cache)


@pytest.mark.parametrize("arch", ARCHS)
def test_turns_of_two_tenants_decode_what_they_do_alone(opened: Callable[..., Any], arch: str) -> None:
    """The same chat under two salts, turn by turn."""
    llm, fresh = opened(arch), opened(arch, llama_cpp.Llama)
    counter, chat = DecodeCounter(llm), list(SECRET)
    for _ in range(3):
        answer, work = take(fresh, chat), []
        for salt in (A, B):
            assert ask(llm, salt, chat) == answer
            work.append((told(llm)[0], counter.take()))
        assert work[0] == work[1]
        chat += [*answer, *OTHER[:20]]


def test_without_a_salt_nothing_is_named_otherwise(opened: Callable[..., Any]) -> None:
    llm = opened(n_parallel=2)
    take(llm, SECRET)
    assert ask(llm, "", [*SECRET, 5])
    assert told(llm)[1] >= len(SECRET), "the empty salt is the shared default"
    computation = llm.runner.live.identity.computation
    assert {s.evaluation.runner.live.fingerprint for s in llm.slots.all} == {computation.fingerprint}
    assert set(llm.prompt_cache.ram.tree.namespaces()) <= {
        f"{computation.fingerprint.hex()}{'?' if computation.nameless else ''}"
    }


def test_the_models_own_salt_stands_beside_it(opened: Callable[..., Any]) -> None:
    llm = opened()
    ask(llm, A, SECRET)
    llm.cache_salt = "steered"
    ask(llm, A, SECRET)
    assert told(llm)[1] == 0
    llm.cache_salt = ""
    ask(llm, A, [*SECRET, 5])
    assert told(llm)[1] >= len(SECRET) - 1


# -- slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_a_stream_that_is_live_is_neither_shared_nor_disturbed(
    opened: Callable[..., Any], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, shared = opened(arch, n_parallel=3), []
    monkeypatch.setattr(RequestRunner, "share", lambda self: shared.append(self))
    expected = stock(opened, arch, SECRET, 24)
    with llm.request(A):
        stream = llm.generate(SECRET, temp=0.0)
    answer = list(itertools.islice(stream, 5))
    assert ask(llm, B, SECRET, 24) == expected
    assert told(llm) == UNKNOWN
    assert not shared
    assert answer + list(itertools.islice(stream, 19)) == expected
    stream.close()
    assert ask(llm, A, SECRET, 2) == expected[:2]
    assert told(llm)[1] > 0


def test_attention_is_not_stored_for_who_shares_none_of_it(opened: Callable[..., Any]) -> None:
    """A prompt's end is paged out at once for those of its salt that wait behind it and begin alike."""
    llm = opened(n_parallel=3)
    batcher, gate = llm.slots.batcher, llm._gate
    mine, other = Ticket(), Ticket()
    mine.salt, other.salt = digest(A), digest(B)
    gate.seats.current = mine
    prompt = np.arange(40, dtype=np.int32)
    batcher._prompts |= {mine: prompt, other: np.append(prompt[:20], 0)}
    assert not batcher.prompts_wait(prompt)
    other.salt = digest(A)
    assert batcher.prompts_wait(prompt)
    batcher._prompts[other] = prompt[1:]
    assert not batcher.prompts_wait(prompt)
    mine.leads = True
    assert batcher.prompts_wait(prompt)
    batcher._prompts.clear()
    gate.seats.current = None


def test_another_tenants_slot_is_left_alone_where_there_is_a_free_one(opened: Callable[..., Any]) -> None:
    llm = opened("llama", n_parallel=3, flash_attn=True)  # else it gives its cells away
    ask(llm, A, SECRET)
    for _ in range(4):
        ask(llm, B, OTHER)
    ask(llm, A, [*SECRET, 5])
    assert told(llm)[2] == "live"


def test_a_slot_is_not_chosen_for_what_another_tenant_left_there(opened: Callable[..., Any]) -> None:
    llm = opened("llama", n_parallel=3, flash_attn=True)  # else it gives its cells away
    for prompt in (OTHER, [9, *OTHER]):
        ask(llm, B, prompt)
    ask(llm, A, SECRET)
    ask(llm, B, SECRET)  # where nobody was for longest
    ask(llm, A, [*SECRET, 5])
    assert told(llm)[2] == "live"


def test_a_slot_that_was_of_another_salt_is_emptied_and_its_state_kept(opened: Callable[..., Any]) -> None:
    llm = opened()
    with llm.request(A):
        llm.eval(SECRET)
    ask(llm, B, OTHER)
    live = llm.runner.live
    assert live.identity.salt == digest(B)
    assert live.tokens[: len(OTHER)].tolist() == OTHER
    ask(llm, A, [*SECRET, 5])
    assert told(llm)[1:3] == (len(SECRET), "ram")


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_a_stream_goes_on_after_another_salt_had_its_place(
    opened: Callable[..., Any], n_parallel: int
) -> None:
    llm = opened(n_parallel=n_parallel)
    llm._gate.patience = 0.0
    with llm.request(A):
        stream = llm.generate(SECRET, temp=0.0)
    answer = list(itertools.islice(stream, 4))
    for salt in (B, "c", None):
        assert ask(llm, salt, SECRET) == stock(opened, "qwen35", SECRET)
        assert told(llm) == UNKNOWN
    with llm.request(B):  # where it is advanced does not matter
        answer += list(itertools.islice(stream, 10))
    assert answer == stock(opened, "qwen35", SECRET, 14)
    stream.close()
    for salt in (None, "c", B):
        ask(llm, salt, [*SECRET, *answer, 3])
        assert told(llm)[0] <= len(SECRET) + 8, "what A's stream said later is A's"


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_stream_that_is_given_up_leaves_its_state_to_its_own(opened: Callable[..., Any], how: str) -> None:
    llm = opened()
    with llm.request(A):
        stream = llm.generate(SECRET, temp=0.0)
    list(itertools.islice(stream, 70))
    if how == "closed":
        stream.close()
    del stream
    ask(llm, B, [*SECRET, 5])
    assert told(llm) == UNKNOWN
    ask(llm, A, [*SECRET, 5])
    assert told(llm)[1] > 0


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_answers_of_one_prompt_share_it_and_nobody_else_does(
    opened: Callable[..., Any], n_parallel: int
) -> None:
    llm = opened(n_parallel=n_parallel)
    asked = {"max_tokens": 6, "temperature": 0.8, "seed": 40, "n": 3}
    counter, found = DecodeCounter(llm), []
    for salt in (A, B):
        made = llm.create_completion(SECRET, cache_salt=salt, **asked)
        assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        found.append(([c["text"] for c in made["choices"]], counter.take()))
    assert found[0] == found[1]
    assert found[0][1] < 2 * len(SECRET)


# -- by hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_what_was_evaluated_under_one_salt_is_not_there_under_another(
    opened: Callable[..., Any], n_parallel: int
) -> None:
    llm = opened(n_parallel=n_parallel)
    with llm.request(A):
        llm.eval(SECRET)
    with llm.request(B), pytest.raises(AssertionError):  # upstream's, where nothing was evaluated
        llm.sample(temp=0.0)
    with llm.request(A):
        llm.eval(SECRET)
        llm.sample(temp=0.0)
    with llm.request(B):
        llm.eval(OTHER)
        assert llm.n_tokens == len(OTHER)
        assert llm.sample(temp=0.0) == stock(opened, "qwen35", OTHER, 1)[0]
    with llm.request(A):
        llm.eval(SECRET)
    with llm.request(B):
        stream = llm.generate(OTHER, temp=0.0, reset=False)
        assert list(itertools.islice(stream, 4)) == stock(opened, "qwen35", OTHER, 4)
        stream.close()


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("salts", [(A, B), (A, None), (None, A)])
def test_upstreams_own_loop_is_shown_no_tokens_of_another_salt(
    opened: Callable[..., Any], salts: tuple[str | None, str | None], n_parallel: int
) -> None:
    """It leaves out of its prompt what it believes to be there."""
    llm, prompt = opened(n_parallel=n_parallel), [*SECRET, *OTHER]
    for salt, tokens in zip(salts, (prompt, SECRET), strict=True):
        with llm.request(salt):
            assert llm.n_tokens == 0
            loop = llama_cpp.Llama.generate(llm, tokens, temp=0.0)
            said = list(itertools.islice(loop, 4))
            assert llm._input_ids.tolist() == [*tokens, *said[:3]]
            assert said == stock(opened, "qwen35", tokens, 4)


def test_a_stream_of_several_answers_draws_its_seed_under_its_salt(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened()
    drawn: list[bytes] = []
    draw = llm.requests.next_seed
    monkeypatch.setattr(llm.requests, "next_seed", lambda: (drawn.append(llm.requests.salt()), draw())[1])
    list(llm.create_completion(OTHER, max_tokens=1, n=2, stream=True, cache_salt=A))
    assert drawn
    assert set(drawn) == {digest(A)}


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_a_saved_state_is_of_its_salt(opened: Callable[..., Any], n_parallel: int) -> None:
    llm = opened(n_parallel=n_parallel)
    with llm.request(A):
        llm.eval(SECRET)
        state = llm.save_state()
    with llm.request(B):
        assert llm.save_state().n_tokens == 0
    for one in (state, pickle.loads(pickle.dumps(state))):
        for salt in (B, None):
            with llm.request(salt), pytest.raises(SnapshotError, match="another"):
                llm.load_state(one)
        with llm.request(A):
            llm.load_state(one)
            assert llm.sample(temp=0.0) == stock(opened, "qwen35", SECRET, 1)[0]


def test_what_is_dropped_as_damaged_is_of_the_salt_that_met_it(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, restore = opened(), runner_module.apply_plan
    dropped: list[Segment] = []

    def damaged(live: Any, plan: Any, tokens: Any) -> str | None:
        if plan.segments:
            error = SnapshotError("damaged")
            error.segment = plan.segments[0]
            raise error
        return restore(live, plan, tokens)

    monkeypatch.setattr(runner_module, "apply_plan", damaged)
    monkeypatch.setattr(llm.prompt_cache, "drop_segment", lambda segment: dropped.append(segment))
    with llm.request(A):
        for prompt in (SECRET, OTHER, SECRET):
            take(llm, prompt)
        names = {header_of(segment.record[:HEADER_BYTES].tobytes()).namespace for segment in dropped}
        assert names == {llm.runner.live.view().namespace}


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_what_a_draft_model_reads_is_of_the_salt_that_it_drafts_for(
    opened: Callable[..., Any], n_parallel: int
) -> None:
    draft = ModelDraft(opened(n_parallel=n_parallel))
    counter = DecodeCounter(draft.llm)
    work = []
    for salt in (digest(A), digest(B), SHARED):
        draft.salt = salt
        draft(np.array(SECRET, dtype=np.intc))
        assert draft.llm.runner.live.identity.serves(salt)
        work.append(counter.take())
    assert work == [work[0]] * 3


def test_what_a_users_cache_is_given_late_is_of_its_own_salt(opened: Callable[..., Any]) -> None:
    """Its answer is over, another salt's request came before its last chunk was taken."""
    llm = opened()
    llm.set_cache(llama_cpp.LlamaRAMCache())
    stream = llm.create_completion(SECRET, max_tokens=3, temperature=0.0, stream=True)
    while next(stream)["choices"][0]["finish_reason"] is None:
        pass
    assert llm.evaluation.active is None
    with llm.request(B):
        take(llm, OTHER)
    assert list(stream) == []
    assert llm.user_cache.cache_size
    assert llm.runner.live.identity.serves(SHARED)
    assert ask(llm, B, SECRET) == stock(opened, "qwen35", SECRET)
    assert told(llm) == UNKNOWN


def test_the_whole_context_is_not_that_of_another_salt(opened: Callable[..., Any]) -> None:
    """What this thread left in a second slot is not gathered for who has another salt."""
    llm = opened(n_parallel=2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(llm.eval, OTHER).result(60)
    with llm.request(A):
        llm.eval(SECRET)
    assert llm.slots.here() is llm.slots.all[1]
    with llm.request(B):
        assert llm.save_state().n_tokens == 0


@pytest.mark.parametrize("deed", ["sample", "eval"])
def test_who_goes_on_by_hand_in_a_slot_of_another_salt_does_not_go_on_from_it(
    opened: Callable[..., Any], deed: str
) -> None:
    """The same tokens are live in both slots, but another's."""
    llm = opened(n_parallel=2)
    with llm.request(B):
        llm.eval(SECRET)
    with llm.request(A):
        streams = [llm.generate(SECRET, temp=0.0) for _ in range(2)]
    for stream in streams:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(next, stream).result(60)
    for stream in streams:
        stream.close()
    assert {slot.evaluation.runner.live.identity.salt for slot in llm.slots.all} == {digest(A)}
    with llm.request(B):
        if deed == "sample":
            assert llm.sample(temp=0.0) == stock(opened, "qwen35", SECRET, 1)[0]
        else:
            llm.eval([5])
            assert llm.slots.here().evaluation.runner.live.identity.salt == digest(B)
            assert llm.sample(temp=0.0) == stock(opened, "qwen35", [*SECRET, 5], 1)[0]
    assert llm.slots.here().evaluation.runner.live.identity.salt == digest(B)


def test_a_slot_of_another_salt_is_not_taken_over(opened: Callable[..., Any]) -> None:
    llm = opened(n_parallel=2)
    ask(llm, A, SECRET)
    other, last = sorted((slot.evaluation for slot in llm.slots.all), key=lambda e: e.runner.live.n)
    for evaluation in (other, last):
        evaluation.serve(digest(B))  # lent to a request of B's that has not begun
    other.claim()
    other.take_over(last)
    assert other.runner.live.n == last.runner.live.n == 0


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_an_image_is_answered_to_who_sent_it(opened: Callable[..., Any], n_parallel: int) -> None:
    llm = opened(n_parallel=n_parallel)
    with llm.request(A):
        llm.eval(OTHER)
        evaluation = llm.slots.here().evaluation
        as_if_native(llm)
        evaluation.handoff = True
    with llm.request(B):
        assert llm.slots.rests_on(digest(B)) is None
        assert llm.create_completion(OTHER, max_tokens=2)
        assert told(llm) == UNKNOWN
    with llm.request(A):
        llm.reset()
        llm.eval(OTHER)
        evaluation = llm.slots.here().evaluation
        as_if_native(llm)
        evaluation.handoff = True
        stream = llm.create_completion(OTHER, max_tokens=2, stream=True)
        ask(llm, B, OTHER)
        ask(llm, B, SECRET)
        if n_parallel == 1:
            with pytest.raises(RequestSuperseded):
                next(stream)


def test_a_cache_of_upstreams_is_not_asked(opened: Callable[..., Any]) -> None:
    llm, cache = opened(), llama_cpp.LlamaRAMCache()
    llm.set_cache(cache)
    asked = {"max_tokens": 2, "temperature": 0.0}
    llm.create_completion(SECRET, cache_salt=A, **asked)
    assert not cache.cache_state
    llm.create_completion(SECRET, **asked)
    assert cache.cache_state
    llm.create_completion([*SECRET, 4, 5], cache_salt=B, **asked)
    assert told(llm) == UNKNOWN


# -- disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_folder_serves_each_salt_its_own(opened: Callable[..., Any], tmp_path: Path, arch: str) -> None:
    first = opened(arch, prompt_cache=PromptCache(1 << 28, tmp_path))
    expected = ask(first, A, SECRET)
    ask(first, None, OTHER)
    assert first.prompt_cache.close()
    for salt in (B, None, A):
        later = opened(arch, prompt_cache=PromptCache(1 << 28, tmp_path))
        counter = DecodeCounter(later)
        assert ask(later, salt, SECRET) == expected
        if salt == A:
            assert told(later)[2] == "disk"
        else:
            assert told(later) == UNKNOWN
            assert counter.take() == len(SECRET) + len(expected) - 1
        later.prompt_cache.disk.writer.queue.cancel(lambda job: True, 1)


def test_a_folder_does_not_tell_a_salt(opened: Callable[..., Any], tmp_path: Path) -> None:
    llm = opened(prompt_cache=PromptCache(1 << 28, tmp_path))
    for salt in (A, None):
        ask(llm, salt, SECRET)
    llm.prompt_cache.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    for needle in (A.encode(), A.encode("utf-16-le"), A.encode().hex().encode(), digest(A)):
        assert not any(needle in path.read_bytes() or needle in str(path).encode() for path in files)
    store = RecordStore(tmp_path)
    spaces = {store.load(key).head.namespace for key in store.keys()}  # noqa: SIM118 (no mapping)
    plain, salted = sorted(spaces, key=len)
    assert (len(plain), len(salted)) == (32, 55)
    assert salted.startswith(f"{plain}+"), "whoever owns the folder sees which model a record is of"


# -- drafts ------------------------------------------------------------------------------------------


def test_a_draft_model_has_read_nothing_for_others(opened: Callable[..., Any]) -> None:
    second = opened("llama")
    draft = ModelDraft(second, 4)
    llm = opened("llama", draft_model=draft)
    llm.drafts.policy = EveryDraft(llm.runner.meter)
    counter, behind, work = DecodeCounter(second), [], []
    look = draft.behind
    draft.behind = lambda ids: behind.append(look(ids)) or behind[-1]  # type: ignore[method-assign]
    for salt in (A, B, B):
        behind.clear()
        llm.drafts.policy.chance = Chance()
        assert ask(llm, salt, SECRET, 12) == stock(opened, "llama", SECRET, 12)
        work.append((behind[0], counter.take(), llm.requests._last.drafts.accepted))
    assert work[0] == work[1], "B's draft model reads the whole prompt, as A's did"
    assert work[2][0] < work[0][0]
    assert work[2][1] < work[0][1], "of B's own it knows the prompt"


def test_a_draft_model_takes_back_its_own_state_only(opened: Callable[..., Any]) -> None:
    """What it saved for another salt, of the same tokens, would not open."""
    draft = ModelDraft(opened(), 3)
    for salt in (A, B):
        draft.salt = digest(salt)
        for text in (SECRET, [*SECRET, 9, 9]):
            draft.at_most = 3
            guess = draft(np.array(text, np.intc))
            if salt == B:
                assert guess.tolist() == stock(opened, "qwen35", text, 3)
        draft.salt = digest(salt)
        draft(np.array(SECRET, np.intc))


def test_how_anothers_guesses_went_is_not_known(opened: Callable[..., Any]) -> None:
    llm = opened(draft_model=llama_cpp.llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=4))
    ask(llm, A, SECRET, 3)
    chance = llm.drafts.policy.chance
    for _ in range(20):
        chance.saw(True)
    ask(llm, A, SECRET, 1)
    assert llm.drafts.policy.chance is chance
    ask(llm, B, OTHER, 1)
    assert llm.drafts.policy.chance.next == Chance().next


# -- what is said ------------------------------------------------------------------------------------


def test_usage_reports_and_logs_are_those_of_a_first_request(
    opened: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    llm, reports = opened(explain=True), []
    llm.on_request = reports.append
    asked = {"max_tokens": 4, "temperature": 0.0}
    llm.create_completion([*SECRET, 5], cache_salt=A, **asked)
    with llm.request(B) as handle:
        made = llm([*SECRET, 6], **asked)
        assert llm.last_request == handle.reports[0] == reports[-1]
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (reports[-1].matched, reports[-1].reason) == (0, UNKNOWN[3])
    again = llm.create_completion([*SECRET, 5], cache_salt=A, **asked)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > len(SECRET) - 2
    for name in (A, B, digest(A).hex()):
        assert name not in caplog.text
        assert name not in repr(vars(handle)) + "".join(map(repr, reports))


def test_a_thread_that_made_no_request_is_told_of_none_of_anothers(opened: Callable[..., Any]) -> None:
    llm = opened()
    ask(llm, A, SECRET)

    def look(salt: str | None) -> Any:
        found: list[Any] = []

        def work() -> None:
            with llm.request(salt):
                found.append(llm.last_request)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found[0]

    assert look(A).total == len(SECRET)
    assert look(B) is look(None) is None
    with llm.request(B):
        take(llm, OTHER, 1)
    assert llm.last_request.total == len(OTHER), "this thread's own"
    with llm.request(A):
        assert llm.last_request is None


def test_a_chat_has_a_salt_too(opened: Callable[..., Any]) -> None:
    llm = opened(n_ctx=2048)
    messages = [{"role": "user", "content": "the quick brown fox " * 8}]
    cached = []
    for salt in (A, B, A, None):
        made = llm.create_chat_completion(messages, max_tokens=2, temperature=0.0, cache_salt=salt)
        cached.append(made["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] + cached[3:] == [0, 0, 0]
    assert cached[2] > 10


def test_a_seed_is_nobody_elses(opened: Callable[..., Any]) -> None:
    llm = opened(seed=7)
    llm.create_completion(OTHER, max_tokens=2, seed=99, cache_salt=A)
    llm.create_completion(OTHER, max_tokens=2, cache_salt=A)
    llm.create_completion(OTHER, max_tokens=2, n=2, seed=3, cache_salt=A)
    assert llm.requests.seed == 7
    with llm.request(B):
        assert len({llm._seed for _ in range(4)}) == 4
    asked = {"max_tokens": 12, "temperature": 2.0}
    assert len({llm(OTHER, cache_salt=A, **asked)["choices"][0]["text"] for _ in range(4)}) > 1
    plain = opened(seed=7)
    assert llm(OTHER, **asked)["choices"] == plain(OTHER, **asked)["choices"]


def test_upstreams_own_reuse_is_refused(opened: Callable[..., Any]) -> None:
    llm = opened(prompt_cache=False)
    with pytest.raises(LlamaHybridError, match="prompt_cache=False"):
        llm.create_completion(OTHER, max_tokens=1, cache_salt=A)
    with llm.request(A), pytest.raises(LlamaHybridError, match="cache_salt"):
        llm.generate(OTHER)
    assert llm.create_completion(OTHER, max_tokens=1, cache_salt="")


def test_forget_reaches_every_salt(opened: Callable[..., Any]) -> None:
    llm = opened(n_parallel=2)
    for salt in (A, B):
        ask(llm, salt, SECRET)
    llm.prompt_cache.forget(np.array(SECRET))
    for salt in (A, B):
        ask(llm, salt, SECRET)
        assert told(llm) == UNKNOWN


def test_what_was_forgotten_goes_with_its_bytes(opened: Callable[..., Any]) -> None:
    llm = opened()
    ask(llm, A, SECRET)
    llm.prompt_cache.forget(SECRET)
    ask(llm, B, OTHER)
    state = llm.runner.live.state
    assert not state.ids[state.n :].any(), "its ids are not left behind"
    ask(llm, A, SECRET)
    assert told(llm) == UNKNOWN


def test_names_of_salts_that_are_gone_are_not_kept(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamahybrid.prompt_cache.ram_store.MOST_NAMES", 4)
    llm = opened()
    store = llm.prompt_cache.ram.store
    for number in range(12):
        ask(llm, str(number), OTHER, 1)
        llm.prompt_cache.forget(OTHER)
    known = store.tails, store.boundaries, store.tree.splitters
    assert max(map(len, known)) <= 6
