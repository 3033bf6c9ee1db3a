"""Jobs: requests of the server in threads of their own, whose items the event loop gets together."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

from llamahybrid.server.job import End, Job, Outbox

ANSWER = {"choices": [{"text": "yes"}]}
DEADLINE = 60


def test_an_error_after_one_answer_keeps_back_no_answer() -> None:
    errors: list[Any] = []

    def over(job: Job, last: End) -> None:
        raise KeyError("mine")

    async def answers() -> list[Any]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        outbox, handle = Outbox(loop), Mock(reports=(), reasons=())
        with ThreadPoolExecutor(1) as threads:
            jobs = [Job(lambda **_: ANSWER, False, lambda: nullcontext(handle), over, outbox) for _ in "ab"]
            for job in jobs:
                job.start(threads)
            return await asyncio.wait_for(asyncio.gather(*(job.whole() for job in jobs)), DEADLINE)

    assert asyncio.run(answers()) == [ANSWER, ANSWER]
    assert [type(error) for error in errors] == [KeyError, KeyError]
