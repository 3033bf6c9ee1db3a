"""The app, made as other ASGI servers make it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llamahybrid.server.app import create_app
from llamahybrid.server.settings import ModelSettings, ServerSettings, Settings

TinyModel = Callable[..., Path]


def test_from_one_kind_of_settings_or_two() -> None:
    one = create_app(Settings(model="x.gguf", n_parallel=3, max_queue=5)).state.service
    two = create_app(
        server_settings=ServerSettings(max_queue=5), model_settings=[ModelSettings(model="x.gguf")]
    ).state.service
    for service in (one, two):
        assert service.settings.max_queue == 5
        assert list(service.models) == ["x.gguf"]


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODEL", "env.gguf")
    assert list(create_app().state.service.models) == ["env.gguf"]
    (tmp_path / "c.json").write_text(json.dumps({"models": [{"model": "file.gguf"}]}))
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "c.json"))
    assert list(create_app().state.service.models) == ["file.gguf"]


def test_contradictory_settings_are_refused_before_a_model_opens() -> None:
    for wrong in ({"salt_by_key": True}, {"api_keys": [""]}):
        with pytest.raises(ValueError, match=r"key|salt"):
            create_app(server_settings=ServerSettings(**wrong), model_settings=[ModelSettings(model="x")])
    with pytest.raises(ValueError, match="no model"):
        create_app(server_settings=ServerSettings(), model_settings=[])
