"""Streams on changing threads: a short round of the campaign."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import stream_fuzz
from tests.lab.differential import Mismatch

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("arch", stream_fuzz.ARCHITECTURES)
def test_every_stream_says_what_a_fresh_context_says(tiny_model: TinyModel, arch: str) -> None:
    deeds = stream_fuzz.run(tiny_model(arch, window=16), 3, 3, time.monotonic() + 100)
    assert deeds["rounds"] >= 1
    assert deeds["advance"] > 0


def test_a_wrong_stream_is_noticed(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams whose places were mixed up."""
    take = stream_fuzz.Campaign._take

    def mixed_up(self: stream_fuzz.Campaign, stream: stream_fuzz.Stream, n: int) -> None:
        take(self, stream, n)
        stream.said[:] = [(token + 7) % 200 for token in stream.said]

    monkeypatch.setattr(stream_fuzz.Campaign, "_take", mixed_up)
    watched: list[str] = []
    watchdog = stream_fuzz.faulthandler
    monkeypatch.setattr(watchdog, "dump_traceback_later", lambda *_, **__: watched.append("on"))
    monkeypatch.setattr(watchdog, "cancel_dump_traceback_later", lambda: watched.append("off"))
    with pytest.raises(Mismatch):
        stream_fuzz.run(tiny_model("qwen35", window=16), 1, 1, time.monotonic() + 100)
    assert watched == ["on", "off"], "a watchdog that outlives its campaign ends whoever runs next"
