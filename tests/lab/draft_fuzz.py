"""Draft campaigns: drafts that are right and wrong at random places, undone in every way there is.

``python -m tests.lab.draft_fuzz --seconds 300 [--count 1000] [--seed 1] [--arch qwen35]``

A *pattern* is one answer in drafts of random length, each right up to a random token. The text is prescribed,
so that the draft model knows what is right; the logits of every token of it must be those of a fresh stock
context that saw no draft, and afterwards memory must hold what was handed out.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import LogitsProcessorList
from llama_cpp.llama_speculative import LlamaDraftModel

from llamahybrid import tiny
from llamahybrid.llama import Llama
from llamahybrid.speculation.draft_length import DraftLengthPolicy
from tests.lab.campaign import main
from tests.lab.differential import Mismatch
from tests.lab.reference import Logits, Reference, Setting, difference, settings_for

ARCHITECTURES = tuple(arch for arch in tiny.decoders() if arch not in ("qwen3", "cohere2", "smallthinker"))
SETTINGS = (
    Setting("default"),
    Setting("small batches, window", {"n_batch": 16, "n_ubatch": 16, "swa_full": False}),
)
PLANES = 4
LONGEST = 6
"""More than there are planes: such a draft is undone by a snapshot even where there are some."""

ANSWER = 20
PER_TEXT = 4
"""Patterns on one prescribed text, whose reference is dear."""


class Prescribed(LlamaDraftModel):  # type: ignore[misc]
    """Drafts the prescribed text, wrong from a random token on."""

    def __init__(self, rng: random.Random, vocabulary: int) -> None:
        self.text: Sequence[int] = ()
        self._rng = rng
        self._vocabulary = vocabulary

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        """Return the tokens behind `input_ids`, up to a wrong one at random."""
        draft = np.array(self.text[len(input_ids) :][: self._rng.randint(0, LONGEST)], dtype=np.intc)
        wrong = self._rng.randint(0, LONGEST)
        if wrong < len(draft):
            draft[wrong] = (draft[wrong] + self._rng.randrange(1, self._vocabulary)) % self._vocabulary
        return draft


class EveryDraft(DraftLengthPolicy):
    """Allows every draft, whatever it costs."""

    def length(self, most: int) -> int:
        return most


@dataclass
class Outcome:
    """Counts of the patterns on one model."""

    patterns: int = 0
    drafted: int = 0
    accepted: int = 0
    rollbacks: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    ties: int = 0
    """Rows in which two fresh contexts differ, because the batch decides which experts are asked."""


class Trial:
    """A model, a setting and a way of undoing."""

    def __init__(self, model: Path, setting: Setting, seed: int, planes: bool, outcome: Outcome) -> None:
        self._rng = random.Random(seed)
        self._name = f"{model.name}, {setting.name}, {'planes' if planes else 'no planes'}, seed {seed}"
        self._tolerance = setting.tolerance
        self._reference = Reference(model, setting)
        size = self._reference.vocabulary.size
        self._draft = Prescribed(self._rng, size)
        count = PLANES if planes else 0
        self.llm: Llama = setting.open(Llama, model, draft_model=self._draft, draft_planes=count)
        drafts = self.llm.slots.all[0].drafts
        assert drafts is not None
        drafts.policy = EveryDraft(self.llm.runner.meter) if self.llm.runner else drafts.policy
        self.outcome = outcome

    def close(self) -> None:
        self.llm.close()
        self._reference.close()

    def text(self) -> None:
        """A prescribed text, and patterns on it.

        Raises:
            Mismatch: logits differ.
        """
        rng, words = self._rng, self._reference.vocabulary
        prompt = words.text(rng.randint(2, 60), rng.randrange(1 << 30))
        answer = words.text(ANSWER, rng.randrange(1 << 30))
        wanted = self._reference.logits(prompt, answer[:-1])
        for _ in range(PER_TEXT):
            if rng.random() < 0.5:  # leave the history somewhere
                history = (prompt + answer)[: rng.randint(1, len(prompt) + ANSWER)]
                asked = [*history, *words.text(rng.randint(1, 9), rng.randrange(1 << 30))]
                self._ask(asked, words.text(2, rng.randrange(1 << 30)), None)
            self._ask(prompt, answer[: rng.randint(3, ANSWER)], wanted)
            self.outcome.patterns += 1

    def _apart(self, rows: list[Logits], wanted: Logits, prompt: list[int], answer: list[int]) -> list[float]:
        """Return the distance of each row from the wanted one.

        The batches alone may decide if experts, or tokens to attend to, are picked by a threshold. Rows in
        which fresh contexts differ, fed at once or token by token, are ties: either will do.
        """
        apart = [difference(row, right) for row, right in zip(rows, wanted, strict=False)]
        if max(apart) <= self._tolerance:
            return apart
        whole = [*prompt, *answer[:-1]]
        for cuts in ((), range(len(whole))):
            others = self._reference.logits(whole, every=True, cuts=cuts)[len(prompt) - 1 :]
            for i, (row, right, other) in enumerate(zip(rows, wanted, others, strict=False)):
                if apart[i] > self._tolerance < difference(other, right):
                    self.outcome.ties += 1
                    apart[i] = difference(row, other)
        return apart

    def _ask(self, prompt: list[int], answer: list[int], wanted: Logits | None) -> None:
        """Generate `answer`, compare its logits, shape (len(answer), n_vocab)."""
        llm = self.llm
        rows: list[Logits] = []
        self._draft.text = [*prompt, *answer, *answer]

        def prescribe(ids: npt.NDArray[np.intc], scores: Logits) -> Logits:
            token = answer[len(rows)] if len(rows) < len(answer) else 0
            rows.append(scores.copy())
            out = np.full_like(scores, -1e9)
            out[token] = 1e9
            return out

        stream = llm.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([prescribe]))
        with closing(stream):
            said = [*islice(stream, len(answer))]
        if said != answer:
            raise Mismatch(f"{self._name}: said {said} in place of {answer}")
        if wanted is None:
            wanted = self._reference.logits(prompt, answer[:-1])
        apart = self._apart(rows, wanted, prompt, answer)
        worst = max(apart)
        self.outcome.worst = max(self.outcome.worst, worst)
        if not worst <= self._tolerance:
            raise Mismatch(f"{self._name}: logits of token {apart.index(worst)} are {worst:.1e} apart")
        live, given = llm.runner.live if llm.runner else None, np.array(prompt + answer)
        if live is None or not live.state.starts_with(given[:-1]) or live.n > len(given):
            raise Mismatch(f"{self._name}: the live sequence is not what was handed out")
        report = llm.last_request
        assert report is not None
        self.outcome.drafted += report.drafted
        self.outcome.accepted += report.accepted
        self.outcome.rollbacks.update(report.rollbacks)


def run(model: Path, seed: int, count: int, until: float) -> Outcome:
    """`count` patterns on `model`, or as many as fit before the clock shows `until` (`time.monotonic`).

    Each setting and way of undoing gets its share of the time, and one text in any case.

    Raises:
        Mismatch: something is wrong.
    """
    outcome = Outcome()
    ways = [(setting, planes) for setting in settings_for(model, SETTINGS) for planes in (False, True)]
    for index, (setting, planes) in enumerate(ways):
        now, before = time.monotonic(), outcome.patterns
        share = now + (until - now) / (len(ways) - index)
        with closing(Trial(model, setting, seed + index, planes, outcome)) as trial:
            while True:
                trial.text()
                if (outcome.patterns - before) * len(ways) >= count or time.monotonic() >= share:
                    break
    return outcome


def _cells(model: Path, _: str, seed: int, count: int, until: float) -> dict[str, object]:
    outcome = run(model, seed, count, until)
    return {
        **{name: getattr(outcome, name) for name in ("patterns", "drafted", "accepted", "ties")},
        **{kind: outcome.rollbacks[kind] for kind in ("cut", "planes", "snapshot")},
        "worst difference": f"{outcome.worst:.1e}",
    }


if __name__ == "__main__":
    main(_cells, ARCHITECTURES)
