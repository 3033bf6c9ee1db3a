"""Models whose layers and states lie where the host cannot read them: on an RPC server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid import Llama
from llamahybrid.prompt_cache import PromptCache
from tests.conftest import take
from tests.devices.conftest import has_rpc
from tests.lab.differential import check
from tests.lab.draft_fuzz import EveryDraft
from tests.lab.history import random_history
from tests.lab.reference import RPC, SETTINGS
from tests.lab.rpc import RpcServer

Open: TypeAlias = Callable[..., Any]
KINDS = (
    "qwen35",
    "gemma3",
    *(pytest.param(arch, marks=pytest.mark.full) for arch in ("jamba", "mamba2", "lfm2", "llama")),
)

pytestmark = [pytest.mark.patched, pytest.mark.skipif(not has_rpc(), reason="this engine has no RPC")]


@pytest.fixture
def remote(open_model: Open, rpc: RpcServer) -> Open:
    """`remote(arch, **arguments)`: a model with all layers on the server."""

    def opener(arch: str = "qwen35", **more: Any) -> Any:
        return open_model(arch, **{"rpc_servers": rpc.address, "n_gpu_layers": -1, **more})

    return opener


def prompt(n: int = 120, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, n).tolist()


@pytest.mark.parametrize("arch", KINDS)
def test_random_histories_match_fresh_local_contexts(
    arch: str, rpc: RpcServer, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RPC, rpc.address)
    for seed, setting in ((1, SETTINGS[0]), (2, SETTINGS[2])):
        assert check(random_history(seed, length=6), Llama, tiny_model(arch), setting).requests


def test_layers_are_on_the_server(remote: Open, capfd: pytest.CaptureFixture[str]) -> None:
    remote(verbose=True)
    said = capfd.readouterr().err
    assert "RPC0" in said
    assert "RS buffer size" in said
    assert "CPU KV buffer" not in said
    assert "CPU RS buffer" not in said


def test_other_models_do_not_use_the_server(
    remote: Open, open_model: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    remote()
    capfd.readouterr()
    open_model(n_gpu_layers=-1, verbose=True)
    assert "RPC0" not in capfd.readouterr().err


@pytest.mark.parametrize("arch", KINDS)
def test_snapshots_equal_local_ones(arch: str, remote: Open, open_model: Open) -> None:
    """Bit for bit: the server computes with the same code, and states are copied as they are."""
    states = []
    for llm in (remote(arch), open_model(arch, flash_attn=True)):
        llm.eval(prompt())
        native = llm.runner.live.native
        state = np.empty(native.state_size(partial=True), dtype=np.uint8)
        assert native.save_partial(state)
        states.append((state.tobytes(), bytes(llm.save_state().llama_state)))
    assert states[0] == states[1]


def test_drafts_are_rolled_back_with_planes(remote: Open, fresh: Callable[..., list[int]]) -> None:
    text = prompt(24) * 5
    llm = remote(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4), draft_planes=4)
    llm.slots.all[0].drafts.policy = EveryDraft(llm.runner.meter)
    assert take(llm, text, 40) == fresh(text, 40)
    assert llm.last_request.drafted


def test_alternating_conversations_are_resumed(remote: Open, fresh: Callable[..., list[int]]) -> None:
    llm = remote()
    first, second = prompt(200, 1), prompt(200, 2)
    for text in (first, second, [*first, 7], [*second, 8], [*first, 7, 9]):
        assert take(llm, text, 6) == fresh(text, 6)
    assert llm.last_request.cached >= 200


@pytest.mark.parametrize("slots", [2, pytest.param(4, marks=pytest.mark.full)])
def test_concurrent_requests_run(slots: int, remote: Open, fresh: Callable[..., list[int]]) -> None:
    llm = remote(n_parallel=slots, n_ctx=1024)
    answers: dict[int, list[int]] = {}

    def ask(n: int) -> None:
        answers[n] = take(llm, prompt(80, n), 12)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(slots + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: fresh(prompt(80, n), 12) for n in range(slots + 1)}


def test_later_start_resumes_from_disk(remote: Open, tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        with closing(PromptCache(disk_dir=str(tmp_path / "cache"))) as cache:
            llm = remote(prompt_cache=cache)
            assert not llm.runner.live.identity.computation.nameless
            answers.append(take(llm, prompt(300), 6))
            report = llm.last_request
            llm.close()
    assert answers[0] == answers[1]
    assert (report.source, report.cached >= 299) == ("disk", True)


def test_state_of_another_device_is_not_used(remote: Open, open_model: Open) -> None:
    names = {llm.runner.live.identity.computation.fingerprint for llm in (remote(), remote(), open_model())}
    assert len(names) == 2


def test_servers_without_layers_warn(remote: Open, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(remote(n_gpu_layers=0), Llama)
    assert "n_gpu_layers is 0" in caplog.text
