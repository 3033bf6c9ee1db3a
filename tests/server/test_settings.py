"""Settings from everywhere they may stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llama_cpp.server import settings as upstream
from pydantic import ValidationError

from llamahybrid.server.app import create_app
from llamahybrid.server.settings import ModelSettings, ServerSettings, Settings, from_file

FILE = {
    "host": "0.0.0.0",
    "port": 8081,
    "api_keys": ["one", "two"],
    "max_queue": 7,
    "models": [
        {"model": "a.gguf", "model_alias": "a", "n_parallel": 2, "n_ctx": 4096},
        {"model": "b.gguf", "model_alias": "b", "chat_format": "chatml"},
    ],
}


def test_all_of_upstream_s_are_there() -> None:
    assert set(upstream.ModelSettings.model_fields) <= set(ModelSettings.model_fields)
    assert set(upstream.ServerSettings.model_fields) <= set(ServerSettings.model_fields)


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "config.yml"])
def test_a_config_file(tmp_path: Path, name: str) -> None:
    # JSON is YAML, too; editors on Windows write a mark of the encoding
    (tmp_path / name).write_text(json.dumps(FILE), encoding="utf-8-sig")
    server, models = from_file(tmp_path / name)
    assert (server.host, server.port, server.max_queue) == ("0.0.0.0", 8081, 7)
    assert server.keys() == ["one", "two"]
    assert [(m.model_alias, m.n_parallel, m.n_ctx, m.chat_format) for m in models] == [
        ("a", 2, 4096, None),
        ("b", None, 2048, "chatml"),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.json", "{"), ("c.yaml", "a: [b"), ("c.json", "{}"), ("c.json", '{"models": [{"n_ctx": 5}]}')],
)
def test_a_config_file_that_says_nothing_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"."):
        from_file(tmp_path / name)


def test_keys_come_from_three_places(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("three\n\n  four \r\n", encoding="utf-8-sig")
    server = ServerSettings(api_key="one", api_keys=["two"], api_key_file=str(tmp_path / "keys"))
    assert sorted(server.keys()) == ["four", "one", "three", "two"]
    assert ServerSettings().keys() == []
    assert "two" not in repr(server)


def test_an_empty_key_is_none(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    for wrong in ({"api_key": ""}, {"api_keys": [""]}, {"api_key_file": str(tmp_path / "keys")}):
        with pytest.raises(ValueError, match="key"):
            ServerSettings(**wrong).keys()
    for absent in (str(tmp_path / "absent"), "~nobody-of-this-name/absent"):
        with pytest.raises(OSError, match="absent"):
            ServerSettings(api_key_file=absent).keys()


def test_yaml_date_as_an_alias_is_a_text(tmp_path: Path) -> None:
    (file := tmp_path / "config.yaml").write_text("models: [{model: a.gguf, model_alias: 2026-05-01}]")
    assert from_file(file)[1][0].model_alias == "2026-05-01"
    file.write_text("2026-05-01: nothing")
    with pytest.raises(ValueError, match="no YAML"):
        from_file(file)


def test_environment_has_upstream_s_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_QUEUE", "3")
    monkeypatch.setenv("N_PARALLEL", "5")
    assert ServerSettings().max_queue == 3
    assert ModelSettings(model="x").n_parallel == 5


@pytest.mark.parametrize("wrong", [{"n_parallel": 0}, {"ram_bytes": -1}])
def test_numbers_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        ModelSettings(model="x", **wrong)


def test_origins_are_those_that_browsers_send() -> None:
    fine = [
        "*",
        "null",
        "https://a.example",
        "http://[::1]:3000",
        "http://10.0.0.1:80",
        "moz-extension://a-b1",
    ]
    assert ServerSettings(cors_origins=fine).cors_origins == fine
    for wrong in (
        *('["https://a.example"]', "https://a.example,https://b.example", "https://a.example/"),
        *("https://a.example/app", "a.example", "https://A.example", "model.gguf", ""),
    ):
        with pytest.raises(ValidationError, match="no origin"):
            ServerSettings(cors_origins=[wrong])


# -- apps, made as other ASGI servers make them -----------------------------------------------------------


def test_app_from_one_kind_of_settings_or_two() -> None:
    one = create_app(Settings(model="x.gguf", n_parallel=3, max_queue=5)).state.service
    two = create_app(
        server_settings=ServerSettings(max_queue=5), model_settings=[ModelSettings(model="x.gguf")]
    ).state.service
    for service in (one, two):
        assert service.settings.max_queue == 5
        assert list(service.models) == ["x.gguf"]


def test_app_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
