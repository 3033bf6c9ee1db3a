"""Sampling: tokens are upstream's, and nothing that a grammar or a missing row does ends the process."""

from contextlib import closing
from itertools import islice

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList
from llama_cpp.llama_speculative import LlamaDraftModel

from llamahybrid import Llama
from llamahybrid.capi.gbnf import require_grammar
from llamahybrid.errors import LlamaHybridError
from tests.lab.draft_fuzz import EveryDraft

PROMPT = [(7 * i + 1) % 200 for i in range(30)]
SETTINGS = {"greedy": {"temp": 0.0}, "warm": {"temp": 1.5, "top_k": 50}, "mirostat": {"mirostat_mode": 2}}


@pytest.fixture
def llm(tiny_model):
    llm = Llama(str(tiny_model("llama")), n_ctx=256, n_threads=1, verbose=False, seed=5)
    llm.eval(PROMPT)
    yield llm
    llm.close()


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("grammar", [None, 'root ::= "a"+'])
def test_without_logits_nothing_is_sampled_and_the_process_goes_on(tiny_model, fresh, n_parallel, grammar):
    """The library would end it, and so would a row that no token of the last batch has."""
    grammar = None if grammar is None else LlamaGrammar.from_string(grammar, verbose=False)
    path = str(tiny_model("llama"))
    with closing(Llama(path, n_parallel=n_parallel, n_ctx=256, n_threads=1, verbose=False)) as llm:
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
        wanted = fresh(PROMPT, 1, "llama", n_ctx=256)
        assert [llm.sample(temp=0.0)] == wanted, "with no sampler that was left by the failed one"


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


def test_a_grammar_that_can_be_read_is_used(llm):
    quoted = 'root ::= "' + "(" * 5000 + '"  # ((((\n'
    for grammar in ('root ::= ("a" | ("b"))', quoted, 'root ::= [(] | "\\"(" '):
        require_grammar(llm._model.vocab, LlamaGrammar.from_string(grammar, verbose=False))
    made = LlamaGrammar.from_string('root ::= "yes"', verbose=False)
    assert llm.create_completion(PROMPT, max_tokens=9, grammar=made)["choices"][0]["text"] == "yes"


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("end", ["[b-a]", '"\\UFFFFFFFF"'])
def test_a_grammar_that_leads_nowhere_is_an_error_and_not_the_end(tiny_model, end, n_parallel):
    """The library accepts a token that it forbade, and the process dies."""
    options = {"n_ctx": 256, "n_threads": 1, "verbose": False, "n_parallel": n_parallel}
    with closing(Llama(str(tiny_model("llama")), **options)) as llm:
        for how in (SETTINGS["greedy"], SETTINGS["mirostat"]):
            how = {"temperature" if name == "temp" else name: value for name, value in how.items()}
            made = LlamaGrammar.from_string(f'root ::= "a" {end}', verbose=False)
            with pytest.raises(LlamaHybridError, match="leads nowhere"):
                llm.create_completion(PROMPT, max_tokens=5, grammar=made, **how)
            with pytest.raises(LlamaHybridError, match="leads nowhere"):
                list(llm.create_completion(PROMPT, max_tokens=5, grammar=made, stream=True, **how))
        assert llm.create_completion(PROMPT, max_tokens=2)["choices"]
        assert llm.last_request.cached >= len(PROMPT) - 1


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("prompt_cache", [True, False])
def test_a_grammar_s_tokens_are_upstream_s(tiny_model, how, prompt_cache):
    options = {"n_ctx": 256, "n_threads": 1, "verbose": False, "seed": 5}

    def said(of):
        made = LlamaGrammar.from_string("root ::= [a-z]+", verbose=False)
        of.reset()
        of.eval(PROMPT)
        sampler = of._init_sampler(grammar=made, **SETTINGS[how])
        return [sampler.sample(of._ctx) for _ in range(20)]

    path = str(tiny_model("llama"))
    with (
        closing(llama_cpp.Llama(path, **options)) as stock,
        closing(Llama(path, prompt_cache=prompt_cache, **options)) as llm,
    ):
        assert said(llm) == said(stock)


def test_processor_is_shown_preceding_tokens_and_no_guesses(tiny_model):
    """Upstream shows the whole draft: what is forced, say a form to fill in, then depends on the guesses."""
    options = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
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

    with closing(llama_cpp.Llama(str(tiny_model("qwen35")), **options)) as stock:
        said, wanted = answer(stock)
    with closing(Llama(str(tiny_model("qwen35")), draft_model=Guesses(), **options)) as llm:
        llm.drafts.policy = EveryDraft(llm.runner.meter)
        assert answer(llm) == (said, wanted)
        assert llm.last_request.accepted
