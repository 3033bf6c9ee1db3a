"""Requests of different salts: no report, answer or duration of one tenant shows another one's prompts."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp.llama_speculative import LlamaDraftModel

from llamahybrid import ModelDraft, PromptCache
from llamahybrid.client.salt import SALT_BYTES, SHARED, digest
from llamahybrid.errors import LlamaHybridError, SnapshotError
from llamahybrid.harness.counters import DecodeCounter
from tests.lab.disk_fuzz import stored
from tests.lab.draft_fuzz import EveryDraft
from tests.lab.integrity import check_integrity
from tests.request.asking import CUTS, in_thread, take

A, B = "tenant-a, whose salt is long", "tenant-b"
SECRET = [(7 * i + 3) % 150 for i in range(120)]
OTHER = [(11 * i + 5) % 200 for i in range(50)]
UNKNOWN = (0, 0, "none", "nothing in common with anything known")

Opened = Callable[..., Any]


def ask(llm: Any, salt: str | None, prompt: Sequence[int], n: int = 8) -> tuple[list[int], Any]:
    """The answer to a request of one salt, made in a thread of its own, and what is reported of it."""

    def work() -> tuple[list[int], Any]:
        with llm.request(salt) as handle:
            return take(llm, prompt, n), handle.reports[-1]

    return in_thread(work)  # type: ignore[no-any-return]


def told(report: Any) -> tuple[int, int, str, str]:
    """The start of a prompt."""
    return report.matched, report.cached, report.source, report.reason


# -- the digest --------------------------------------------------------------------------------------


def test_digest_has_one_length_and_none_is_the_shared_default() -> None:
    found = [digest(salt) for salt in ("a", "b", "a" * 10_000, "\ud800", "ä")]
    assert {len(one) for one in found} == {SALT_BYTES}
    assert len(set(found)) == len(found)
    assert digest("") == SHARED == b""


@pytest.mark.parametrize("salt", [b"bytes", 7, ["a"]])
def test_salt_is_a_text(opened: Opened, salt: Any) -> None:
    with pytest.raises(TypeError, match="cache_salt"):
        opened(cache_salt=salt)
    llm = opened(cache_salt=None)
    assert llm.cache_salt == ""
    with pytest.raises(TypeError, match="cache_salt"):
        llm.cache_salt = salt
    with pytest.raises(TypeError, match="cache_salt"):
        llm.create_completion(OTHER, cache_salt=salt)
    llm.cache_salt = "mine"
    llm.cache_salt = None
    assert llm.cache_salt == ""


# -- across salts ------------------------------------------------------------------------------------


@pytest.mark.patched
@pytest.mark.parametrize("n_parallel", [1, 3])
@pytest.mark.parametrize("arch", CUTS)
def test_prompt_of_another_salt_is_answered_as_the_first_time(
    opened: Opened, stock: Opened, arch: str, n_parallel: int
) -> None:
    """Not by tokens, reasons, or work; and each finds its own again."""
    llm, right = opened(arch, n_parallel=n_parallel), stock(arch)
    counter, longer, parted = DecodeCounter(llm), [*SECRET, 5, 6, 7], [*SECRET[:60], 9, 9]
    work = []
    for salt in (A, B, None):
        answer, report = ask(llm, salt, SECRET)
        assert (answer, told(report)) == (right(SECRET), UNKNOWN)
        work.append(counter.take())
    assert work == [work[0]] * 3, "the second one decodes what the first did"
    for salt in (A, B, None):
        answer, report = ask(llm, salt, longer)
        assert answer == right(longer)
        assert report.cached >= len(SECRET) - 1, "of its own salt everything is known"
    answer, report = ask(llm, "tenant-c", parted)
    assert (answer, told(report)) == (right(parted), UNKNOWN)
    check_integrity(llm.prompt_cache)


def test_empty_salt_is_the_shared_default(opened: Opened) -> None:
    llm = opened(n_parallel=2)
    take(llm, SECRET)
    for salt in ("", None):
        _, report = ask(llm, salt, [*SECRET, 5])
        assert report.cached >= len(SECRET)


def test_models_own_salt_stands_beside_it(opened: Opened) -> None:
    llm = opened()
    ask(llm, A, SECRET)
    llm.cache_salt = "steered"
    assert ask(llm, A, SECRET)[1].cached == 0
    llm.cache_salt = ""
    assert ask(llm, A, [*SECRET, 5])[1].cached >= len(SECRET) - 1


# -- slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_stream_goes_on_after_another_salt_had_its_place(
    opened: Opened, stock: Opened, impatient: None, n_parallel: int
) -> None:
    llm, right = opened(n_parallel=n_parallel), stock()
    with llm.request(A):
        stream = llm.generate(SECRET, temp=0.0)
    answer = list(itertools.islice(stream, 4))
    for salt in (B, "c", None):
        said, report = ask(llm, salt, SECRET)
        assert (said, told(report)) == (right(SECRET), UNKNOWN)
    with llm.request(B):  # where it is advanced does not matter
        answer += list(itertools.islice(stream, 10))
    assert answer == right(SECRET, 14)
    stream.close()
    for salt in (None, "c", B):
        _, report = ask(llm, salt, [*SECRET, *answer, 3])
        assert report.matched <= len(SECRET) + 8, "what A's stream said later is A's"


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_answers_of_one_prompt_share_it_within_their_salt(opened: Opened, n_parallel: int) -> None:
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
def test_tokens_evaluated_under_one_salt_are_gone_under_another(
    opened: Opened, stock: Opened, n_parallel: int
) -> None:
    llm, right = opened(n_parallel=n_parallel), stock()
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
        assert llm.sample(temp=0.0) == right(OTHER, 1)[0]
    with llm.request(A):
        llm.eval(SECRET)
    with llm.request(B):
        assert take(llm, OTHER, 4, reset=False) == right(OTHER, 4)
        assert llm.save_state().n_tokens <= len(OTHER) + 4


@pytest.mark.parametrize("deed", ["sample", "eval"])
def test_loop_does_not_go_on_in_a_slot_of_another_salt(opened: Opened, stock: Opened, deed: str) -> None:
    """The same tokens are live in both slots, but another's."""
    llm, right = opened(n_parallel=2), stock()
    with llm.request(B):
        llm.eval(SECRET)
    with llm.request(A):
        streams = [llm.generate(SECRET, temp=0.0) for _ in range(2)]
    for stream in streams:
        in_thread(next, stream)
    for stream in streams:
        stream.close()
    with llm.request(B):
        if deed == "eval":
            llm.eval([5])
        prompt = SECRET if deed == "sample" else [*SECRET, 5]
        assert llm.sample(temp=0.0) == right(prompt, 1)[0]


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("salts", [(A, B), (A, None), (None, A)])
def test_upstreams_own_loop_is_shown_no_tokens_of_another_salt(
    opened: Opened, stock: Opened, salts: tuple[str | None, str | None], n_parallel: int
) -> None:
    """The handler leaves out tokens of the prompt that it believes to be live."""
    llm, prompt = opened(n_parallel=n_parallel), [*SECRET, *OTHER]
    for salt, tokens in zip(salts, (prompt, SECRET), strict=True):
        with llm.request(salt):
            assert llm.n_tokens == 0
            loop = llama_cpp.Llama.generate(llm, tokens, temp=0.0)
            said = list(itertools.islice(loop, 4))
            assert llm.input_ids[: llm.n_tokens].tolist() == [*tokens, *said[:3]]
            assert said == stock()(tokens, 4)


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_saved_state_is_of_its_salt(opened: Opened, stock: Opened, n_parallel: int) -> None:
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
            assert llm.sample(temp=0.0) == stock()(SECRET, 1)[0]


def test_state_that_is_saved_from_another_slot_is_stored_for_nobody_else(opened: Opened) -> None:
    """A request for the whole context moves live tokens to the first slot, which was A's."""
    llm = opened(n_parallel=2)
    ask(llm, A, OTHER)
    with llm.request(B):
        llm.eval(SECRET)
        assert llm.save_state().n_tokens == len(SECRET)
    assert told(ask(llm, A, [*SECRET, 5])[1]) == UNKNOWN
    assert ask(llm, B, [*SECRET, 5])[1].cached >= len(SECRET) - 1


def test_cache_of_upstreams_is_given_nothing_of_a_salt(opened: Opened) -> None:
    llm, cache = opened(), llama_cpp.LlamaRAMCache()
    llm.set_cache(cache)
    asked = {"max_tokens": 2, "temperature": 0.0}
    llm.create_completion(SECRET, cache_salt=A, **asked)
    assert not cache.cache_state
    llm.create_completion(SECRET, **asked)
    assert cache.cache_state
    llm.create_completion([*SECRET, 4, 5], cache_salt=B, **asked)
    with llm.request(B):
        assert told(llm.last_request) == UNKNOWN


# -- disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_folder_serves_each_salt_its_own(opened: Opened, tmp_path: Path, arch: str) -> None:
    first = opened(arch, prompt_cache=PromptCache(1 << 28, tmp_path))
    expected, _ = ask(first, A, SECRET)
    ask(first, None, OTHER)
    assert first.prompt_cache.close()
    for salt in (B, None, A):
        later = opened(arch, prompt_cache=PromptCache(1 << 28, tmp_path))
        counter = DecodeCounter(later)
        said, report = ask(later, salt, SECRET)
        assert said == expected
        if salt == A:
            assert report.source == "disk"
        else:
            assert told(report) == UNKNOWN
            assert counter.take() == len(SECRET) + len(expected) - 1
        later.prompt_cache.disk.writer.clear()


def test_folder_does_not_tell_a_salt(opened: Opened, tmp_path: Path) -> None:
    llm = opened(prompt_cache=PromptCache(1 << 28, tmp_path))
    for salt in (A, None):
        ask(llm, salt, SECRET)
    llm.prompt_cache.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    for needle in (A.encode(), A.encode("utf-16-le"), A.encode().hex().encode(), digest(A)):
        assert not any(needle in path.read_bytes() or needle in str(path).encode() for path in files)
    store, _ = stored(tmp_path)
    plain, salted = sorted({each.namespace for each in store.each()}, key=len)
    assert salted.startswith(f"{plain}+"), "whoever owns the folder sees which model a record is of"


# -- drafts ------------------------------------------------------------------------------------------


def test_draft_model_has_read_nothing_for_others(opened: Opened, stock: Opened) -> None:
    second = opened("llama")
    llm = opened("llama", draft_model=ModelDraft(second, 4))
    llm.slots.all[0].drafts.policy = EveryDraft(llm.runner.meter)
    counter, work = DecodeCounter(second), []
    for salt in (A, B, B):
        said, report = ask(llm, salt, SECRET, 12)
        assert said == stock("llama")(SECRET, 12)
        work.append((counter.take(), report.accepted))
    assert work[0][0] <= work[1][0] + 12, "B's draft model reads the whole prompt, as A's did"
    assert work[1][0] >= len(SECRET)
    assert work[2][0] < len(SECRET), "of B's own it knows the prompt"


def test_gains_and_losses_of_drafts_are_not_carried_to_another_salt(opened: Opened) -> None:
    llm = opened("llama")
    paying: list[bool] = []

    class Silent(LlamaDraftModel):  # type: ignore[misc]
        def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: object) -> npt.NDArray[np.intc]:
            paying.append(llm.slots.all[0].drafts.policy.pays)
            return np.empty(0, np.intc)

    llm.draft_model = Silent()
    ask(llm, A, SECRET)
    llm.slots.all[0].drafts.policy.undone(1e6)  # seconds that no answer pays back
    llm.slots.all[0].drafts.policy.account(0)
    paying.clear()
    ask(llm, A, SECRET)
    assert True not in paying
    paying.clear()
    ask(llm, B, SECRET)
    assert paying[0]


# -- what is said ------------------------------------------------------------------------------------


def test_usage_reports_and_logs_are_those_of_a_first_request(
    opened: Opened, caplog: pytest.LogCaptureFixture
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
    assert told(reports[-1]) == UNKNOWN
    again = llm.create_completion([*SECRET, 5], cache_salt=A, **asked)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > len(SECRET) - 2
    for name in (A, B, digest(A).hex()):
        assert name not in caplog.text
        assert name not in repr(vars(handle)) + "".join(map(repr, reports))


def test_last_request_of_another_salt_is_not_told(opened: Opened) -> None:
    llm = opened()
    ask(llm, A, SECRET)

    def look(salt: str | None) -> Any:
        with llm.request(salt):
            return llm.last_request

    assert in_thread(look, A).total == len(SECRET)
    assert in_thread(look, B) is in_thread(look, None) is None
    with llm.request(B):
        take(llm, OTHER, 1)
    assert llm.last_request.total == len(OTHER), "this thread's own"
    with llm.request(A):
        assert llm.last_request is None


def test_seeds_of_a_salt_change_no_other_requests(opened: Opened) -> None:
    asked = {"max_tokens": 12, "temperature": 2.0}
    llm, plain = opened(), opened()
    llm.create_completion(OTHER, max_tokens=2, seed=99, cache_salt=A)
    llm.create_completion(OTHER, max_tokens=2, n=2, seed=3, cache_salt=A)
    assert len({llm(OTHER, cache_salt=A, **asked)["choices"][0]["text"] for _ in range(4)}) > 1
    assert llm(OTHER, **asked)["choices"] == plain(OTHER, **asked)["choices"]


def test_reuse_of_upstreams_is_refused(opened: Opened) -> None:
    llm = opened(prompt_cache=False)
    with pytest.raises(LlamaHybridError, match="prompt_cache=False"):
        llm.create_completion(OTHER, max_tokens=1, cache_salt=A)
    with llm.request(A), pytest.raises(LlamaHybridError, match="cache_salt"):
        llm.generate(OTHER)
    assert llm.create_completion(OTHER, max_tokens=1, cache_salt="")


def test_forget_reaches_every_salt(opened: Opened) -> None:
    llm = opened(n_parallel=2)
    for salt in (A, B):
        ask(llm, salt, SECRET)
    llm.prompt_cache.forget(np.array(SECRET))
    for salt in (A, B):
        assert told(ask(llm, salt, SECRET)[1]) == UNKNOWN


def test_salts_that_are_gone_take_no_memory(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamahybrid.prompt_cache.store.MOST_NAMES", 4)
    llm = opened()
    store = llm.prompt_cache
    for number in range(12):
        ask(llm, str(number), OTHER, 1)
        llm.prompt_cache.forget(OTHER)
    assert len(store.habits) <= 6
