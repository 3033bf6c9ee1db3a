"""Arguments drawn at random: a program that swaps the import gets upstream's results, errors and tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

STEPS = 25
USER = {"role": "user", "content": "Hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def raised(ids: Any, scores: Any) -> Any:
    """A logits processor that prefers a token by the number of those before it."""
    scores = np.copy(scores)
    scores[len(ids) % 50] += 3
    return scores


SAMPLING: dict[str, list[Any]] = {
    "temperature": [0, 1.0, -1.0, float("inf"), None, "1"],
    "top_p": [0.0, 0.5, -1, 2, None],
    "min_p": [0, 0.5, 2.0],
    "typical_p": [0.5, 0.0],
    "top_k": [0, -1, 5, 10**6, 2.5, None],
    "frequency_penalty": [1.5, -2],
    "presence_penalty": [1.5, -2],
    "repeat_penalty": [1.3, 0.5],
    "mirostat_mode": [1, 2, 3, None],
    "logits_processor": [LogitsProcessorList([raised]), LogitsProcessorList(), [raised]],
    "grammar": [LlamaGrammar.from_string('root ::= "a" "b"*', verbose=False), "root", 5],
    "stopping_criteria": [StoppingCriteriaList(), StoppingCriteriaList([lambda ids, _: len(ids) > 20])],
}
COMPLETION: dict[str, list[Any]] = {
    **SAMPLING,
    "seed": [0, 1, 2**32, 2**40, "x", 1.5],
    "max_tokens": [None, 0, -1, 1, 2.5, "3", True, 10**9],
    "stop": [None, "", "e", ["zzz", " "], ("e",), [b"a"], 5, [None]],
    "logit_bias": [{}, {7: 5.0}, {"7": 5}, [1]],
    "model": ["x", ""],
    "suffix": ["", "end", 5],
    "echo": [True],
    "logprobs": [0, 3],
    "bogus": [1],
}
CHAT: dict[str, list[Any]] = {
    **{name: values for name, values in COMPLETION.items() if name not in ("suffix", "echo", "bogus")},
    "tools": [[], [TOOL]],
    "tool_choice": ["auto", "none", {"type": "function", "function": {"name": "f"}}],
    "response_format": [{"type": "text"}, {"type": "zzz"}, {}],
    "logprobs": [True, False],
    "top_logprobs": [0, 2, 25],
}
del CHAT["stopping_criteria"]
PROMPTS: list[Any] = [
    "Hello world",
    "é€😀 x",
    "\x00a",
    [1, 2, 3],
    [7] * 10,
    (1, 2),
    ["a"],
    [1, 10**6],
    None,
    5,
]
MESSAGES: list[Any] = [[USER], [USER, {**USER, "role": "zzz"}], [], None, "text", [{"role": "user"}], (USER,)]


def drawn(draw: random.Random, among: dict[str, list[Any]]) -> dict[str, Any]:
    """Some of the arguments.

    A bias beside processors makes upstream forget both, and `echo` takes prompts of ids here.
    """
    options = {name: draw.choice(among[name]) for name in draw.sample(sorted(among), draw.randint(0, 3))}
    if "logit_bias" in options:
        options.pop("logits_processor", None)
    return options


def steps(draw: random.Random) -> Iterator[Callable[[Any], Any]]:
    """Calls of methods, the same for each model."""
    for _ in range(STEPS):
        prompt, messages = draw.choice(PROMPTS), draw.choice(MESSAGES)
        options, asked = drawn(draw, COMPLETION), {"max_tokens": 6, **drawn(draw, CHAT)}
        if not isinstance(prompt, str):
            options.pop("echo", None)
        if prompt is None or isinstance(prompt, int):
            options = {}  # one error at a time
        seed = draw.choice([1, 2**40, True])
        tokens = draw.choice([each for each in PROMPTS if not isinstance(each, str)])
        sampled = {name.replace("temperature", "temp"): each for name, each in drawn(draw, SAMPLING).items()}
        yield draw.choice(
            [
                lambda llm, p=prompt, o=options: llm.create_completion(p, **o),
                lambda llm, p=prompt, o=options: llm(p, **o),
                lambda llm, m=messages, o=asked: llm.create_chat_completion(m, **o),
                lambda llm, t=tokens, o=sampled: [
                    t for t, _ in zip(llm.generate(t, **o), "123", strict=False)
                ],
                lambda llm, t=tokens: llm.eval(t),
                lambda llm, s=seed: llm.set_seed(s),
                lambda llm, p=prompt: llm.tokenize(p),
                lambda llm, t=tokens: llm.embed(t),
                lambda llm: llm.load_state(llm.save_state()),
                lambda llm: llm.save_state().seed,
                lambda llm: llm.eval_tokens,
            ]
        )


def plain(told: Any) -> Any:
    """A result without ids, times and what llamahybrid adds; fractions to two places."""
    if isinstance(told, dict):
        added = ("id", "created", "prompt_tokens_details", "completion_tokens_details")
        return {name: plain(each) for name, each in told.items() if name not in added}
    if isinstance(told, (list, tuple)):
        return [plain(each) for each in told]
    return round(float(told), 2) if isinstance(told, (float, np.floating)) else told


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 40))]
)
@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_drawn_arguments_have_upstreams_results(opened, arch, seed):
    options = {"n_ctx": 256, "n_batch": 32, "logits_all": seed % 2 == 0}
    ours, stock = opened(arch, **options), opened(arch, llama_cpp.Llama, **options)
    for number, step in enumerate(steps(random.Random(seed))):
        try:
            told = plain(step(stock))
        except Exception as error:
            with pytest.raises(type(error)):
                step(ours)
            for llm in (ours, stock):  # a batch that failed half-way leaves upstream's begun
                llm.reset()
        else:
            assert plain(step(ours)) == told, f"step {number}"
            assert ours._input_ids.tolist() == stock._input_ids.tolist(), f"step {number}"
        assert ours._seed == stock._seed, f"step {number}"
