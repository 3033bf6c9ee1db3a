"""The differential runner: whatever was asked before, a `Llama` must answer as a fresh stock context would.

After each request of a history the logits that the sampler saw, at the prompt's end and after every generated
token, are compared with those of a new context of plain llama_cpp fed the same tokens. Two runs that cut
their batches elsewhere differ in the last bits, so the measure is the largest difference over the range of
the reference's logits; where two tokens lie closer than that, greedy decoding may take either (a *tie*).
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from tests.lab.history import (
    CHATS,
    Ask,
    Budget,
    Chat,
    Continue,
    Do,
    Ending,
    Eval,
    History,
    Operation,
    Reopen,
    Switch,
    shrink,
)
from tests.lab.integrity import check_integrity
from tests.lab.reference import SETTINGS, Factory, Logits, Reference, Setting, difference, output_row

# isort: split
from llama_cpp import LogitsProcessorList, StoppingCriteriaList


class Mismatch(AssertionError):
    """The subject differs from a fresh stock context, or from what it says about itself."""


@dataclass
class Verdict:
    """Result of a history; `add` sums up histories."""

    requests: int = 0
    bit_equal: int = 0
    """Requests whose first logits were the reference's, bit for bit."""
    worst: float = 0.0
    """Largest difference seen, as a share of the range."""
    ties: list[float] = field(default_factory=list)
    """Greedy choices that two right runs may make differently: how far they lie under the best."""
    from_disk: int = 0
    """States, and attention, that were read from disk."""

    def add(self, other: Verdict) -> None:
        self.requests += other.requests
        self.bit_equal += other.bit_equal
        self.worst = max(self.worst, other.worst)
        self.ties += other.ties
        self.from_disk += other.from_disk


@dataclass
class Said:
    """The answer to a request, and the logits that its sampler saw before each token."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    seen: list[Logits] = field(default_factory=list)
    learns: bool = False
    """The tokens of the answer are those that the sampler sees."""
    watched: bool = True
    """False: sampled in the loop, with no code of the caller; then `seen` is empty."""
    wrong: str = ""
    """A fault that the sampler saw: ctypes swallows what a callback raises."""

    def watch(self, ids: npt.NDArray[np.intc], scores: Logits) -> Logits:
        """A logits processor that changes nothing."""
        there = [int(token) for token in ids]
        if self.learns:
            self.answer[:] = there[len(self.prompt) :]
        known = self.prompt + self.answer
        if there != known:
            self.wrong = (
                f"upstream's ids end in {there[-3:]}, {len(there)} of them, after {len(self.prompt)} and "
                f"{len(self.answer)} tokens that end in {known[-3:]}"
            )
        self.seen.append(np.array(scores, dtype=np.float32))
        return scores


class _Boom(Exception):
    """Raised inside a logits processor on purpose."""


@contextlib.contextmanager
def _quiet_boom() -> Iterator[None]:
    """ctypes prints, and swallows, what a callback raises; this one is on purpose."""
    previous = sys.unraisablehook
    sys.unraisablehook = lambda args: None if isinstance(args.exc_value, _Boom) else previous(args)
    try:
        yield
    finally:
        sys.unraisablehook = previous


class Runner:
    """Plays a history on a fresh subject and compares it with `reference` after each operation."""

    def __init__(
        self,
        subject: Any,
        reference: Reference,
        setting: Setting,
        reopen: Callable[..., Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        """`reopen`: makes another subject, given its prompt cache; None: this one stays throughout.

        `folder`: where the subject's prompt cache has its disk tier; None: it has none.
        """
        self._llm = subject
        self._folder = folder
        self._reopen = reopen
        self._reference = reference
        self._setting = setting
        self._chats = [Chat() for _ in range(CHATS)]
        self._chat = self._chats[0]
        self._live: list[int] = []
        self._saved: tuple[Any, list[int]] | None = None
        self._hanging: list[Any] = []
        self.verdict = Verdict()

    def run(self, history: History) -> Verdict:
        """Apply all operations.

        Raises:
            Mismatch: at the first operation after which anything is not as it must be.
        """
        for index, operation in enumerate(history.operations):
            try:
                self._apply(operation)
                self._check_self()
            except Exception as error:
                raise Mismatch(f"operation {index}, {operation!r}: {error}") from error
        return self.verdict

    def close(self) -> None:
        self._llm.close()
        self._count(getattr(self._llm, "prompt_cache", None))

    def _count(self, cache: Any) -> None:
        """Count the records that a cache has read from disk, once it is closed."""
        if cache is not None:
            self.verdict.from_disk += cache.stats().extra.get("disk_loaded", 0)

    def _apply(self, operation: Operation) -> None:
        words = self._reference.vocabulary
        match operation:
            case Ask(prompt, take, end):
                self._ask(self._fitting(self._chat.next(prompt, words), take), take, end)
            case Continue(new, seed, take):
                if len(self._live) + new + take < self._reference.n_ctx:
                    self._ask(self._live + words.text(new, seed), take, start=len(self._live))
            case Eval(new, seed):
                if len(self._live) + new < self._reference.n_ctx:
                    self._eval(words.text(new, seed))
            case Switch(chat):
                self._chat = self._chats[chat]
            case Do("reset"):
                self._llm.reset()
                self._live = []
            case Do("save"):
                self._saved = (self._llm.save_state(), list(self._live))
            case Do("load") if self._saved is not None:
                self._llm.load_state(self._saved[0])
                self._live = list(self._saved[1])
                self._chat.prompt, self._chat.answer = list(self._live), []
            case Do("collect"):
                while self._hanging:
                    self._hanging.pop().close()
            case Budget() | Reopen() if hasattr(self._llm, "prompt_cache"):
                self._tend(operation, self._llm.prompt_cache)

    def _tend(self, operation: Budget | Reopen, cache: PromptCache) -> None:
        if isinstance(operation, Budget):
            cache.ram_bytes = operation.kib << 10
        elif self._reopen is not None:
            self._hanging.clear()
            self._llm.close()
            if operation.restart:
                cache.close()
                self._count(cache)
                cache = PromptCache(cache.ram_bytes, self._folder)
            self._llm, self._live = self._reopen(prompt_cache=cache), []

    def _fitting(self, prompt: list[int], take: int) -> list[int]:
        """The prompt's end where it is too long for the context, one token where there is none."""
        room = self._reference.n_ctx - take - 1
        return prompt[-room:] or [self._reference.vocabulary.size // 2]

    def _ask(self, prompt: list[int], take: int, end: Ending = "close", *, start: int | None = None) -> None:
        """`start`: tokens that are live already (`reset=False`)."""
        said = Said(prompt, watched=end not in ("close", "abandon") or take % 2 == 0)

        def fail(ids: npt.NDArray[np.intc], scores: Logits) -> Logits:
            if end == "processor error" and len(said.seen) > take:
                raise _Boom
            return scores

        def criterion(ids: npt.NDArray[np.intc], scores: Logits) -> bool:
            if len(said.answer) == take and end == "interrupt":
                raise KeyboardInterrupt
            return len(said.answer) == take and end == "stop"

        callbacks = {
            "logits_processor": LogitsProcessorList([said.watch, fail]),
            "stopping_criteria": StoppingCriteriaList([criterion]),
        }
        tokens = self._llm.generate(
            prompt if start is None else prompt[start:],
            temp=0.0,
            reset=start is None,
            **callbacks if said.watched else {},
        )
        limit = take if end in ("close", "abandon") else take + 1
        with _quiet_boom(), contextlib.suppress(KeyboardInterrupt, _Boom):
            for token in tokens:
                said.answer.append(int(token))
                if len(said.answer) == limit:
                    break
        if end == "abandon":
            self._hanging.append(tokens)
        else:
            tokens.close()
        self._chat.asked(prompt, said.answer)
        self._compare(said, [prompt + said.answer[:-1], prompt + said.answer])

    def _eval(self, text: list[int]) -> None:
        self._llm.eval(text)
        live = self._live + text
        self._chat.prompt, self._chat.answer = live, []
        row = output_row(self._llm.ctx, -1, self._reference.vocabulary.size)
        self._compare(Said(live, seen=[row]), [live])

    def _compare(self, said: Said, allowed: Sequence[list[int]]) -> None:
        """Compare an answer, then the context's own account of its tokens with the `allowed` ones."""
        every = self._llm._logits_all
        rows = compare(self._reference, self._setting, self.verdict, said, every=every)
        self._expect_live(allowed)
        if every:
            count = self._llm.n_tokens
            apart = max(difference(a, b) for a, b in zip(self._llm.scores[:count], rows[:count], strict=True))
            if not apart <= self._setting.tolerance:
                raise Mismatch(f"rows of `scores` are {apart:.2e} of the range apart")

    def _expect_live(self, allowed: Sequence[list[int]]) -> None:
        """The context's own account of its tokens must be one of `allowed`."""
        llm = self._llm
        live = llm.input_ids[: llm.n_tokens].tolist()
        if live not in allowed:
            raise Mismatch(
                f"n_tokens is {llm.n_tokens}, input_ids end in {live[-3:]}; "
                f"expected {' or '.join(f'{len(a)} tokens ending in {a[-3:]}' for a in allowed)}"
            )
        self._live = live

    def _check_self(self) -> None:
        """Check that the subject's report and cache are consistent (a stock `Llama` has neither)."""
        report = getattr(self._llm, "last_request", None)
        if report is not None and not (
            report.left == report.total - report.cached
            and 0 <= report.cached <= report.matched <= report.total
        ):
            raise Mismatch(f"inconsistent report: {report}")
        cache = getattr(self._llm, "prompt_cache", None)
        if cache is not None:
            check_integrity(cache)


def compare(
    reference: Reference, setting: Setting, verdict: Verdict, said: Said, *, every: bool = False
) -> Logits:
    """Hold what a sampler saw, and chose, against a fresh context; count it in `verdict`.

    The reference's rows come back, those of all prompt tokens first with `every`. Raises Mismatch.
    """
    prompt, answer, seen = said.prompt, said.answer, said.seen
    if said.wrong:
        raise Mismatch(said.wrong)
    if said.watched and len(seen) < len(answer):
        raise Mismatch(f"{len(answer)} tokens came out of {len(seen)} samplings")
    rows = reference.logits(prompt, answer, every=every)
    after = rows[len(prompt) - 1 :] if every else rows
    verdict.requests += 1
    verdict.bit_equal += bool(seen) and np.array_equal(seen[0], after[0])
    for step, (ours, wanted) in enumerate(zip(seen, after, strict=False)):
        apart = difference(ours, wanted)
        verdict.worst = max(verdict.worst, apart)
        if not apart <= setting.tolerance:
            raise Mismatch(
                f"logits after {len(prompt)} + {step} tokens are {apart:.2e} of the range apart "
                f"(tolerance {setting.tolerance:.0e})"
            )
    for step, (token, wanted) in enumerate(zip(answer, after, strict=False)):
        best = int(wanted.argmax())
        margin = float((wanted[best] - wanted[token]) / np.ptp(wanted))
        if margin > 2 * setting.tolerance:
            place = len(prompt) + step
            raise Mismatch(f"token {token} after {place} tokens, the reference takes {best} by {margin:.2e}")
        verdict.ties += [] if token == best else [margin]
    return rows


def shortfall(
    reference: Reference,
    prompt: list[int],
    answer: list[int],
    ends: Sequence[int] = (),
    tolerance: float = 1e-3,
) -> float:
    """Return how far greedy tokens lie under a fresh context's best, as a share of the range.

    `ends`: the tokens of which one ended the answer, if it ended by itself. Raises Mismatch.
    """
    rows = reference.logits(prompt, answer)
    short = rows.max(axis=1)
    short[:-1] -= rows[np.arange(len(answer)), answer]
    short[-1] -= rows[-1][list(ends)].max() if ends else short[-1]
    worst = float((short / np.ptp(rows, axis=1)).max())
    if worst > tolerance:
        raise Mismatch(f"an answer lies {worst:.3f} of the logits' range under the best; prompt {prompt}")
    return worst


def run(history: History, factory: Factory, model: Path, reference: Reference, setting: Setting) -> Verdict:
    """Apply `history` to a fresh `factory(model)` and compare throughout.

    Raises:
        Mismatch: with the operation at which it failed.
    """

    def start(**more: Any) -> Any:
        return setting.open(factory, model, **more)

    ours = isinstance(factory, type) and issubclass(factory, Llama)
    with tempfile.TemporaryDirectory() as folder:
        first = {"prompt_cache": PromptCache(None, folder)} if ours else {}
        runner = Runner(start(**first), reference, setting, start, Path(folder))
        try:
            return runner.run(history)
        finally:
            runner.close()


def check(history: History, factory: Factory, model: Path, setting: Setting = SETTINGS[0]) -> Verdict:
    """`run`, and on failure the shortest history that still fails.

    Raises:
        Mismatch: its message holds the shrunk history as Python.
    """
    reference = Reference(model, setting)

    def error(candidate: History) -> Mismatch | None:
        try:
            run(candidate, factory, model, reference, setting)
        except Mismatch as mismatch:
            return mismatch
        return None

    try:
        return run(history, factory, model, reference, setting)
    except Mismatch as first:
        short = shrink(history, lambda candidate: error(candidate) is not None)
        last = error(short) or first
        raise Mismatch(f"{model.name}, setting {setting.name!r}: {last}\n{short}") from first
    finally:
        reference.close()
