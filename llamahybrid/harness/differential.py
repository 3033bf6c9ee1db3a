"""The differential runner: whatever was asked before, a `Llama` must answer as a fresh stock context would.

After each request of a history the logits that the sampler saw, at the prompt's end and after every generated
token, are compared with those of a new context of plain llama_cpp fed the same tokens. Two runs that cut
their batches elsewhere differ in the last bits, so the measure is the largest difference over the range of
the reference's logits; where two tokens lie closer than that, greedy decoding may take either (a *tie*).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import llamahybrid  # noqa: F401  (chooses the engine, so it comes before llama_cpp)
from llamahybrid.harness.history import (
    Ask,
    Chat,
    Collect,
    Continue,
    Ending,
    Eval,
    History,
    Load,
    Operation,
    Reset,
    Save,
    Vocabulary,
    shrink,
)
from llamahybrid.tiny_native import Gguf

Logits: TypeAlias = npt.NDArray[np.float32]
Factory: TypeAlias = Callable[..., Any]
"""`llama_cpp.Llama` or anything that takes its arguments."""


@dataclass(frozen=True)
class Setting:
    """Arguments for both sides, and how far their logits may lie apart as a share of the logits' range."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-3
    batch_sensitive: bool = False
    """Logits depend on where batches are cut by more than rounding."""

    def open(self, factory: Factory, model: Path, **more: Any) -> Any:
        """A `Llama` of that class on `model`: 512 tokens of context and one thread, if not set otherwise."""
        base = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 1}
        return factory(str(model), **{**base, **self.arguments, **more})


GGML_TYPE_Q8_0 = 8

# Flash attention on a CPU reduces in another order for each batch size: two cold stock runs with different
# cuts lie up to 5e-3 of the range apart, whatever is cached.
SETTINGS: tuple[Setting, ...] = (
    Setting("default"),
    # A windowed cache has room for window + n_ubatch tokens, padded to 256: more are needed to lose any.
    Setting("window", {"swa_full": False, "n_batch": 32, "n_ubatch": 32}),
    Setting("small batches", {"n_batch": 24}),
    Setting("odd context", {"n_ctx": 300}),
    Setting("all logits", {"logits_all": True}),
    Setting("flash attention", {"flash_attn": True}, tolerance=1e-2, batch_sensitive=True),
    Setting(
        "q8 cache",
        {"flash_attn": True, "type_k": GGML_TYPE_Q8_0, "type_v": GGML_TYPE_Q8_0},
        tolerance=1e-2,
        batch_sensitive=True,
    ),
)


def settings_for(model: Path) -> tuple[Setting, ...]:
    """The settings in which `model` can be compared.

    A mixture of experts picks them by a threshold, so that a difference of 1e-3 may send a token to another
    expert and the logits anywhere: with batch-sensitive settings two right runs then have nothing in common.
    """
    with Gguf(model) as gguf:
        routed = any(key.endswith(".expert_count") and count for key, count in gguf.read("").items())
    return tuple(setting for setting in SETTINGS if not (routed and setting.batch_sensitive))


class Mismatch(AssertionError):
    """The subject differs from a fresh stock context, or from what it says about itself."""


@dataclass(frozen=True)
class Tie:
    """A greedy choice that two right runs may make differently."""

    position: int
    """Tokens before the choice."""
    margin: float
    """Distance between the two best logits, as a share of the range."""


@dataclass
class Verdict:
    """What a history showed; adds up over histories with `add`."""

    requests: int = 0
    bit_equal: int = 0
    """Requests whose first logits were the reference's, bit for bit."""
    worst: float = 0.0
    """Largest difference seen, as a share of the range."""
    ties: list[Tie] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        """Count `other` in."""
        self.requests += other.requests
        self.bit_equal += other.bit_equal
        self.worst = max(self.worst, other.worst)
        self.ties += other.ties


class Reference:
    """Fresh stock contexts of one model."""

    def __init__(self, model: Path, setting: Setting) -> None:
        import llama_cpp

        self._llama = setting.open(llama_cpp.Llama, model)
        # upstream's arrays are as long as the n_ctx asked for, the native context may be longer
        self.n_ctx: int = min(self._llama.n_ctx(), len(self._llama.input_ids))
        size = self._llama.n_vocab()
        vocab = llama_cpp.llama_model_get_vocab(self._llama.model)
        openers = tuple(t for t in range(size) if llama_cpp.llama_vocab_is_control(vocab, t))
        self.vocabulary = Vocabulary(size, openers)

    def logits(self, prompt: Sequence[int], answer: Sequence[int] = (), *, every: bool = False) -> Logits:
        """Logits at the prompt's end and after each token of `answer`, from a context made for this call.

        The prompt is decoded in batches of n_batch, the answer token by token. With `every` the rows of all
        prompt tokens come first. Shape (len(answer) + 1 [+ len(prompt) - 1], n_vocab).
        """
        from llama_cpp import _internals

        llama = self._llama
        context = _internals.LlamaContext(model=llama._model, params=llama.context_params, verbose=False)
        adapter = llama._lora_adapter
        if adapter is not None:
            _set_lora(context, adapter, llama.lora_scale)
        rows: list[Logits] = []
        try:
            step = llama.n_batch
            batches = [list(prompt[start : start + step]) for start in range(0, len(prompt), step)]
            done = 0
            for batch in [*batches, *([token] for token in answer)]:
                llama._batch.set_batch(batch=batch, n_past=done, logits_all=every)
                context.decode(llama._batch)
                done += len(batch)
                if every:
                    rows += [_row(context.ctx, i, self.vocabulary.size) for i in range(len(batch))]
                elif done >= len(prompt):
                    rows.append(_row(context.ctx, -1, self.vocabulary.size))
        finally:
            context.close()
        return np.stack(rows)

    def close(self) -> None:
        """Free the model."""
        self._llama.close()


def _row(ctx: Any, index: int, size: int) -> Logits:
    import llama_cpp

    return np.array(
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, index), (size,)), dtype=np.float32
    )


def _set_lora(context: Any, adapter: Any, scale: float) -> None:
    import ctypes

    import llama_cpp

    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    if llama_cpp.llama_set_adapters_lora(context.ctx, adapters, 1, (ctypes.c_float * 1)(scale)):
        raise RuntimeError("the reference context refused the LoRA adapter; check the adapter's architecture")


def difference(ours: Logits, reference: Logits) -> float:
    """Largest absolute difference over the range (max - min) of the reference; infinite where not finite."""
    if not (np.isfinite(ours).all() and np.isfinite(reference).all()):
        return float("inf")
    return float(np.abs(ours - reference).max() / (reference.max() - reference.min()))


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
    """One history on one fresh subject, compared with `reference` after each operation."""

    def __init__(self, subject: Any, reference: Reference, setting: Setting) -> None:
        self._llm = subject
        self._reference = reference
        self._setting = setting
        self._chat = Chat()
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

    def _apply(self, operation: Operation) -> None:
        llm = self._llm
        if isinstance(operation, Ask):
            prompt = operation.prompt.tokens(self._chat, self._reference.vocabulary)
            self._ask(self._fitting(prompt, operation.take), operation.take, operation.end)
        elif isinstance(operation, Continue):
            text = self._reference.vocabulary.text(operation.new, operation.seed)
            if len(self._live) + len(text) + operation.take < self._reference.n_ctx:
                self._ask(self._live + text, operation.take, "close", start=len(self._live))
        elif isinstance(operation, Eval):
            text = self._reference.vocabulary.text(operation.new, operation.seed)
            if len(self._live) + len(text) < self._reference.n_ctx:
                self._eval(text)
        elif isinstance(operation, Reset):
            llm.reset()
            self._live = []
        elif isinstance(operation, Save):
            self._saved = (llm.save_state(), list(self._live))
        elif isinstance(operation, Load):
            if self._saved is not None:
                llm.load_state(self._saved[0])
                self._live = list(self._saved[1])
                self._chat.prompt, self._chat.answer = list(self._live), []
        elif isinstance(operation, Collect):
            while self._hanging:
                self._hanging.pop().close()

    def _fitting(self, prompt: list[int], take: int) -> list[int]:
        """The prompt's end where it is too long for the context, one token where there is none."""
        room = self._reference.n_ctx - take - 1
        return prompt[-room:] or [self._reference.vocabulary.size // 2]

    def _ask(self, prompt: list[int], take: int, end: Ending, *, start: int | None = None) -> None:
        """`start`: tokens that are live already (`reset=False`)."""
        seen: list[Logits] = []
        answer: list[int] = []

        def watch(ids: npt.NDArray[np.intc], scores: Logits) -> Logits:
            seen.append(np.array(scores, dtype=np.float32))
            if end == "processor error" and len(seen) > take:
                raise _Boom
            return scores

        def criterion(ids: npt.NDArray[np.intc], scores: Logits) -> bool:
            if len(answer) == take and end == "interrupt":
                raise KeyboardInterrupt
            return len(answer) == take and end == "stop"

        from llama_cpp import LogitsProcessorList, StoppingCriteriaList

        tokens = self._llm.generate(
            prompt if start is None else prompt[start:],
            temp=0.0,
            reset=start is None,
            logits_processor=LogitsProcessorList([watch]),
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
        limit = take if end in ("close", "abandon") else take + 1
        with _quiet_boom(), contextlib.suppress(KeyboardInterrupt, _Boom):
            for token in tokens:
                answer.append(int(token))
                if len(answer) == limit:
                    break
        if end == "abandon":
            self._hanging.append(tokens)
        else:
            tokens.close()
        rows = self._compare(prompt, answer, seen)
        self._chat.asked(prompt, answer)
        self._expect_live([prompt + answer[:-1], prompt + answer])
        self._compare_scores(rows)

    def _eval(self, text: list[int]) -> None:
        self._llm.eval(text)
        self._live = self._live + text
        self._chat.prompt, self._chat.answer = list(self._live), []
        row = _row(self._llm.ctx, -1, self._reference.vocabulary.size)
        rows = self._compare(self._live, [], [row])
        self._expect_live([self._live])
        self._compare_scores(rows)

    def _compare(self, prompt: list[int], answer: list[int], seen: Sequence[Logits]) -> Logits:
        """Hold what the sampler saw against the reference; the reference's rows come back."""
        every = self._llm._logits_all
        rows = self._reference.logits(prompt, answer, every=every)
        after = rows[len(prompt) - 1 :] if every else rows
        if len(seen) < len(answer):
            raise Mismatch(f"{len(answer)} tokens came out of {len(seen)} samplings")
        self.verdict.requests += 1
        self.verdict.bit_equal += bool(seen) and np.array_equal(seen[0], after[0])
        for step, (ours, reference) in enumerate(zip(seen, after, strict=False)):
            apart = difference(ours, reference)
            self.verdict.worst = max(self.verdict.worst, apart)
            if not apart <= self._setting.tolerance:
                raise Mismatch(
                    f"logits after {len(prompt)} + {step} tokens are {apart:.2e} of the range apart "
                    f"(tolerance {self._setting.tolerance:.0e})"
                )
        for step, (token, reference) in enumerate(zip(answer, after, strict=False)):
            self._compare_choice(token, reference, len(prompt) + step)
        return rows

    def _compare_choice(self, token: int, reference: Logits, position: int) -> None:
        best = int(reference.argmax())
        if token != best:
            margin = float((reference[best] - reference[token]) / (reference.max() - reference.min()))
            if margin > 2 * self._setting.tolerance:
                raise Mismatch(
                    f"token {token} after {position} tokens, the reference takes {best} by {margin:.2e}"
                )
            self.verdict.ties.append(Tie(position, margin))

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

    def _compare_scores(self, rows: Logits) -> None:
        """With logits_all the scores of every live token are promised."""
        if self._llm._logits_all:
            count = self._llm.n_tokens
            apart = max(difference(a, b) for a, b in zip(self._llm.scores[:count], rows[:count], strict=True))
            if not apart <= self._setting.tolerance:
                raise Mismatch(f"rows of `scores` are {apart:.2e} of the range apart")

    def _check_self(self) -> None:
        """What the subject says about itself must be consistent (a stock `Llama` says nothing)."""
        report = getattr(self._llm, "last_request", None)
        if report is not None and not (
            report.left == report.total - report.cached
            and 0 <= report.cached <= report.matched <= report.total
        ):
            raise Mismatch(f"inconsistent report: {report}")
        cache = getattr(self._llm, "prompt_cache", None)
        if cache is not None:
            cache.check_integrity()


def run(history: History, factory: Factory, model: Path, reference: Reference, setting: Setting) -> Verdict:
    """Apply `history` to a fresh `factory(model)` and compare throughout.

    Raises:
        Mismatch: with the operation at which it failed.
    """
    subject = setting.open(factory, model)
    try:
        return Runner(subject, reference, setting).run(history)
    finally:
        subject.close()


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
