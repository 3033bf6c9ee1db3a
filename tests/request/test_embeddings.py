"""Vectors and chats from one model: upstream's numbers, and chats that keep their state."""

import pickle
from functools import partial
from itertools import islice

import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_cpp as native

from llamahybrid.capi.gguf import Gguf
from llamahybrid.devices import ggml
from llamahybrid.engine import loaded
from llamahybrid.errors import LlamaHybridError, ModelClosed, RequestCancelled
from llamahybrid.memory.vectors import embeds_only
from tests.lab.waiting import wait_until
from tests.memory.conftest import write_lora
from tests.request.asking import WORDS, Started, begin, take, together, waits_for_reply

ARCHS = ("qwen35", "gemma3")
TEXTS = ["one", "of the second text a little more", "three", "word " * 40, "and the last of them"]
POOLING = {
    "none": llama_cpp.LLAMA_POOLING_TYPE_NONE,
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "first": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
}


def close_to(one, other):
    return np.allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize("pooling", POOLING)
@pytest.mark.parametrize("arch", ARCHS)
def test_vectors_are_those_of_upstream(opened, arch, pooling):
    options = {"embedding": True, "pooling_type": POOLING[pooling]}
    llm, stock = opened(arch, **options), opened(arch, llama_cpp.Llama, **options)
    alone = [stock.embed(text) for text in TEXTS]
    assert [llm.embed(text) for text in TEXTS] == alone
    assert llm.embed(TEXTS[1], normalize=True, return_count=True) == stock.embed(
        TEXTS[1], normalize=True, return_count=True
    )
    together = llm.embed(TEXTS)
    if pooling != "none":  # where upstream reads the wrong numbers
        assert together == stock.embed(TEXTS)
    assert all(close_to(np.array(a), np.array(b)) for a, b in zip(together, alone, strict=True))
    made, theirs = llm.create_embedding(TEXTS, model="x"), stock.create_embedding(TEXTS, model="x")
    assert made["usage"] == theirs["usage"]
    assert [each["index"] for each in made["data"]] == list(range(len(TEXTS)))


@pytest.mark.parametrize("arch", ARCHS)
def test_texts_longer_than_a_batch_are_cut_off_or_refused_as_upstream_does(opened, arch):
    llm, stock = opened(arch, embedding=True), opened(arch, llama_cpp.Llama, embedding=True)
    text = "word " * 200
    assert llm.embed(text, return_count=True) == stock.embed(text, return_count=True)
    for each in (llm, stock):
        with pytest.raises(ValueError, match="exceed batch size of 64"):
            each.embed(text, truncate=False)


def test_text_is_pooled_as_a_whole_with_any_ubatch(opened):
    options = {"embedding": True, "pooling_type": POOLING["mean"]}
    whole, cut = opened("gemma3", **options), opened("gemma3", n_ubatch=16, **options)
    assert cut.embed(TEXTS) == whole.embed(TEXTS)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("arch", ARCHS)
def test_texts_are_embedded_while_a_stream_is_open(opened, stock, arch, slots):
    llm = opened(arch, embedding=True, n_parallel=slots)
    wanted = opened(arch, embedding=True).embed(TEXTS)
    stream, said = begin(llm, WORDS[:100], 3)
    for _ in range(4):
        assert llm.embed(TEXTS) == wanted
        said += islice(stream, 2)
    assert said == stock(arch)(WORDS[:100], 11)
    assert llm.last_request.decoded <= 100 + 11, "the stream had its slot all the time"
    stream.close()
    prompt = [*WORDS[:100], *said, *WORDS[300:340]]
    assert take(llm, prompt) == stock(arch)(prompt)
    assert llm.last_request.cached >= 100


def test_threads_embed_while_others_chat(opened, stock):
    llm, right = opened("gemma3", embedding=True, n_parallel=2, pooling_type=POOLING["last"]), stock("gemma3")
    wanted = [llm.embed(text) for text in TEXTS]
    prompts = [WORDS[seed : seed + 120] for seed in range(3)]
    jobs = [*(partial(take, llm, prompt, 12) for prompt in prompts), *(partial(llm.embed, t) for t in TEXTS)]
    said = together(*(lambda job=job: [job() for _ in range(4)] for job in jobs))
    assert said == [[each] * 4 for each in (*(right(prompt, 12) for prompt in prompts), *wanted)]


def test_texts_that_wait_take_turns_with_the_batches_of_a_prompt(opened):
    llm, asked, made, seen = opened("gemma3", embedding=True, n_batch=32), [], [], []

    def embed():
        asked.append(None)
        made.append(llm.embed("x"))

    threads = []

    def look(progress):  # in the loop's thread, before the first batch and after each
        if not seen:
            threads.extend(Started(embed) for _ in range(3))
            wait_until(lambda: all(map(waits_for_reply, threads)))
        wait_until(
            lambda: len(made) >= min(len(seen) - 1, len(threads))
        )  # none is read before the first batch
        seen.append(len(made))

    with llm.request(on_progress=look):
        take(llm, WORDS[:300], 1)
    assert seen[:6] == [0, 0, 1, 2, 3, 3]


def test_a_processor_may_embed_inside_its_own_request(opened):
    llm = opened(embedding=True)
    wanted, found = llm.embed("x"), []

    def processor(_, row):
        found.append(llm.embed("x"))
        return row

    processors = llama_cpp.LogitsProcessorList([processor])
    llm.create_completion([5, 6, 7], max_tokens=3, temperature=0, logits_processor=processors)
    assert found == [wanted] * 3


@pytest.mark.parametrize("by", ["model", "handle"])
def test_embedding_is_cancelled_between_two_batches(opened, by):
    llm = opened(embedding=True)
    begun = []

    def texts(cancel):
        for text in TEXTS:
            begun.append(text)
            yield text
            if len(begun) == 3:
                cancel()

    with llm.request() as handle, pytest.raises(RequestCancelled):
        llm.embed(texts(llm.cancel if by == "model" else handle.cancel))
    assert len(begun) < len(TEXTS)
    assert len(llm.embed(TEXTS)) == len(TEXTS)


def test_embedding_ends_with_its_model(opened):
    llm = opened(embedding=True)
    closing = []

    def texts():
        yield from TEXTS
        closing.append(Started(llm.close))
        while True:  # until the loop takes no more of them
            yield "more"

    with pytest.raises(ModelClosed):
        llm.embed(texts())
    closing[0].result()
    with pytest.raises(ModelClosed):
        llm.embed("x")


def test_texts_without_tokens(opened):
    llm, pooled = opened(embedding=True), opened(embedding=True, pooling_type=POOLING["mean"])
    assert llm.embed([]) == []
    assert llm.embed(["", "x"]) == [[], llm.embed("x")]
    for nothing in ("", ["x", ""]):
        with pytest.raises(ValueError, match="nothing to embed"):
            pooled.embed(nothing)


def test_an_adapter_of_the_model_is_on_its_embeddings(opened, tmp_path):
    path = write_lora(tmp_path / "lora.gguf", "qwen35", 1)
    options = {"embedding": True, "lora_path": str(path), "lora_scale": 0.5}
    made = opened(**options).embed("some words")
    assert made == opened("qwen35", llama_cpp.Llama, **options).embed("some words")
    assert made != opened(embedding=True).embed("some words")


def test_embedding_after_a_change_of_the_context_is_refused(opened):
    llm = opened("gemma3", embedding=True)
    llm.embed("x")
    native.llama_set_causal_attn(llm._ctx.ctx, False)
    with pytest.raises(LlamaHybridError, match="open it with"):
        llm.embed("x")


def test_pickled_model_embeds(opened):
    llm = opened(embedding=True)
    copy = pickle.loads(pickle.dumps(llm))
    assert copy.embed("x") == llm.embed("x")
    copy.close()


def test_a_quantized_v_has_flash_attention_in_the_context_of_vectors(opened, monkeypatch):
    """As on a GPU, where the chats' context has it by default; the library refuses the pair otherwise."""
    monkeypatch.setattr(ggml, "gpus", lambda: ["a GPU"])
    llm = opened("llama", embedding=True, n_gpu_layers=-1, type_v=native.GGML_TYPE_Q8_0)
    assert llm.embed("x")


@pytest.mark.parametrize(
    ("told", "alone"),
    [
        ({}, False),
        ({"qwen3.pooling_type": 0, "qwen3.attention.causal": True}, False),
        ({"qwen3.pooling_type": 3}, True),
        ({"qwen3.attention.causal": False}, True),
    ],
)
def test_a_file_tells_that_its_model_does_not_chat(tmp_path, told, alone):
    path = tmp_path / "head.gguf"
    with Gguf() as gguf:
        gguf.set({"general.architecture": "qwen3", **told})
        gguf.write(path)
    assert embeds_only(str(path), {}) is alone


def test_models_that_do_not_chat_are_upstreams(opened):
    asked = {"embedding": True, "attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL}
    llm, stock = opened("gemma3", **asked), opened("gemma3", llama_cpp.Llama, **asked)
    assert llm.prompt_cache is None
    assert llm.embeds
    assert llm.embed("some words") == stock.embed("some words")


@pytest.mark.parametrize("alone", [False, True])
def test_a_reranker_gives_one_score_a_text_and_no_memory_behind_it(opened, alone):
    asked = {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_RANK}
    if alone:
        asked["attention_type"] = llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL
    llm, stock = opened("gemma3", **asked), opened("gemma3", llama_cpp.Llama, **asked)
    assert (llm.prompt_cache is None) == alone
    assert llm.embed(TEXTS[0]) == stock.embed(TEXTS[0])[:1]  # upstream reads as many as the model is wide
    assert [len(each) for each in llm.embed(TEXTS[:3])] == [1, 1, 1]
    assert llm.embed(TEXTS[0], normalize=True, return_count=True)[0] in ([1.0], [-1.0])
    assert len(llm.create_embedding(TEXTS[0])["data"][0]["embedding"]) == 1


@pytest.mark.parametrize("texts", ["text", ["text"], [], None])
def test_a_model_that_was_opened_without_embeddings_says_so(opened, texts):
    with pytest.raises(RuntimeError, match="embedding=True"):
        opened().embed(texts)


def test_a_model_whose_rows_are_wider_than_its_embeddings_does_not_end_the_process(opened):
    """Unless patch 0024 is in the library (llama.cpp, src/llama-context.cpp, decode)."""
    llm = opened("qwen4exp", embedding=True)
    if "0024" in loaded.patches():
        assert np.shape(llm.embed("one"))[-1] == llm.n_embd()
    else:
        with pytest.raises(LlamaHybridError, match="would end the process"):
            llm.embed("one")
    assert take(llm, [5, 6, 7], 2)
