"""From upstream's arguments to what runs requests: the shape of the context, and who stays out."""

from types import SimpleNamespace

import llama_cpp
import pytest

from llamahybrid import Llama
from llamahybrid.request import assembly
from llamahybrid.request.assembly import ContextShape
from tests.conftest import SETTINGS


@pytest.mark.parametrize(
    ("caching", "paging", "options", "sequences"),
    [
        (True, True, {}, 2),
        (True, True, {"n_batch": 2}, 2),
        (True, True, {"n_batch": 1}, 1),
        (True, True, {"n_ubatch": 1}, 1),
        (True, True, {"n_ctx": 1}, 1),
        (True, True, {"n_ctx": 2}, 2),
        (True, True, {"n_ctx": 0}, 2),
        (True, False, {}, 1),
        (False, True, {}, 1),
    ],
)
def test_a_second_sequence_is_there_for_paging_where_a_batch_has_room(caching, paging, options, sequences):
    assert ContextShape.of(caching, paging, 0, 1, options).sequences == sequences


@pytest.mark.parametrize(
    ("caching", "asked", "options", "planes"),
    [
        (True, 4, {}, 4),
        (True, 100, {"n_ubatch": 8}, 6),
        (True, 100, {"n_batch": 2}, 0),
        (True, 4, {"n_batch": 1}, 0),
        (False, 4, {}, 0),
    ],
)
def test_no_more_planes_than_a_batch_has_room_for(caching, asked, options, planes):
    assert ContextShape.of(caching, True, asked, 1, options).planes == planes


@pytest.mark.parametrize(
    ("optional", "options", "planes"),
    [
        ((), {"n_gpu_layers": 1}, 6),
        (("llama_set_n_rs_seq",), {"n_gpu_layers": 1}, 0),
        ((), {"n_gpu_layers": 0}, 0),
        ((), {}, 0),
    ],
)
def test_a_draft_on_a_device_gets_planes_where_they_cannot_be_had_later(
    monkeypatch, optional, options, planes
):
    monkeypatch.setattr(assembly, "library", lambda: SimpleNamespace(optional=optional))
    draft = SimpleNamespace(num_pred_tokens=6)
    assert ContextShape.of(True, True, None, 1, {**options, "draft_model": draft}).planes == planes
    assert ContextShape.of(True, True, None, 1, options).planes == 0


def test_each_slot_is_a_sequence_and_has_no_planes():
    assert ContextShape.of(True, True, 8, 4, {}) == ContextShape(5, 0)
    assert ContextShape.of(True, False, None, 4, {}) == ContextShape(4, 0)
    for slots, options in ((0, {}), (4, {"n_batch": 4}), (4, {"n_ubatch": 2}), (4, {"n_ctx": 4})):
        with pytest.raises(ValueError, match="n_parallel"):
            ContextShape.of(True, True, 0, slots, options)
    assert ContextShape.of(True, True, 0, 4, {"n_ctx": 0}).sequences == 5, "as many as the model has"


def test_the_smallest_contexts_open_as_upstreams(open_model):
    assert open_model("llama", n_ctx=1).n_ctx() == open_model("llama", llama_cpp.Llama, n_ctx=1).n_ctx()
    assert open_model("llama", n_ctx=3, n_parallel=2).create_completion([5], max_tokens=1)
    with pytest.raises(ValueError, match="n_parallel=2 needs"):
        open_model("llama", n_ctx=2, n_parallel=2)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_context_of_less_than_nothing_is_refused(slots):
    with pytest.raises(ValueError, match="n_ctx counts tokens"):
        ContextShape.of(True, True, 0, slots, {"n_ctx": -1})


@pytest.mark.parametrize("prompt_cache", [None, False])
def test_an_adapter_that_cannot_be_read_is_refused(open_model, tmp_path, prompt_cache):
    (tmp_path / "no.gguf").write_bytes(b"GGUF" + bytes(100))
    for name in ("no.gguf", "missing.gguf"):
        with pytest.raises(RuntimeError, match=f"Failed to initialize LoRA adapter from lora path: .*{name}"):
            open_model("llama", lora_path=str(tmp_path / name), prompt_cache=prompt_cache)


def test_the_context_has_the_shape(open_model):
    llm = open_model(draft_planes=100, n_ubatch=8)
    assert (llm.context_params.n_seq_max, llm.runner.live.planes.count) == (2, 6)
    assert open_model(paging=False).context_params.n_seq_max == 1


def test_a_model_without_memory_is_upstreams(tiny_model):
    llm = Llama(str(tiny_model("bert", vocab="bert-bge")), **{**SETTINGS, "n_ctx": 64})
    assert llm.runner is None
    assert llm.prompt_cache is None
    llm.close()
