"""Upstream's example server is loaded from the verified sdist, as what it is known to be, or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from llamahybrid.engine import sdist
from llamahybrid.errors import EngineError
from llamahybrid.server.app import create_app
from llamahybrid.server.settings import ModelSettings, ServerSettings
from llamahybrid.server.upstream_api import api, source
from llamahybrid.server.upstream_api.source import MARKS, OWN_CONFIGS, dialect, require, upstream


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """Loads the module anew, whatever is known of it; what was loaded before is there again afterwards."""
    monkeypatch.setitem(sys.modules, source.MODULE, upstream())
    monkeypatch.setattr(source, "upstream", upstream.__wrapped__)
    monkeypatch.setattr(api, "bodies", source.bodies.__wrapped__)
    return upstream.__wrapped__


def test_the_pinned_release_is_as_it_is_known_and_no_other() -> None:
    require(upstream())
    changed = ModuleType("changed")
    changed.__dict__.update(upstream().__dict__)
    del changed.__dict__["OpenAIFormatter"]
    with pytest.raises(EngineError, match="OpenAIFormatter"):
        require(changed)


def test_another_release_is_refused_when_the_server_starts(
    load: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.3.99" if name == "llama-cpp-python" else version(name)
    )
    with pytest.raises(EngineError, match=r"0\.3\.36 exactly, and 0\.3\.99"):
        create_app(server_settings=ServerSettings(api="upstream"), model_settings=[ModelSettings(model="x")])


def test_a_package_that_is_missing_is_named(
    load: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai.types.completion", None)
    with pytest.raises(EngineError, match=r"needs openai.*llamahybrid\[upstream-api\]"):
        load()
    assert source.MODULE not in sys.modules


def test_a_copy_on_disk_that_somebody_changed_is_not_what_is_run(
    load: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = sdist.fetch()
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path))
    (tmp_path / "sdist").mkdir()
    (tmp_path / "sdist" / sdist.PIN.archive).symlink_to(archive)
    changed = tmp_path / "sdist" / sdist.PIN.sha256[:16] / source.SCRIPT
    changed.parent.mkdir(parents=True)
    changed.write_text("raise SystemExit('it ran')")
    assert sdist.member(source.SCRIPT) == changed, "else this shows nothing"
    monkeypatch.setattr(source, "files", source.files.__wrapped__)
    assert hasattr(load(), "OpenAIFormatter")


# -- dialects --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN_CONFIGS)
def test_upstream_s_own_configs(name: str) -> None:
    spoken = dialect(name, "")
    assert spoken.template
    assert "messages" in spoken.template
    assert spoken.schema
    assert "tool_calls" in spoken.schema["properties"]
    assert spoken.max_output_tokens == 4096


@pytest.mark.parametrize("name", sorted(set(MARKS.values())))
def test_the_schema_that_goes_with_a_template(name: str) -> None:
    own = dialect(name, "")
    assert own.template
    found = dialect(None, own.template)
    assert found.schema == own.schema
    assert found.template is None
    assert found.max_output_tokens is None


def test_a_template_that_nobody_knows(caplog: pytest.LogCaptureFixture) -> None:
    assert dialect(None, "{{ messages[0].content }}").schema is None
    assert "api_config" in caplog.text


def test_a_file(tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text(
        json.dumps({"model": {"chat_template": ["a", "b"], "response_schema": {"type": "object"}}})
    )
    spoken = dialect(str(config), "")
    assert (spoken.template, spoken.schema, spoken.max_output_tokens) == ("ab", {"type": "object"}, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"model": 3}',
        '{"model": {"response_schema": "x"}}',
        '{"model": {"max_output_tokens": "x"}}',
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    config = tmp_path / "c.json"
    config.write_text(text)
    with pytest.raises(ValueError, match="no config"):
        dialect(str(config), "")


def test_a_name_that_there_is_not() -> None:
    for absent in ("qwen9", "~nobody-of-this-name/qwen9"):
        with pytest.raises(ValueError, match=r"one of .*qwen3.6-27b"):
            dialect(absent, "")


# -- what requests say -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (0, {"stop": [1] * 5000}),
        (0, {"messages": [1] * 5000}),
        (0, {"tools": [1] * 5000}),
        (0, {"functions": [1] * 5000}),
        (1, {"metadata": {str(n): 1 for n in range(5000)}}),
        (1, {"tools": [1] * 5000}),
    ],
)
def test_of_many_that_are_wrong_few_are_told(kind: int, said: dict[str, Any]) -> None:
    """Each took its time, in which nothing else was served, and its memory."""
    with pytest.raises(ValidationError) as caught:
        source.bodies()[kind].model_validate(said)
    assert caught.value.error_count() < 9


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [0, 1])
def test_numbers_are_numbers(kind: int, value: float) -> None:
    for said in ({"temperature": value}, {"logit_bias": {"1": value}})[: 2 - kind]:
        with pytest.raises(ValidationError):
            source.bodies()[kind].model_validate(said)
