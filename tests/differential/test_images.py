"""Images decoded natively, as the multimodal chat handlers do: content without ids is never mixed up."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import llama_cpp
import numpy as np
import pytest

from llamahybrid.errors import ContextOverflow, DecodeError, LlamaHybridError, RequestSuperseded
from tests.lab.reference import SETTINGS

SIDE = 4  # an "image" is SIDE x SIDE embeddings: 16 cells, with M-RoPE at 4 positions


def decode_image(llm, seed):
    """Decode random embeddings as mtmd does, and set `n_tokens` to the next free position as handlers do.

    M-RoPE: all cells share one temporal position and four position planes are given; the image takes SIDE
    positions. Without M-RoPE each cell has a position (mtmd.cpp `mtmd_image_tokens_get_decoder_pos`).
    """
    count, start, width = SIDE * SIDE, llm.n_tokens, llm.n_embd()
    embeddings = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32) * 0.05
    if has_mrope(llm):
        row, column = np.divmod(np.arange(count), SIDE)
        planes = [np.full(count, start), start + row, start + column, np.zeros(count)]
    else:
        planes = [start + np.arange(count)]
    positions = np.concatenate(planes).astype(np.int32)
    sequences = (ctypes.POINTER(ctypes.c_int32) * count)(*([(ctypes.c_int32 * 1)(0)] * count))
    batch = llama_cpp.llama_batch(
        n_tokens=count,
        embd=embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        pos=positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
        n_seq_id=(ctypes.c_int32 * count)(*([1] * count)),
        seq_id=sequences,
        logits=(ctypes.c_int8 * count)(),
    )
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    llm.n_tokens = start + positions_taken(llm)


def has_mrope(llm):
    types = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
    return llama_cpp.llama_model_rope_type(llm.model) in types


def positions_taken(llm):
    return SIDE if has_mrope(llm) else SIDE * SIDE


def ask_about_image(llm, seed, before=(10, 11, 12, 13), after=(20, 21, 22)):
    """Run a request as the multimodal handlers of llama_chat_format.py do; return the greedy text."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    llm.eval(list(before))
    decode_image(llm, seed)
    llm.eval(list(after))
    prompt = llm.input_ids[: llm.n_tokens].tolist()
    return llm.create_completion(prompt, max_tokens=8, temperature=0)["choices"][0]["text"]


@pytest.fixture(params=["qwen35", "llama", pytest.param("jamba", marks=pytest.mark.full)])
def model(request, tiny_model):
    return tiny_model(request.param)


@pytest.fixture
def stock(model):
    """`stock(seed)`: what a fresh stock `Llama` says about that image."""

    def say(seed):
        llm = SETTINGS[0].open(llama_cpp.Llama, model)
        try:
            llm.input_ids[:] = 7
            return ask_about_image(llm, seed)
        finally:
            llm.close()

    return say


def fill_ids(llm):
    """Leave a text behind, so that the ids where an image will be are those of that text."""
    llm.eval([7] * 64)


def test_two_images_in_the_same_place(opened, model, stock):
    assert stock(1) != stock(2), "the two images look alike to this model, so the test would prove nothing"
    llm = opened(model)
    fill_ids(llm)
    for seed in (1, 2, 1, 1, 2):
        assert ask_about_image(llm, seed) == stock(seed)


def test_text_with_the_same_ids_does_not_see_the_image(opened, reference, model):
    llm, expected = opened(model), reference(model)
    fill_ids(llm)
    ask_about_image(llm, seed=1)
    text = [10, 11, 12, 13, *[7] * positions_taken(llm), 20, 21, 22]
    everything = text + llm.input_ids[len(text) : llm.n_tokens].tolist()
    for prompt in ([*everything, 30], text, [*text, 30], text[:9]):
        answer = list(islice(llm.generate(prompt, temp=0.0), 8))
        assert answer == expected.logits(prompt, answer)[:-1].argmax(axis=1).tolist()


def test_a_follow_up_in_text_after_an_image(opened, model):
    """A handler's next turn decodes text, image and answer anew; it must be as on a fresh stock context."""
    ours, fresh = opened(model), SETTINGS[0].open(llama_cpp.Llama, model)
    fill_ids(ours)
    fresh.input_ids[:] = 7
    ask_about_image(ours, seed=1)
    for after in ((20, 21, 22, 50, 51), (20, 21, 22, 50, 51, 52, 53)):
        assert ask_about_image(ours, 1, after=after) == ask_about_image(fresh, 1, after=after)
    fresh.close()


def decode_with_image(llm, seed=1):
    """A text with an image in it, for which no answer is asked."""
    llm.reset()
    llm.eval([10, 11, 12, 13])
    decode_image(llm, seed)
    llm.eval([20, 21, 22])


WAYS_ON = {
    "eval": lambda llm: llm.eval([23]),
    "generate": lambda llm: next(llm.generate([23], temp=0.0, reset=False)),
    "complete": lambda llm: llm.create_completion(llm.input_ids[: llm.n_tokens].tolist(), max_tokens=2),
}
"""Ways in which a request goes on behind an image."""


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("way", WAYS_ON)
def test_an_image_that_was_lost_is_an_error_and_no_text(opened, model, way, loaded):
    llm = opened(model)
    fill_ids(llm)
    decode_with_image(llm)
    if loaded:
        state = llm.save_state()
        llm.reset()
        llm.load_state(state)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
    if way == "complete" and loaded:
        return  # no chat handler has left that image: the ids are text
    with pytest.raises(DecodeError, match="decode it again"):
        WAYS_ON[way](llm)
    llm.reset()
    llm.eval([10, 11, 12, 13])


@pytest.mark.parametrize("way", ["eval", "generate"])
def test_an_image_is_not_mixed_up_with_that_of_another_thread(opened, model, way):
    """The texts around both are the same; the slot in which the first one lay has the second one now."""
    llm = opened(model, n_parallel=2)
    with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as third:
        llm.requests.whole(lambda: decode_with_image(llm, 1))
        other.submit(llm.requests.whole, lambda: decode_with_image(llm, 2)).result()
        stream = llm.slots.all[1], third.submit(lambda: llm.generate([1, 2, 3], temp=0.0)).result()
        third.submit(next, stream[1]).result()
        with pytest.raises(DecodeError, match="decode it again"):
            WAYS_ON[way](llm)
        third.submit(stream[1].close).result()
        assert other.submit(WAYS_ON[way], llm).exception() is None


def test_images_take_no_cells_of_other_requests(opened, tiny_model):
    """With M-RoPE an image takes more cells than positions."""
    llm = opened(tiny_model("qwen35"), n_parallel=2, n_ctx=512)

    def images():
        llm.eval([10, 11, 12, 13])
        for seed in range(10):
            decode_image(llm, seed)
            llm.eval([20])

    llm.requests.whole(images)
    assert llm.n_tokens < 4 + 10 * (SIDE * SIDE + 1)
    with ThreadPoolExecutor(1) as other:
        prompt = np.random.default_rng(1).integers(1, 200, 390).tolist()
        answer = other.submit(lambda: list(islice(llm.generate(prompt, temp=0.0), 50)))
        assert len(answer.result()) == 50


def handling(seed):
    """Return a chat handler like upstream's, which decodes an image and completes the tokens."""

    def handle(*, llama, stream=False, **_):
        llama.reset()
        llama._ctx.kv_cache_clear()
        llama.eval([10, 11, 12, 13])
        decode_image(llama, seed)
        llama.eval([20, 21, 22])
        prompt = llama.input_ids[: llama.n_tokens].tolist()
        return llama.create_completion(prompt, max_tokens=8, temperature=0, stream=stream)

    return handle


def streamed(llm, seed):
    llm.chat_handler = handling(seed)
    return llm.create_chat_completion([{"role": "user", "content": "what is it?"}], stream=True)


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_about_one_image_is_never_answered_from_another(opened, model, stock, begun):
    llm = opened(model)
    first = streamed(llm, 1)
    if begun:
        next(first)
    second = streamed(llm, 2)
    with pytest.raises(RequestSuperseded):
        list(first)
    assert "".join(chunk["choices"][0]["text"] for chunk in second) == stock(2)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed(llm, 1)) == stock(1)


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_several_answers_to_an_image(opened, model, stock, n_parallel):
    """Ids do not say what the image was: it is decoded for each answer, or there is but one."""
    llm = opened(model, n_parallel=n_parallel)

    def handler(llama, messages, **_):
        llama.reset()
        llama._ctx.kv_cache_clear()
        llama.eval([10, 11, 12, 13])
        decode_image(llama, 1)
        llama.eval([20, 21, 22])
        prompt = llama.input_ids[: llama.n_tokens].tolist()
        count = {"n": 2} if messages == "several" else {}
        return llama.create_completion(prompt, max_tokens=8, temperature=0, **count)

    llm.chat_handler = handler
    made = llm.create_chat_completion("one", n=2, seed=3)
    assert [choice["text"] for choice in made["choices"]] == [stock(1)] * 2
    with pytest.raises(LlamaHybridError, match="an image is answered once"):
        llm.create_chat_completion("several")
    if n_parallel == 1:
        with pytest.raises(LlamaHybridError, match="an image is answered once"):
            handler(llm, "several")
    assert len(list(islice(llm.generate([1, 2, 3], temp=0.0), 3))) == 3


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_an_image_that_takes_more_cells_than_positions_overflows_the_context(open_model, n_parallel):
    """An image of M-RoPE models takes SIDE positions and SIDE x SIDE cells."""
    llm = open_model("qwen35", n_ctx=256, n_parallel=n_parallel)

    def images_and_text():
        llm.eval([10, 11, 12, 13])
        for seed in range(14):
            decode_image(llm, seed)
        llm.eval(list(range(20, 60)))

    with pytest.raises(ContextOverflow, match="no cells left"):
        llm.requests.whole(images_and_text)
    assert len(list(islice(llm.generate([10, 11, 12, 13], temp=0.0), 8))) == 8
