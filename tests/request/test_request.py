"""What is known of one request, and told of it."""

import time

import numpy as np
import pytest

from llamahybrid.errors import RequestCancelled
from llamahybrid.prompt_cache import Checkpoint, Costs, Plan
from llamahybrid.prompt_cache.base import Reason, Segment
from llamahybrid.request.request import Request
from llamahybrid.request.schedule import Schedule
from tests.conftest import take

PROMPT = [(7 * i + 1) % 200 for i in range(80)]


@pytest.fixture
def request_():
    """One that found four of its nine tokens in RAM."""
    row, data = np.zeros(3, np.float32), np.zeros(8, np.uint8)
    checkpoint = Checkpoint("m", 4, data, row)
    plan = Plan(9, 5, 4, "ram", checkpoint, row, segments=(Segment(0, 4, data),), reason=Reason("known"))
    return Request(plan, Schedule(plan, Costs(), Costs), started=time.perf_counter())


def test_a_report_does_not_keep_bytes_of_the_cache(request_):
    before = request_.report()
    request_.drop_records()
    plan = request_.plan
    assert (plan.checkpoint, plan.logits, plan.segments) == (None, None, ())
    assert request_.report() == before


def test_the_first_token_is_timed_and_no_other(request_):
    request_.hand_out(7)
    first = request_.first_token_seconds
    assert first > 0
    request_.hand_out(8)
    assert (request_.first_token_seconds, request_.generated, request_.last) == (first, 2, 8)


# -- in a model ------------------------------------------------------------------------------------


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


def test_a_prompt_that_was_cancelled_tells_what_was_decoded_of_it(open_model, monkeypatch):
    llm = open_model(n_batch=16)
    decode, batches = llm.runner.live.decode, iter(range(100))

    def hooked(tokens, outputs):
        if next(batches) == 2:
            llm.cancel()
        decode(tokens, outputs)

    monkeypatch.setattr(llm.runner.live, "decode", hooked)
    with pytest.raises(RequestCancelled):
        take(llm, PROMPT)
    report = llm.last_request
    assert report.decoded == llm.runner.live.n > 0
    assert (report.left, report.unreached) == (80, 80 - report.decoded)
    assert report.prefill_seconds > 0
    monkeypatch.undo()
    take(llm, PROMPT)
    assert (llm.last_request.decoded, llm.last_request.unreached) == (llm.last_request.left, 0)
