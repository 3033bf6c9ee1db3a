"""Reports of requests: last_request, reasons in words, usage, and the progress of a long prompt."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llamahybrid.core import assembly
from llamahybrid.core.report import PromptProgress, sentence
from llamahybrid.devices.offload import Offload
from llamahybrid.errors import LlamaHybridError
from llamahybrid.prompt_cache import Plan
from llamahybrid.prompt_cache.base import Reason
from tests.request.asking import WORDS, begin, take

PROMPT = WORDS[:80]
Opened = Callable[..., Any]
KNOWN = Plan(2470, 1170, 1000, "ram", None, None, reason=Reason("known"))
WHOLE = replace(KNOWN, total=1170)
PARTED = "history differs at token 1,170 of 2,470"


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (Plan(9, 0, 0, "none", None, None), ""),
        (replace(KNOWN, reason=Reason("unknown")), "nothing in common with anything known"),
        (replace(KNOWN, reason=Reason("extended")), "live sequence extended by 1470 tokens"),
        (replace(KNOWN, reason=Reason("repeated")), "exact prompt repeated: sampling from the live logits"),
        (
            replace(KNOWN, reason=Reason("repeated", stored_logits=True)),
            "exact prompt repeated: sampling from stored logits",
        ),
        (KNOWN, f"{PARTED}; restored at 1,000 from RAM, 170 known tokens lost"),
        (replace(KNOWN, source="disk"), f"{PARTED}; restored at 1,000 from disk, 170 known tokens lost"),
        (
            replace(KNOWN, source="remote"),
            f"{PARTED}; restored at 1,000 from the remote store, 170 known tokens lost",
        ),
        (replace(KNOWN, source="live"), f"{PARTED}; live sequence cut to 1,000, 170 known tokens lost"),
        (
            replace(KNOWN, source="none", cached=0),
            f"{PARTED}; no restore point before it, 1,170 known tokens lost",
        ),
        (WHOLE, "whole prompt known; restored at 1,000 from RAM, 170 known tokens lost"),
    ],
)
def test_reason_in_words(plan: Plan, told: str) -> None:
    assert sentence(plan) == told


def test_token_of_others_is_spelt_only_on_demand() -> None:
    plan = replace(KNOWN, matched=1000, differs=(7, 8))
    head, tail = "history differs at token 1,000 of 2,470", "; restored at 1,000 from RAM"
    assert sentence(plan, "<{}>".format) == f"{head}, '<7>'{tail}"
    assert sentence(plan, "<{}>".format, explain=True) == f"{head}: '<7>' was '<8>'{tail}"
    assert sentence(plan, None, explain=True) == f"{head}{tail}"
    for other in (WHOLE, replace(KNOWN, reason=Reason("extended"))):
        spelt = sentence(replace(other, differs=(7, 8)), "<{}>".format, explain=True)
        assert spelt == sentence(other)


# -- in a model ------------------------------------------------------------------------------------


def test_report_counts_tokens_and_names_the_source(opened: Opened) -> None:
    llm = opened()
    assert llm.last_request is None
    take(llm, PROMPT)
    report = llm.last_request
    assert (report.total, report.cached, report.left, report.source) == (80, 0, 80, "none")
    take(llm, [*PROMPT, 9])
    report = llm.last_request
    assert (report.total, report.matched, report.cached, report.left) == (81, 80, 80, 1)
    assert report.source == "ram"
    assert report.generated == 8
    assert 0 < report.prefill_seconds <= report.first_token_seconds < report.last_token_seconds
    assert report.restore_seconds > 0


def test_report_of_an_open_stream_grows(opened: Opened) -> None:
    llm = opened()
    stream, _ = begin(llm, PROMPT)
    first = llm.last_request
    next(stream)
    second = llm.last_request
    assert (first.generated, second.generated) == (1, 2)
    assert second.first_token_seconds == first.first_token_seconds
    assert second.prefill_seconds == first.prefill_seconds
    stream.send([7])
    stream.close()
    assert llm.last_request.prefill_seconds == first.prefill_seconds


def test_sequence_extended_past_a_known_fork_is_said_to_be_extended(opened: Opened) -> None:
    llm = opened("llama")
    for prompt in (PROMPT, PROMPT[:50], [*PROMPT[:55], 3]):
        take(llm, prompt, 1)
    assert llm.last_request.matched == 55
    assert llm.last_request.reason == "live sequence extended by 6 tokens"


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_names_the_tokens_that_were_not_decoded(opened: Opened, n_parallel: int, stream: bool) -> None:
    """Cached tokens, not those that are known: a recurrent state is restored before where prompts part."""
    llm = opened(n_parallel=n_parallel)
    take(llm, WORDS[:200], 1)
    told = []
    for prompt in ([*WORDS[:190], 5, 6, 7], PROMPT[::-1], PROMPT[::-1]):
        made = llm.create_completion(prompt, max_tokens=2, temperature=0.0, stream=stream)
        usages = [chunk["usage"] for chunk in made if "usage" in chunk] if stream else [made["usage"]]
        told += [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert all(cached == llm.last_request.cached for cached in told[-1:])
    if not stream:
        assert told[0] < 190 <= 200
        assert told[1:] == [0, 80]


# -- progress --------------------------------------------------------------------------------------

LONG = WORDS[:400]
LONGER = [*LONG, *LONG[100::-1][:100]]


def numbers(told: list[PromptProgress]) -> list[int]:
    """The processed tokens of each report; cached and total are those of the prompt."""
    assert len({(progress.total, progress.cached) for progress in told}) == 1
    assert [each.seconds for each in told] == sorted(each.seconds for each in told)
    return [progress.processed for progress in told]


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
@pytest.mark.parametrize("n_parallel", [1, 3])
def test_a_prompt_is_told_of_at_its_restore_point_and_after_each_batch(
    opened: Opened, arch: str, n_parallel: int
) -> None:
    llm, told = opened(arch, n_parallel=n_parallel), list[PromptProgress]()
    llm.on_progress = told.append
    llm.create_completion(LONG, max_tokens=2)
    far = numbers(told)
    assert (far[0], far[-1], told[0].total, told[0].cached) == (0, 400, 400, 0)
    assert far == sorted(set(far))
    assert max(b - a for a, b in itertools.pairwise(far)) <= 64, "a batch"
    told.clear()
    llm.create_completion(LONGER, max_tokens=2)
    far = numbers(told)
    assert far[0] == told[0].cached == llm.last_request.cached > 300
    assert far[-1] == told[0].total == 500


@pytest.mark.parametrize("gpu", [False, True])
def test_a_prompt_with_a_long_ubatch_is_decoded_in_parts_on_a_cpu(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """A batch can be stopped between two nodes of its graph, which take long then."""
    monkeypatch.setattr(assembly, "MOST_ON_CPU", 32)
    monkeypatch.setattr(Offload, "computes", lambda *_: gpu)
    llm, told = opened("llama"), list[PromptProgress]()
    llm.on_progress = told.append
    llm.create_completion(LONG, max_tokens=2)
    assert max(b - a for a, b in itertools.pairwise(numbers(told))) == (64 if gpu else 32)


def test_a_handle_has_its_own_and_its_answers_are_told_of_once(opened: Opened) -> None:
    llm, others, own = opened(n_parallel=3), list[PromptProgress](), list[PromptProgress]()
    llm.on_progress = others.append
    with llm.request(on_progress=own.append):
        stream = llm.create_completion(LONG, max_tokens=2, n=3, stream=True)
    for _ in stream:
        pass
    assert numbers(own)[-1] == 400
    assert not others


def test_error_of_on_progress_ends_the_request_and_keeps_its_progress(opened: Opened) -> None:
    llm = opened()

    def stop(progress: PromptProgress) -> None:
        if progress.processed >= 200:
            raise OSError("enough")

    with pytest.raises(OSError, match="enough"), llm.request(on_progress=stop):
        llm.create_completion(LONG, max_tokens=2)
    llm.create_completion(LONG, max_tokens=2)
    assert 0 < llm.last_request.cached <= 264


def test_on_progress_may_cancel_and_not_ask(opened: Opened) -> None:
    llm = opened()
    llm.on_progress = lambda progress: llm.cancel() if progress.processed else None
    made = llm.create_completion(LONG, max_tokens=2)
    assert made["choices"][0]["finish_reason"] == "cancelled"
    llm.on_progress = lambda _: llm.create_completion([1, 2], max_tokens=1)
    with pytest.raises(LlamaHybridError, match="on_progress"):
        llm.create_completion(LONGER, max_tokens=2)
