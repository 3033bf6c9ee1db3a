"""Opening a model from its settings, by upstream's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from llamahybrid.devices import ggml
from llamahybrid.errors import DeviceError
from llamahybrid.llama import Llama
from llamahybrid.server.loading import cache_of, load
from llamahybrid.server.settings import DEFAULT_SLOTS, ModelSettings

TinyModel = Callable[..., Path]
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def opened(tiny_model: TinyModel) -> Iterator[Callable[..., Llama]]:
    with ExitStack() as stack:

        def make(arch: str = "qwen35", **more: Any) -> Llama:
            common: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}
            return stack.enter_context(
                closing(load(ModelSettings(model=str(tiny_model(arch)), **{**common, **more})))
            )

        yield make


def test_model_has_slots_and_upstream_s_class_is_unchanged(
    opened: Callable[..., Llama],
) -> None:
    before = llama_cpp.Llama
    llm = opened()
    assert isinstance(llm, Llama)
    assert llm.n_parallel == DEFAULT_SLOTS
    assert llm.prompt_cache is not None
    assert llama_cpp.Llama is before
    assert llm.requests.logprobs_on_request
    assert not opened(logits_all=False).requests.logprobs_on_request


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("options", "flash"), [({}, True), ({"flash_attn": False}, False)])
def test_flash_attention_is_on_on_a_gpu_unless_the_settings_say_otherwise(
    opened: Callable[..., Llama],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    flash: bool,
    slots: int,
) -> None:
    monkeypatch.setattr(ggml, "gpus", lambda: ["a GPU"])
    options = {**options, "n_parallel": slots}
    params = opened(n_gpu_layers=-1, **options).context_params
    assert (params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED) is not flash


def test_model_without_parallel_support_has_one_slot(opened: Callable[..., Llama]) -> None:
    assert opened(draft_model="prompt-lookup-decoding").n_parallel == 1
    assert opened(n_batch=2).n_parallel == 1
    with pytest.raises(ValueError, match="n_parallel"):
        opened(n_batch=2, n_parallel=2)


def test_model_that_embeds_chats_too(opened: Callable[..., Llama]) -> None:
    llm = opened(embedding=True)
    assert llm.n_parallel == DEFAULT_SLOTS
    assert llm.prompt_cache is not None


def test_model_of_embeddings_alone_has_no_slots_for_chats(
    opened: Callable[..., Llama], tiny_model: TinyModel
) -> None:
    llm = opened("bert", embedding=True)
    assert llm.n_parallel == 1
    assert llm.prompt_cache is None


def test_where_conversations_are_kept(tmp_path: Path) -> None:
    def kept(**more: Any) -> Any:
        return cache_of(ModelSettings(model="x", **more))

    assert kept(ram_bytes=1 << 20).ram_bytes == 1 << 20
    assert kept(cache=True, cache_size=1 << 21).ram_bytes == 1 << 21
    assert kept(cache=True, cache_size=1 << 21, ram_bytes=1 << 20).ram_bytes == 1 << 20
    remote = kept(remote="redis://127.0.0.1:1/0", remote_bytes=1 << 23).remote
    assert remote is not None
    assert remote.limit == 1 << 23
    disk = kept(cache=True, cache_type="disk", cache_size=1 << 22, disk_dir=str(tmp_path)).disk
    assert disk is not None
    assert disk.limit == 1 << 22
    assert kept().disk is None


def test_rpc_servers_are_connected_to_and_not_swallowed(tiny_model: TinyModel) -> None:
    """Upstream's `Llama` takes the setting and does nothing with it."""
    settings = ModelSettings(model=str(tiny_model("qwen35")), rpc_servers="127.0.0.1:1", n_gpu_layers=-1)
    with pytest.raises(DeviceError, match=r"no RPC|127\.0\.0\.1:1 cannot be used"):
        load(settings)
