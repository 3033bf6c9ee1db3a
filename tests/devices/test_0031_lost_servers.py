"""A server that is gone, and one of two models that leaves: the process lives (patch 0031)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from llamahybrid.errors import DeviceError, DeviceLost
from llamahybrid.memory.context import GuardedContext
from tests.conftest import take
from tests.devices.conftest import has_rpc
from tests.devices.test_offload import prompt
from tests.lab.rpc import RpcServer
from tests.lab.serving import serving

Open: TypeAlias = Callable[..., Any]

pytestmark = [
    pytest.mark.patched,
    pytest.mark.full,
    pytest.mark.skipif(not has_rpc(), reason="this engine has no RPC"),
]


def test_models_share_a_connection(
    mortal: RpcServer, open_model: Open, fresh: Callable[..., list[int]]
) -> None:
    """The server discards the graphs of all when one frees its buffers; stock asks for them, and dies."""
    place = {"rpc_servers": mortal.address, "n_gpu_layers": -1}
    first, second = (open_model(arch, **place) for arch in ("qwen35", "jamba"))
    expected = fresh(prompt(), 20)
    answer = first.generate(prompt(), temp=0.0)
    begun = [next(answer) for _ in range(10)]
    assert take(second, prompt(), 5) == fresh(prompt(), 5, "jamba")
    second.close()
    assert [*begun, *(next(answer) for _ in range(10))] == expected


class TestLoss:
    @pytest.fixture
    def opener(self, mortal: RpcServer, open_model: Open) -> Open:
        place = {"rpc_servers": mortal.address, "n_gpu_layers": -1, "n_batch": 32}
        return lambda **more: open_model(**{**place, **more})

    @pytest.mark.parametrize("slots", [1, 2])
    def test_lost_server_ends_the_request_and_ram_survives(
        self, mortal: RpcServer, opener: Open, fresh: Callable[..., list[int]], slots: int
    ) -> None:
        llm = opener(n_parallel=slots)
        take(llm, prompt(200), 4)
        answer = llm.generate([*prompt(200), 5], temp=0.0)
        begun = [next(answer) for _ in range(3)]
        mortal.kill()
        with pytest.raises(DeviceLost, match=f"{mortal.address} is gone"):
            begun += list(answer)
        assert begun == fresh([*prompt(200), 5], len(begun)), "no token came from nothing"
        stored = llm.prompt_cache.stats()
        kept = stored.entries, stored.segments
        with pytest.raises(DeviceLost):
            take(llm, prompt(50, 3), 1)
        with pytest.raises(DeviceLost):
            llm.save_state()
        native = llm.runner.live.native
        state = np.empty(native.state_size(partial=True), dtype=np.uint8)
        assert not native.save_partial(state), "what was read is nothing"
        stored = llm.prompt_cache.stats()
        assert (stored.entries, stored.segments) == kept, "nothing was stored of what is not there"
        with pytest.raises(DeviceError, match="Failed to connect"):
            opener(prompt_cache=llm.prompt_cache)
        mortal.start()
        again = opener(prompt_cache=llm.prompt_cache, n_parallel=slots)
        llm.close()
        assert take(again, [*prompt(200), 5], 8) == fresh([*prompt(200), 5], 8)
        assert again.last_request.cached >= 190

    def test_lost_server_ends_a_prompt(
        self,
        mortal: RpcServer,
        opener: Open,
        fresh: Callable[..., list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        llm = opener()
        decode, batches = GuardedContext.decode, []

        def kill_and_decode(context: GuardedContext, batch: Any) -> None:
            batches.append(batch)
            if len(batches) == 4:
                mortal.kill()
            decode(context, batch)

        monkeypatch.setattr(GuardedContext, "decode", kill_and_decode)
        with pytest.raises(DeviceLost):
            take(llm, prompt(400), 1)
        monkeypatch.undo()
        mortal.start()
        again = opener(prompt_cache=llm.prompt_cache)
        assert take(again, prompt(400), 8) == fresh(prompt(400), 8)

    def test_lost_model_does_not_block_reconnection(
        self, mortal: RpcServer, opener: Open, fresh: Callable[..., list[int]]
    ) -> None:
        lost = opener()
        mortal.kill()
        mortal.start()
        alive = opener()
        with pytest.raises(DeviceLost):
            take(lost, prompt(), 1)
        assert take(alive, prompt(), 8) == fresh(prompt(), 8)
        lost.close()
        assert take(alive, prompt(90, 4), 8) == fresh(prompt(90, 4), 8)


def test_server_reopens_its_model(mortal: RpcServer, tiny_model: Callable[..., Path]) -> None:
    """Requests get 503 until the RPC server is back, and then go on from RAM."""
    place = {"rpc_servers": mortal.address, "n_gpu_layers": -1}
    asked = {"prompt": "A long question " * 9, "max_tokens": 2, "temperature": 0.0}
    with serving(tiny_model("qwen35"), model=place) as server, server.client() as client:

        def ask() -> Any:
            return client.post("/v1/completions", json=asked)

        before = ask().json()
        mortal.kill()
        for _ in range(3):
            answer = ask()
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
        mortal.start()
        again = ask().json()
        assert again["choices"] == before["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
