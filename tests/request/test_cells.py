"""Who has cells, and whose go when they run out."""

import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.request.job import Job, NoRoom

WORDS = np.random.default_rng(1).integers(1, 200, 400).tolist()


@pytest.fixture
def opened(tiny_model):
    made = []

    def open_one(arch="qwen35", n_parallel=2, **more):
        options = {"n_ctx": 1024, "n_batch": 256, "n_threads": 1, "verbose": False, **more}
        made.append(Llama(str(tiny_model(arch)), n_parallel=n_parallel, **options))
        return made[-1]

    yield open_one
    for llm in made:
        llm.close()


def test_the_youngest_job_loses_its_cells(opened):
    llm = opened("llama", 3)
    batcher, slots = llm.slots.batcher, llm.slots.all
    streams = [llm.generate(WORDS[i : i + 100], temp=0.0) for i in (0, 100, 200)]
    for stream in streams:
        next(stream)
    tickets = [llm.slots.user(slot) for slot in slots]
    lives = [slot.evaluation.runner.live for slot in slots]
    jobs = [Job(t, live, 5) for t, live in zip(tickets, lives, strict=True)]
    batcher.cells.cells = sum(live.n for live in lives) + 1
    youngest = max(jobs, key=lambda job: job.ticket.born)
    assert batcher.cells.that_fit(jobs) == [job for job in jobs if job is not youngest]
    assert isinstance(youngest.error, NoRoom)
    assert youngest.live.n == 0
    assert [job.live.n for job in jobs if job is not youngest] == [100, 100]
    for stream in streams:
        stream.close()


def test_memory_without_cells_is_never_full(opened):
    assert opened("mamba").slots.batcher.cells.free() > 1 << 20
