"""Conversations on a `Llama`, each in a thread of its own or by turns with others in one thread.

A `Talk` plays operations of users on its chat and keeps the logits that the sampler saw, which are compared
with a fresh stock context's at the end of the history (`judge`).
"""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import LogitsProcessorList, StoppingCriteriaList

from llamahybrid.core.report import RequestReport
from llamahybrid.errors import Busy, ContextOverflow, RequestCancelled
from llamahybrid.harness.oracle import common_prefix
from tests.lab import differential
from tests.lab.differential import Mismatch, Verdict, compare
from tests.lab.history import Chat, Vocabulary, random_prompt
from tests.lab.integrity import check_integrity
from tests.lab.reference import Logits, Reference, Setting


@dataclass
class Said(differential.Said):
    """The answer to a request of a conversation."""

    what: str = ""
    salt: str = ""

    def options(self) -> dict[str, Any]:
        return {"logits_processor": LogitsProcessorList([self.watch])} if self.watched else {}

    def require_own(self, reports: Sequence[RequestReport], known: Sequence[Said]) -> None:
        """Raises Mismatch where a request knew more of its prompt than all those of its salt have asked."""
        own = [said.prompt + said.answer for said in known if said.salt == self.salt and said is not self]
        most = max((common_prefix(self.prompt, tokens) for tokens in own), default=0)
        for report in reports:
            if report.matched > most or report.cached > report.matched:
                raise Mismatch(
                    f"{self.what}, salt {self.salt!r}: {report.matched} of {len(self.prompt)} tokens matched "
                    f"({report.reason}), {most} were ever asked"
                )

    def judge(self, reference: Reference, setting: Setting, verdict: Verdict) -> None:
        """Raises Mismatch where a fresh stock context says something else."""
        if self.seen or self.wrong or not self.watched:
            try:
                compare(reference, setting, verdict, self)
            except Mismatch as mismatch:
                prompt = f"{len(self.prompt)} tokens {self.prompt[:3]}...{self.prompt[-3:]}"
                raise Mismatch(f"{self.what}, prompt of {prompt}: {mismatch}") from None


@dataclass
class Common:
    """State that the conversations of a history share."""

    vocabulary: Vocabulary
    n_ctx: int
    """Tokens of the whole context."""
    shared: list[int]
    """Text that prompts may begin with."""
    longest: int
    salts: tuple[str, ...] = ("",)
    waits: bool = True
    """Requests wait for a slot instead of being refused."""
    cancels: Counter[int] = field(default_factory=Counter)
    """By a model's id, how often all its requests were cancelled."""
    said: list[Said] = field(default_factory=list)
    evaluated: list[Said] = field(default_factory=list)
    """Tokens that were evaluated without a request, or by one whose answer is not kept."""
    left: list[Any] = field(default_factory=list)
    """Streams that others give up, sooner or later."""
    count: Counter[str] = field(default_factory=Counter)

    @property
    def known(self) -> list[Said]:
        """All that the prompt cache may know."""
        return [*self.said, *self.evaluated]


class Talk:
    """A conversation: `play` is a generator that yields wherever another conversation may go on."""

    def __init__(self, common: Common, llm: Any, seed: str, operations: int, salt: str = "") -> None:
        self._common, self._llm = common, llm
        self._salt, self._choice = salt, random.Random(f"salts {seed}")
        self._rng = random.Random(seed)
        self._chat = Chat()
        self._operations = operations
        self._saved: tuple[Any, list[int]] | None = None

    def play(self) -> Iterator[None]:
        """Do all operations, with stops between them and between tokens."""
        deeds: tuple[tuple[Callable[[], Iterator[None]], int], ...] = (
            (self._ask, 60),
            (self._completion, 16),
            (self._several_answers, 8),
            (self._by_hand, 6),
            (self._overflow, 3),
            (self._save, 3),
            (self._load, 4),
            (self._reset, 3),
            (self._meddle, 4),
            (self._give_up_others, 6),
        )
        yield from self._ask()
        for _ in range(self._operations - 1):
            deed = self._rng.choices([d for d, _ in deeds], [w for _, w in deeds])[0]
            yield from deed()
            yield

    # -- requests ----------------------------------------------------------------------------------

    def _prompt(self, take: int) -> list[int]:
        common = self._common
        prompt = self._drawn()
        others = [said.prompt for said in list(common.said)] if len(common.salts) > 1 else []
        if others and self._choice.random() < 0.2:
            prompt = self._choice.choice(others)  # of whatever salt
        return prompt[-max(1, min(common.longest, common.n_ctx - take - 2)) :]

    def _drawn(self) -> list[int]:
        common, rng = self._common, self._rng
        seed = rng.randrange(10**6)

        def new() -> int:
            return rng.choice((1, 2, rng.randint(3, 30), rng.randint(3, max(90, common.longest // 2))))

        prompt = random_prompt(rng, new, seed) if self._chat.prompt else None
        tokens = self._chat.next(prompt, common.vocabulary) if prompt else []
        if not tokens or rng.random() < 0.1:
            tokens = common.shared[: rng.randint(1, len(common.shared))]
            tokens = tokens + common.vocabulary.text(rng.choice((0, new())), seed)
        return tokens

    def _any_salt(self) -> str:
        return self._choice.choice((self._salt, self._salt, self._salt, *self._common.salts))

    def _ask(self) -> Iterator[None]:
        rng, llm, common = self._rng, self._llm, self._common
        take = rng.choice((1, 2, rng.randint(3, 24), rng.randint(3, 24)))
        end = rng.choices(
            ("close", "stop", "interrupt", "handle", "handle later", "all", "drop", "thread"),
            (50, 8, 4, 8, 8, 2, 14, 6),
        )[0]
        said = self._begin(f"generate, {end}", self._prompt(take), self._any_salt())
        said.watched = end in ("stop", "interrupt") or self._choice.random() < 0.6
        cancels, mine = common.cancels[id(llm)], False

        def criterion(ids: npt.NDArray[np.intc], scores: Logits) -> bool:
            if len(said.answer) == take and end == "interrupt":
                raise KeyboardInterrupt
            return len(said.answer) == take and end == "stop"

        with llm.request(said.salt) as handle:
            criteria = {"stopping_criteria": StoppingCriteriaList([criterion])} if said.watched else {}
            stream = llm.generate(list(said.prompt), temp=0.0, **criteria, **said.options())
        later: threading.Timer | None = None
        if end == "handle later":
            mine = True
            later = threading.Timer(rng.random() * 0.05, handle.cancel)
            later.start()
        limit = take + (end in ("stop", "interrupt"))
        try:
            while len(said.answer) < limit:
                if end in ("handle", "all") and len(said.answer) == take // 2 and not mine:
                    mine = True
                    common.count["cancels"] += 1
                    common.cancels[id(llm)] += end == "all"
                    (llm if end == "all" else handle).cancel()
                token = self._in_a_thread_that_dies(stream) if end == "thread" else next(stream, None)
                if token is None:
                    break
                said.answer.append(int(token))
                yield
        except RequestCancelled:
            self._cancelled(said, mine, cancels)
        except KeyboardInterrupt:
            common.count["interrupts"] += 1
        except Busy:
            if said.answer or common.waits:
                raise
            common.count["refused"] += 1
        finally:
            if later is not None:
                later.join()
                common.count["cancels"] += 1
            said.require_own(handle.reports, common.known)
        self._chat.asked(said.prompt, said.answer)
        if end == "drop":
            self._drop(stream)
        else:
            stream.close()

    def _cancelled(self, said: Said, mine: bool, cancels: int) -> None:
        """A request was stopped; `cancels`: how often all had been cancelled when it began."""
        if not mine and self._common.cancels[id(self._llm)] == cancels:
            raise Mismatch(f"{said.what}: stopped, and nobody cancelled it")
        self._common.count["cancelled"] += 1

    def _in_a_thread_that_dies(self, stream: Iterator[int]) -> int | None:
        self._common.count["steps in threads that died"] += 1
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(next, stream, None).result()

    def _completion(self) -> Iterator[None]:
        common, take = self._common, self._rng.randint(1, 16)
        said = self._begin("completion", self._prompt(take), self._any_salt(), learns=True)
        cancels, mine = common.cancels[id(self._llm)], self._rng.random() < 0.3
        options = {"temperature": 0.0, "stream": True, **said.options()}
        if self._rng.random() < 0.5:  # then its tokens are decoded alone
            options["logprobs"] = 1
            common.count["with logprobs"] += 1
        with self._llm.request(said.salt) as handle:
            made = self._llm.create_completion(list(said.prompt), max_tokens=take, **options)
        ended = None
        try:
            for number, chunk in enumerate(made):
                ended = chunk["choices"][0]["finish_reason"]
                if mine and number == take // 2:
                    common.count["cancels"] += 1
                    handle.cancel()
                yield
        except Busy:
            common.count["refused"] += 1
        said.require_own(handle.reports, common.known)
        if ended == "cancelled":
            self._cancelled(said, mine, cancels)
        self._chat.asked(said.prompt, said.answer)

    def _several_answers(self) -> Iterator[None]:
        """Greedy answers to one prompt, read by turns: each row is that of a fresh context."""
        common, prompt = self._common, self._prompt(8)
        said = self._begin("several answers", prompt, self._any_salt())

        def watch(ids: npt.NDArray[np.intc], scores: Logits) -> Logits:
            there = [int(token) for token in ids]
            common.said.append(Said(there, seen=[np.array(scores)], what=said.what, salt=said.salt))
            common.evaluated.append(Said([*there, int(scores.argmax())], what=said.what, salt=said.salt))
            return scores

        options = {"temperature": 0.0, "stream": True, "logits_processor": LogitsProcessorList([watch])}
        take, count = self._rng.randint(1, 8), self._rng.randint(2, 3)
        with suppress(Busy), self._llm.request(said.salt) as handle:
            for _ in self._llm.create_completion(list(prompt), max_tokens=take, n=count, **options):
                yield
        said.require_own(handle.reports, common.known)
        self._chat.asked(prompt, [])

    def _by_hand(self) -> Iterator[None]:
        """Reset, evaluate, sample, evaluate, ... without a stop."""
        llm, take = self._llm, self._rng.randint(1, 8)
        said = self._begin("by hand", self._prompt(take), self._any_salt())
        try:
            with llm.request(said.salt):
                llm.reset()
                llm.eval(list(said.prompt))
                for _ in range(take):
                    said.answer.append(int(llm.sample(temp=0.0, **said.options())))
                    llm.eval(said.answer[-1:])
        except (Busy, RequestCancelled):
            self._common.count["by hand, ended"] += 1
        self._chat.asked(said.prompt, said.answer)
        yield

    def _overflow(self) -> Iterator[None]:
        self._common.count["overflows"] += 1
        text = self._common.vocabulary.text(self._common.n_ctx + self._rng.choice((1, 200)), 1)
        with suppress(Busy, RequestCancelled, ContextOverflow):
            next(self._llm.generate(text, temp=0.0))
            raise Mismatch("a prompt longer than the context was taken")
        yield

    def _begin(self, what: str, prompt: list[int], salt: str, *, learns: bool = False) -> Said:
        said = Said(prompt, what=what, salt=salt, learns=learns)
        self._common.said.append(said)
        self._common.count["requests"] += 1
        return said

    # -- giving up ---------------------------------------------------------------------------------

    def _drop(self, stream: Any) -> None:
        """Drop a stream: delete it, leave it in a reference cycle, or leave it to another conversation."""
        self._common.count["dropped"] += 1
        how = self._rng.randrange(4)
        if how == 1:
            self._common.left.append(stream)
        elif how != 3:
            cycle = [stream]
            cycle.append(cycle)
            del stream, cycle
            if how == 2:
                in_a_thread(gc.collect)

    def _give_up_others(self) -> Iterator[None]:
        with suppress(IndexError):
            stream = self._common.left.pop()
            if self._rng.random() < 0.5:
                stream.close()
            else:
                in_a_thread(stream.close)
        yield

    # -- the rest ----------------------------------------------------------------------------------

    def _save(self) -> Iterator[None]:
        """Evaluate a prompt and save its state."""
        prompt = self._prompt(0)
        self._common.evaluated.append(Said(prompt, what="saved", salt=self._salt))
        with suppress(Busy, RequestCancelled), self._llm.request(self._salt):
            self._llm.reset()
            self._llm.eval(list(prompt))
            state = self._llm.save_state()
            saved = state.input_ids[: state.n_tokens].tolist()
            if saved != prompt:
                raise Mismatch(f"saved {len(saved)} tokens that end in {saved[-3:]}, evaluated {prompt[-3:]}")
            self._saved = state, prompt
            self._common.count["saved"] += 1
        yield

    def _load(self) -> Iterator[None]:
        """Load the saved state, and sample from it."""
        if self._saved is not None:
            said = self._begin("loaded", list(self._saved[1]), self._salt)
            with suppress(Busy, RequestCancelled), self._llm.request(self._salt):
                self._llm.load_state(self._saved[0])
                said.answer.append(int(self._llm.sample(temp=0.0, **said.options())))
                self._common.count["loaded"] += 1
            self._chat.asked(said.prompt, said.answer)
        yield

    def _reset(self) -> Iterator[None]:
        with suppress(Busy, RequestCancelled), self._llm.request(self._any_salt()):
            self._llm.reset()
        yield

    def _meddle(self) -> Iterator[None]:
        """Users change the prompt cache while requests of all models run on it."""
        cache, half = self._llm.prompt_cache, self._chat.prompt[: len(self._chat.prompt) // 2]
        match self._rng.randrange(6):
            case 0:
                cache.ram_bytes = self._rng.choice((20, 60, 200, 100_000)) << 10
            case 1:
                cache.forget(half)
            case 2:
                cache.clear()
            case 3:
                cache.pin(half)
            case 4:
                cache.unpin(half)
            case 5:
                gc.collect()
        check_integrity(cache)
        yield


def in_a_thread(job: Callable[[], object]) -> None:
    """Run a job in a thread that ends with it."""
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()


def advance(talks: list[Iterator[None]], rng: random.Random) -> None:
    """Play talks by turns in the calling thread."""
    while talks:
        talk = rng.choice(talks)
        if next(talk, talks) is talks:
            talks.remove(talk)
