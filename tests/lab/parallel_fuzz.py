"""Parallel campaigns: several conversations at once on one `Llama(n_parallel=2..4)`.

``python -m tests.lab.parallel_fuzz --seconds 300 [--count 1000] [--seed 1] [--arch qwen35]``

Each history plays two to four conversations on one model, or on two that share a prompt cache: in threads of
their own, by turns in one thread, or both, with more requests than slots. Requests are cancelled, dropped,
left to the collector, and refused. Some have salts: then a prompt is known as far as its own salt asked it.
The logits that each sampler saw are compared with a fresh stock context's within the setting's tolerance:
batches of several sequences in a bare llama_decode loop differ from batches of one by at most 3.2e-4 of the
range (measured once), other cuts of a prompt by more with flash attention (and see `ROUNDED`). At the end
all slots are free, no thread is left, and no state serves a `Llama` of one slot. A history that takes five
minutes prints every thread's stack and ends the process.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import tempfile
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from llamahybrid.capi.gguf import Gguf
from llamahybrid.errors import Busy
from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from tests.lab.campaign import main
from tests.lab.differential import Mismatch, Verdict
from tests.lab.fuzz import generative
from tests.lab.inside import MergedBatches, keep_rows_on_request, set_patience, set_wait
from tests.lab.integrity import check_integrity
from tests.lab.parallel_talk import Common, Talk, advance, in_a_thread
from tests.lab.reference import Reference, Setting, crossed, settings_for

CONTEXTS = (256, 512, 512, 768, 1536)
LONGEST = 220
OPERATIONS = 7
"""Of each conversation."""

STUCK_SECONDS = 300

ROUNDED = ("glm5-next", "deepseek4")
"""Architectures that are compared with a cache of f32, where right runs agree to 2e-6.

glm5-next attends in one of two ways, depending on the cells in use: where the context reaches further than
the cells that may be looked at, small batches gather those as f32 (src/models/glm5-next.cpp,
build_inp_kpool); else the query is rounded to the cache's type. A sequence whose
cells lie behind freed ones is thus 1e-4 of the range from a fresh context in any bare llama_decode loop, and
at any distance once that picks another expert.

deepseek4 compresses what was rounded: in a bare loop that has the context to itself, a prompt decoded token
by token is 7e-5 of the range from the same in one batch, and 6e-3 where that picks another expert, one time
in 500."""

GGML_TYPE_F32 = 0

SALTS = (("",), ("", "a"), ("a", "b"), ("", "a", "b"))


@dataclass
class Outcome:
    """Results of the histories on one model."""

    histories: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    count: Counter[str] = field(default_factory=Counter)


class Plan:
    """Parameters of a history, drawn from its seed."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        self.talks, self.n_ctx = rng.randint(2, 4), rng.choice(CONTEXTS)
        self.n_parallel = rng.randint(2, 4)
        self.threads = rng.choice((0, self.talks, self.talks, rng.randint(0, self.talks)))
        """Conversations played in threads of their own; the others take turns in the main thread."""
        self.wait: bool | float = rng.choice((True, True, True, True, 0.05, False))
        self.patience = rng.choice((0.0, 0.01, 0.05, 1.0))
        self.disk = rng.random() < 0.25
        self.longest = rng.choice((LONGEST, LONGEST, min(2 * LONGEST, self.n_ctx)))
        """Tokens of a prompt: some have room for one such alone."""
        self.paging = rng.random() < 0.8
        self.salts = random.Random(f"salts {seed}").choice(SALTS)
        """Of the conversations, in turn: only those of one salt share anything."""
        self.models = random.Random(f"models {seed}").choice((1, 1, 2))
        """Models of one prompt cache, which the conversations use in turn."""


def play(model: Path, setting: Setting, seed: int, outcome: Outcome) -> None:
    """Play the history of a seed.

    Raises:
        Mismatch: an answer is not that of a fresh context, or something was left behind.
        Exception: the error of a conversation.
    """
    rng = random.Random(f"parallel {seed}")
    plan = Plan(rng, seed)
    arguments = {"n_ctx": plan.n_ctx, **setting.arguments}
    setting = Setting(setting.name, arguments, setting.tolerance, setting.batch_sensitive)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cache = PromptCache(rng.choice((3 << 20, 64 << 20)), folder if plan.disk else None)
        more = {
            "prompt_cache": cache,
            "n_parallel": plan.n_parallel,
            "wait": plan.wait,
            "paging": plan.paging,
        }
        before = threading.active_count()
        with closing(Reference(model, setting)) as reference:
            with ExitStack() as stack:
                llms = [
                    stack.enter_context(closing(setting.open(Llama, model, **more)))
                    for _ in range(plan.models)
                ]
                merged = [MergedBatches(llm) for llm in llms]
                common = _played(llms, plan, rng, reference, seed)
                for said in common.said:
                    said.judge(reference, setting, outcome.verdict)
                for llm in llms:
                    _require_free_slots(llm, plan, common)
            check_integrity(cache)
            _require_nothing_for_one_slot(model, setting, cache, common)
            cache.close()
        _require_ended_threads(before)
    outcome.histories += 1
    outcome.count += common.count
    outcome.count["models"] += plan.models
    outcome.count["steps"] += sum(each.batches for each in merged)
    outcome.count["rows"] += sum(each.rows for each in merged)


def _played(llms: list[Any], plan: Plan, rng: random.Random, reference: Reference, seed: int) -> Common:
    for llm in llms:
        keep_rows_on_request(llm)
        set_patience(llm, plan.patience)
    shared = reference.vocabulary.text(plan.longest // 2, seed)
    longest, n_ctx = min(plan.longest, reference.n_ctx - 40), llms[0].n_ctx()
    common = Common(reference.vocabulary, n_ctx, shared, longest, plan.salts, plan.wait is True)
    talks = [
        Talk(common, llms[i % plan.models], f"{seed} {i}", OPERATIONS, plan.salts[i % len(plan.salts)]).play()
        for i in range(plan.talks)
    ]
    with ThreadPoolExecutor(plan.threads or 1) as pool:
        running = [pool.submit(deque, talk, 0) for talk in talks[: plan.threads]]
        advance(talks[plan.threads :], rng)
    for each in running:
        each.result()
    return common


def _require_free_slots(llm: Any, plan: Plan, common: Common) -> None:
    """Give all streams up; every slot is then free, and the cache's books are right. Raises Mismatch."""
    common.left.clear()
    gc.collect()
    llm.reset()  # ends the requests that finalisers have cancelled
    set_patience(llm, STUCK_SECONDS)
    set_wait(llm, False)
    held, left = [], []

    def begin(prompt: list[int]) -> None:
        held.append(llm.generate(prompt, temp=0.0))
        try:
            next(held[-1])
        except Busy:
            left.append(prompt)

    for said in common.said[: plan.n_parallel]:
        in_a_thread(partial(begin, said.prompt[:8]))
    if left:
        raise Mismatch(f"left behind: {len(left)} of {len(held)} slots are not free")
    for stream in held:
        stream.close()
    check_integrity(llm.prompt_cache)


def _require_nothing_for_one_slot(model: Path, setting: Setting, cache: PromptCache, common: Common) -> None:
    """State of batches of several sequences serves no `Llama` of one slot, which promises bits."""
    with closing(setting.open(Llama, model, prompt_cache=cache)) as alone:
        longest = max(common.said, key=lambda said: len(said.prompt))
        with alone.request(longest.salt):
            stream = alone.generate(list(longest.prompt), temp=0.0)
        with closing(stream):
            next(stream)
        if alone.last_request.cached:
            raise Mismatch(f"merged state served a Llama of one slot: {alone.last_request}")


def _require_ended_threads(before: int) -> None:
    until = time.monotonic() + 60
    while threading.active_count() > before:
        if time.monotonic() > until:
            raise Mismatch(f"threads are left: {[t.name for t in threading.enumerate()]}")
        time.sleep(0.01)


def comparable(model: Path) -> tuple[Setting, ...]:
    """The settings in which `model` can be compared beside others: what is `ROUNDED` has a cache of f32."""
    settings = settings_for(model)
    with Gguf(model) as gguf:
        rounded = gguf.read("general.architecture")["general.architecture"] in ROUNDED
    precise = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32} if rounded else {}
    plain = {"flash_attn": False}  # where none is wanted, which several slots have by default
    return tuple(replace(s, arguments={**plain, **s.arguments, **precise}) for s in settings)


def run(model: Path, seed: int, count: int, until: float, outcome: Outcome) -> int:
    """One to `count` histories from `seed` on, until the clock shows `until`; the seed after the last.

    Raises Mismatch, which names the seed and the setting.
    """
    settings = comparable(model)
    for number in range(seed, seed + count) if settings else ():
        setting = crossed(settings[number % len(settings)], number)
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        try:
            play(model, setting, number, outcome)
        except Exception as error:
            kind = "" if isinstance(error, Mismatch) else f"{type(error).__name__}: "
            raise Mismatch(f"{model.stem}, {setting.name}, seed {number}: {kind}{error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        if time.monotonic() > until:
            return number + 1
    return seed + count


def _cells(model: Path, _: str, seed: int, count: int, until: float) -> dict[str, object]:
    outcome = Outcome()
    last = run(model, seed, count, until, outcome)
    verdict = outcome.verdict
    return {
        **{"histories": outcome.histories, "requests": verdict.requests, "worst": f"{verdict.worst:.1e}"},
        "ties": f"{len(verdict.ties)} of {max(verdict.ties, default=0):.0e}",
        **{name: outcome.count[name] for name in ("models", "cancels", "dropped", "steps", "rows")},
        "until seed": last,
    }


if __name__ == "__main__":
    main(_cells, generative(), window=16)
