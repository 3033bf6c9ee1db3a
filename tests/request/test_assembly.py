"""Contexts that are opened, and arguments that are refused."""

import llama_cpp
import pytest

from llamahybrid import Llama
from tests.conftest import SETTINGS


@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ({}, 2),
        ({"n_batch": 2}, 2),
        ({"n_batch": 1}, 1),
        ({"n_ubatch": 1}, 1),
        ({"n_ctx": 1}, 1),
        ({"n_ctx": 2}, 2),
        ({"paging": False}, 1),
        ({"n_parallel": 4}, 4),
        ({"n_parallel": 4, "paging": False}, 4),
        ({"prompt_cache": False}, 1),
    ],
)
def test_context_of_one_slot_has_a_sequence_for_paging_where_a_batch_has_room(open_model, options, sequences):
    llm = open_model(**options)
    assert llm.context_params.n_seq_max == sequences
    assert llm.create_completion([5], max_tokens=1)


@pytest.mark.parametrize("options", [{"n_batch": 4}, {"n_ubatch": 2}, {"n_ctx": 4}])
def test_more_slots_than_a_batch_has_room_for_are_refused(open_model, options):
    with pytest.raises(ValueError, match="n_parallel"):
        open_model(n_parallel=4, **options)


def test_the_smallest_contexts_open_as_upstreams(open_model):
    assert open_model("llama", n_ctx=1).n_ctx() == open_model("llama", llama_cpp.Llama, n_ctx=1).n_ctx()
    assert open_model("llama", n_ctx=3, n_parallel=2).create_completion([5], max_tokens=1)
    with pytest.raises(ValueError, match="n_parallel=2 needs"):
        open_model("llama", n_ctx=2, n_parallel=2)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_context_of_less_than_nothing_is_refused(open_model, slots):
    with pytest.raises(ValueError, match="n_ctx counts tokens"):
        open_model(n_ctx=-1, n_parallel=slots)


@pytest.mark.parametrize("prompt_cache", [None, False])
def test_an_adapter_that_cannot_be_read_is_refused(open_model, tmp_path, prompt_cache):
    (tmp_path / "no.gguf").write_bytes(b"GGUF" + bytes(100))
    for name in ("no.gguf", "missing.gguf"):
        with pytest.raises(RuntimeError, match=f"Failed to initialize LoRA adapter from lora path: .*{name}"):
            open_model("llama", lora_path=str(tmp_path / name), prompt_cache=prompt_cache)


def test_a_model_without_memory_is_upstreams(tiny_model):
    llm = Llama(str(tiny_model("bert", vocab="bert-bge")), **{**SETTINGS, "n_ctx": 64})
    assert llm.prompt_cache is None
    assert llm.last_request is None
    llm.close()
