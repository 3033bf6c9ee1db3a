"""A token that waits for a batch: when it still makes sense, and how its owner hears of it."""

from contextlib import closing
from itertools import islice

from llamahybrid import Llama
from llamahybrid.memory.compute_thread import ring
from llamahybrid.request.job import Job, NoRoom
from llamahybrid.request.step_frames import Step


def test_a_job_stands_only_while_its_request_waits_inside_a_step(tiny_model):
    with closing(Llama(str(tiny_model("qwen35")), n_parallel=2, n_ctx=256, verbose=False)) as llm:
        stream = llm.generate(list(range(5, 25)), temp=0.0)
        next(stream)
        slot = next(slot for slot in llm.slots.all if llm.slots.user(slot) is not None)
        job = Job(llm.slots.user(slot), slot.evaluation.runner.live, 5)
        assert not job.stands
        job.ticket.step = Step()
        assert job.stands
        list(islice(stream, 1))
        job.ticket.step = Step()
        assert not job.stands, "the sequence went on"
        job.ticket.step = None
        job.end(NoRoom("none"))
        assert job.done
        assert job.bell.acquire(blocking=False), "who waits is woken"
        ring(job.bell)
        ring(job.bell)  # it rings already
        stream.close()
