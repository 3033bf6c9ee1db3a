"""Sampling: tokens are upstream's, and nothing that a grammar or a missing row does ends the process."""

import threading
from contextlib import closing
from itertools import islice

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList
from llama_cpp.llama_speculative import LlamaDraftModel

from llamahybrid import Llama
from llamahybrid.capi.gbnf import require_grammar
from llamahybrid.capi.samplers import TokenBias
from llamahybrid.client.sampling import RowSampler
from llamahybrid.errors import LlamaHybridError
from tests.lab.draft_fuzz import EveryDraft

PROMPT = [(7 * i + 1) % 200 for i in range(30)]
SETTINGS = {"greedy": {"temp": 0.0}, "warm": {"temp": 1.5, "top_k": 50}, "mirostat": {"mirostat_mode": 2}}


@pytest.fixture
def llm(open_model):
    llm = open_model("llama")
    llm.eval(PROMPT)
    return llm


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("grammar", [None, 'root ::= "a"+'])
def test_without_logits_nothing_is_sampled_and_the_process_goes_on(open_model, fresh, n_parallel, grammar):
    """The library would end it, and so would a row that no token of the last batch has."""
    grammar = None if grammar is None else LlamaGrammar.from_string(grammar, verbose=False)
    llm = open_model("llama", n_parallel=n_parallel)
    sampler = llm._init_sampler(temp=0.0, grammar=grammar)
    for row in (7, -9):
        with pytest.raises(LlamaHybridError, match="no logits"):
            sampler.sample(llm._ctx, row)
    llm.eval(PROMPT)
    with pytest.raises(LlamaHybridError, match="no logits"):
        llm.sample(temp=0.0, idx=0, grammar=grammar)
    assert 0 <= llm.sample(temp=0.0, grammar=grammar) < llm.n_vocab()
    llm.reset()
    llm.eval(PROMPT)
    assert [llm.sample(temp=0.0)] == fresh(PROMPT, 1, "llama"), "the failed one left no sampler"


def test_a_closed_context_is_not_sampled_from(llm):
    sampler = llm._init_sampler(temp=0.0)
    llm.close()
    with pytest.raises(LlamaHybridError, match="no logits"):
        sampler.sample(llm._ctx)


@pytest.mark.parametrize(
    "grammar",
    [
        "garbage",
        'other ::= "a"',
        'root ::= root "a"',
        "root ::= " + "(" * 30000 + '"a"' + ")" * 30000,
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(150_000)) + 'r150000 ::= "a"',
    ],
)
def test_a_grammar_that_cannot_be_read_is_an_error_and_not_the_end(llm, grammar):
    """Upstream samples from a sampler that is none, and the process dies."""
    made = LlamaGrammar.from_string(grammar, verbose=False)
    with pytest.raises(ValueError, match="grammar"):
        llm.create_completion(PROMPT, max_tokens=2, grammar=made)
    with pytest.raises(ValueError, match="grammar"):
        llm.sample(grammar=made)
    assert llm.create_completion(PROMPT, max_tokens=2)["choices"]


@pytest.mark.parametrize(
    ("rule", "column", "why"),
    [
        ('"a', 1, "it has no end, or an escape that is none"),
        (r'"\q"', 1, "it has no end, or an escape that is none"),
        ("[a-z", 1, "it has no end, or an escape that is none"),
        ('"a"{}', 4, "a number of repetitions is missing"),
        ('"a"{,2}', 4, "a number of repetitions is missing"),
        ("<think", 1, "a token is <name> or <[id]>"),
        ("!x", 1, "a token is <name> or <[id]>"),
        ('("a"', 5, "a ) is missing"),
        ('("a" & "b")', 6, "a ) is missing"),
        ('"a" & "b"', 5, "a rule ends with its line"),
        ('"a")', 4, "a rule ends with its line"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else str(value),
)
def test_the_error_of_a_grammar_says_what_is_wrong_where(llm, rule, column, why):
    made = LlamaGrammar.from_string("root ::= " + rule, verbose=False)
    with pytest.raises(ValueError, match="cannot be read") as error:
        require_grammar(llm._model.vocab, made)
    assert str(error.value) == f"the grammar cannot be read: line 1, column {column + 9}: {why}"


def test_a_grammar_that_would_take_much_memory_is_refused_before_it_is_matched(llm):
    made = LlamaGrammar.from_string('root ::= "a" #' + 4_000_000 * "x", verbose=False)
    with pytest.raises(ValueError, match="more than 4,000,000 bytes"):
        require_grammar(llm._model.vocab, made)


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_a_logits_processor_that_is_in_no_list_is_an_error(open_model, n_parallel):
    """Upstream's callback fails at it, and samples as without it."""
    llm, seen = open_model("llama", n_parallel=n_parallel), []

    def process(ids, scores):
        seen.append(len(ids))
        return scores

    class Indexed:
        def __getitem__(self, index):
            return [process][index]

    for call in (llm.create_completion, lambda prompt, **how: next(llm.generate(prompt, **how))):
        with pytest.raises(TypeError, match="logits_processor takes a LogitsProcessorList"):
            call(PROMPT, logits_processor=process)
    assert not seen
    llm.create_completion(PROMPT, max_tokens=2, logits_processor=Indexed())
    assert seen == [len(PROMPT), len(PROMPT) + 1]


def test_a_grammar_that_can_be_read_is_used(llm):
    quoted = 'root ::= "' + "(" * 5000 + '"  # ((((\n'
    for grammar in ('root ::= ("a" | ("b"))', quoted, 'root ::= [(] | "\\"(" '):
        require_grammar(llm._model.vocab, LlamaGrammar.from_string(grammar, verbose=False))
    made = LlamaGrammar.from_string('root ::= "yes"', verbose=False)
    assert llm.create_completion(PROMPT, max_tokens=9, grammar=made)["choices"][0]["text"] == "yes"


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("end", ["[b-a]", '"\\UFFFFFFFF"'])
def test_a_grammar_that_leads_nowhere_is_an_error_and_not_the_end(open_model, end, n_parallel):
    """The library accepts a token that it forbade, and the process dies."""
    llm = open_model("llama", n_parallel=n_parallel)
    for how in ({"temperature": 0.0}, {"mirostat_mode": 2}):
        how["grammar"] = LlamaGrammar.from_string(f'root ::= "a" {end}', verbose=False)
        with pytest.raises(LlamaHybridError, match="leads nowhere"):
            llm.create_completion(PROMPT, max_tokens=5, **how)
        with pytest.raises(LlamaHybridError, match="leads nowhere"):
            list(llm.create_completion(PROMPT, max_tokens=5, stream=True, **how))
    assert llm.create_completion(PROMPT, max_tokens=2)["choices"]
    assert llm.last_request.cached >= len(PROMPT) - 1


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("prompt_cache", [True, False])
def test_a_grammar_s_tokens_are_upstream_s(open_model, how, prompt_cache):
    def said(of):
        made = LlamaGrammar.from_string("root ::= [a-z]+", verbose=False)
        of.eval(PROMPT)
        sampler = of._init_sampler(grammar=made, **SETTINGS[how])
        return [sampler.sample(of._ctx) for _ in range(20)]

    stock = open_model("llama", llama_cpp.Llama, seed=5)
    assert said(open_model("llama", prompt_cache=prompt_cache, seed=5)) == said(stock)


def test_processor_is_shown_preceding_tokens_and_no_guesses(open_model):
    """Upstream shows the whole draft: what is forced, say a form to fill in, then depends on the guesses."""
    said = []

    class Guesses(LlamaDraftModel):
        def __call__(self, input_ids, /, **kwargs):
            start = len(input_ids) - len(PROMPT)
            return np.array([*said[start : start + 3], 7, 7], dtype=np.intc)

    def answer(of):
        seen = []

        def next_of(ids, scores):
            seen.append(ids.tolist())
            forced = np.full_like(scores, -1e9)
            forced[(31 * len(ids) + int(ids[-1])) % len(scores)] = 0
            return forced

        processors = LogitsProcessorList([next_of])
        stream = of.generate(PROMPT, temp=0.0, logits_processor=processors)
        with closing(stream):
            return list(islice(stream, 20)), seen

    said, wanted = answer(open_model(cls=llama_cpp.Llama))
    llm = open_model(draft_model=Guesses())
    llm.slots.all[0].drafts.policy = EveryDraft(llm.runner.meter)
    assert answer(llm) == (said, wanted)
    assert llm.last_request.accepted


SOME, NEVER = range(32, 127), -1e30
BIASED = {  # the request, what it adds to which logits, and for how many tokens
    "logit_bias": ({"logit_bias": {70: 4.0, "-3": 2.5}}, {70: 4.0, -3: 2.5}, 99),
    "first": ({"logits_processor": [TokenBias(SOME, NEVER, 3)]}, dict.fromkeys(SOME, NEVER), 3),
    "all": ({"logits_processor": [TokenBias(range(60, 90), 9.0)]}, dict.fromkeys(range(60, 90), 9.0), 99),
}


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1.5, "repeat_penalty": 1.5}])
@pytest.mark.parametrize(("asked", "added", "first"), BIASED.values(), ids=BIASED)
def test_biases_are_added_by_the_library_and_the_answer_runs_ahead(
    open_model, monkeypatch, asked, added, first, how
):
    """The tokens are those of a processor that adds the same numbers in the caller's thread."""

    def add(ids, scores):
        scores = np.array(scores)
        if len(ids) < len(PROMPT) + first:
            scores[list(added)] += np.array(list(added.values()), np.float32)
        return scores

    llm, threads, inner = open_model("llama"), set(), RowSampler.sample_at
    watched = lambda *args: (threads.add(threading.current_thread()), inner(*args))[1]  # noqa: E731
    monkeypatch.setattr(RowSampler, "sample_at", watched)

    def said(**more):
        threads.clear()
        return llm.create_completion(PROMPT, max_tokens=20, seed=3, **how, **more)["choices"][0]["text"]

    right = said(logits_processor=LogitsProcessorList([add]))
    assert threads == {threading.current_thread()}
    assert said(**asked) == right != said()
    assert threading.current_thread() not in threads
    with pytest.raises(IndexError):
        said(logit_bias={llm.n_vocab(): 1.0})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_parallel", [1, 2])
def test_an_exception_of_a_logits_processor_reaches_the_caller(open_model, stream, n_parallel):
    """ctypes drops exceptions of callbacks: the answer went on without the processor."""
    llm = open_model("llama", n_parallel=n_parallel)

    def late(ids, scores):
        if len(ids) > len(PROMPT) + 2:
            raise KeyError("mine")
        return scores

    def answer(processor):
        made = llm.create_completion(
            PROMPT, max_tokens=8, temperature=0.0, logits_processor=processor, stream=stream
        )
        return "".join(c["choices"][0]["text"] for c in (made if stream else [made]))

    with pytest.raises(KeyError, match="mine"):
        answer(LogitsProcessorList([late]))
    assert answer(None) == answer(LogitsProcessorList([lambda ids, scores: scores]))


def test_an_infinite_bias_brings_no_forbidden_token_back():
    biased = TokenBias([0, 1], [float("inf"), 1.0])([], np.array([-np.inf, 1.0], np.float32))
    assert biased.tolist() == [-np.inf, 2.0]


def test_biases_are_processors_for_code_that_calls_a_list_of_them(open_model):
    """A subclass has the list of its `generate`, as upstream allows."""
    seen = []

    class Own(Llama):
        def generate(self, tokens, **options):
            row = np.zeros(self.n_vocab(), np.float32)
            seen.append(options["logits_processor"](tokens, row)[70])
            yield from super().generate(tokens, **options)

    llm = open_model("llama", cls=Own)
    llm.create_completion(PROMPT, max_tokens=2, logit_bias={70: 4.0})
    assert seen == [4.0]
    first, row = LogitsProcessorList([TokenBias([0], -9.0, 2)]), np.zeros(1, np.float32)
    assert [first([1] * n, row)[0] for n in (5, 6, 7, 5)] == [-9.0, -9.0, 0.0, -9.0]
