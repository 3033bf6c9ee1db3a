"""lm-evaluation-harness' `local-completions` client gets the scores of a fresh context.

Its requests and how it reads the answers: lm_eval/models/openai_completions.py, LocalCompletionsAPI
(_create_payload, parse_logprobs); prompts are token ids, or with `tokenized_requests=False` texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import llama_cpp
import numpy as np
import pytest

from tests.lab.gguf_edits import with_bos
from tests.lab.serving import serving

from .conftest import TinyModel

CHOICES = [" the Danube", " the Matterhorn", " Graz", " a bicycle, é"]
TASK = [f"Question {n}: which of these is number {n}?\n" * 3 + "Answer:" for n in range(5)]
ALONE = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "logits_all": True}


class Fresh:
    """Scores by hand, each from an empty context of stock llama-cpp-python."""

    def __init__(self, model: Path, bos: bool) -> None:
        self.llm = llama_cpp.Llama(str(model), **ALONE)
        self.bos = bos

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.llm.tokenize(text.encode(), add_bos=self.bos, special=True)
        return ids

    def score(self, context: str, choice: str) -> tuple[float, bool]:
        """log p(choice | context), and whether greedy decoding says it."""
        tokens, start = self.tokens(context + choice), len(self.tokens(context))
        self.llm.reset()
        self.llm.eval(tokens)
        rows = np.array(self.llm.scores[start - 1 : len(tokens) - 1], np.float64)
        odds = rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True)
        said = tokens[start:]
        greedy = [int(each) for each in rows.argmax(-1)] == said
        return float(sum(odds[n][token] for n, token in enumerate(said))), greedy


class Harness:
    """The requests of the harness, and its reading of the answers."""

    def __init__(self, http: httpx.Client, tokens: Callable[[str], list[int]], tokenized: bool) -> None:
        self._http = http
        self._tokens = tokens
        self._tokenized = tokenized

    def batch(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """The scores of one request, of as many prompts as the harness's batch size says."""
        texts = [context + choice for context, choice in pairs]
        prompt: Any = [self._tokens(text) for text in texts] if self._tokenized else texts
        asked = {"model": "any", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1}
        answer = self._http.post("/v1/completions", json={**asked, "seed": 1234, "echo": True})
        chosen = sorted(answer.raise_for_status().json()["choices"], key=lambda each: int(each["index"]))
        return [self._read(pair[0], each["logprobs"]) for pair, each in zip(pairs, chosen, strict=True)]

    def _read(self, context: str, told: Any) -> tuple[float, bool]:
        start = len(self._tokens(context))
        assert start > 0
        scores = told["token_logprobs"][start:-1]
        tops = told["top_logprobs"][start:-1]
        return sum(scores), all(p == max(top.values()) for p, top in zip(scores, tops, strict=True))


@pytest.fixture(
    scope="module",
    params=[
        ("qwen35", False),
        ("gemma3", True),
        pytest.param(("qwen35", True), marks=pytest.mark.full),
        pytest.param(("llama", True), marks=pytest.mark.full),
        pytest.param(("mamba", False), marks=pytest.mark.full),
    ],
    ids=lambda param: f"{param[0]}-{'bos' if param[1] else 'no-bos'}",
)
def scorers(
    request: pytest.FixtureRequest, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fresh, httpx.Client]]:
    arch, bos = request.param
    model: Path = tiny_model(arch)
    if bos:
        model = with_bos(model, tmp_path_factory.mktemp("bos") / "bos.gguf")
    fresh = Fresh(model, bos)
    with closing(fresh.llm), serving(model, model={"logits_all": True}) as server, server.client() as http:
        yield fresh, http


def accuracy(scored: Sequence[Sequence[tuple[float, bool]]]) -> float:
    """Of a task whose n-th question has its answer at n, modulo the number of choices."""
    chosen = [max(range(len(CHOICES)), key=lambda n: each[n][0]) for each in scored]
    return float(np.mean([choice == n % len(CHOICES) for n, choice in enumerate(chosen)]))


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("tokenized", [True, False], ids=["ids", "text"])
def test_a_task_has_the_accuracy_that_logits_give_by_hand(
    scorers: tuple[Fresh, httpx.Client], tokenized: bool, batch_size: int
) -> None:
    fresh, http = scorers
    harness = Harness(http, fresh.tokens, tokenized)
    right = [[fresh.score(context, choice) for choice in CHOICES] for context in TASK]
    pairs = [(context, choice) for context in TASK for choice in CHOICES]
    asked = {"prompt": TASK[0], "max_tokens": 6, "temperature": 0, "repeat_penalty": 1.0}
    (said,) = http.post("/v1/completions", json=asked).json()["choices"]
    greedy = harness.batch([(TASK[0], said["text"]), (TASK[0], said["text"] + "\x01")])
    assert [each for _, each in greedy] == [True, False]
    batches = [pairs[at : at + batch_size] for at in range(0, len(pairs), batch_size)]
    scored = list(chain.from_iterable(map(harness.batch, batches)))
    got = [scored[at : at + len(CHOICES)] for at in range(0, len(scored), len(CHOICES))]
    assert accuracy(got) == accuracy(right)
    for ours, theirs in zip(scored, chain.from_iterable(right), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-2)
        assert ours[1] is theirs[1]


@pytest.mark.parametrize("tokenized", [True, False], ids=["ids", "text"])
@pytest.mark.parametrize("more", [{"max_tokens": 4}, {"max_tokens": 0}, {"logit_bias": {"258": 100}}])
def test_each_token_of_prompt_and_answer_has_one_score(
    scorers: tuple[Fresh, httpx.Client], tokenized: bool, more: dict[str, Any]
) -> None:
    """An answer that ends at once, too: the harness takes its last score for the answer's."""
    fresh, http = scorers
    text = "Größe: 5 €"
    tokens = fresh.tokens(text)
    asked = {"prompt": tokens if tokenized else text, "temperature": 0, "max_tokens": 1, "logprobs": 2}
    answer = http.post("/v1/completions", json={**asked, "echo": True, **more}).raise_for_status().json()
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    lengths = {len(each) for each in told.values()}
    assert lengths == {answer["usage"]["total_tokens"]}
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert answer["usage"]["completion_tokens"] == more.get("max_tokens", 1)
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert None not in told["token_logprobs"][1:]
    assert choice["text"].startswith(text)
    begins = told["text_offset"]
    assert begins == sorted(begins)
    assert begins[len(tokens) :] == [len(text) + n for n in range(len(begins) - len(tokens))]
    assert told["tokens"][-1] in ("<|im_end|>", choice["text"][-1]) or more.get("max_tokens") == 0
