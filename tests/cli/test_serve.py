"""Options of `llamahybrid serve`; tests/server serves."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llama_cpp.server.settings import Settings
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.cli.serve import parser, server, settings


def test_serve_has_the_options_of_upstream_and_ours() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"]).output
    for name in (*Settings.model_fields, "n_parallel", "max_queue", "config_file", "cors_origins"):
        assert f"--{name}" in text, name
    assert parser().format_help()


def test_wrong_option_is_named_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings(["x.gguf", "--nonsense"])
    assert capsys.readouterr().err.splitlines()[1:] == [
        "llamahybrid serve: error: unrecognized arguments: --nonsense"
    ]


def test_serve_takes_options_in_either_spelling() -> None:
    how, (model,) = settings(
        [
            "x.gguf",
            "--port",
            "81",
            "--n-parallel",
            "3",
            "--n_ctx=4096",
            "--api_keys",
            "a-b",
            "--disk-dir=/a-b",
        ]
    )
    assert (how.port, how.keys()) == (81, ["a-b"])
    assert (model.model, model.n_parallel, model.n_ctx, model.disk_dir) == ("x.gguf", 3, 4096, "/a-b")
    assert settings(["--model", "y.gguf"])[1][0].model == "y.gguf"


def test_serve_reads_a_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"port": 82, "models": [{"model": "a.gguf", "model_alias": "a"}]}))
    assert settings(["--config_file", str(config)])[0].port == 82
    with pytest.raises(ValueError, match="config file"):
        settings(["x.gguf", "--config-file", str(config)])
    monkeypatch.setenv("CONFIG_FILE", str(config))
    assert settings([])[1][0].model_alias == "a"


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield str(listening.getsockname()[1])


def test_serve_errors_are_one_line(tmp_path: Path, taken: str) -> None:
    """uvicorn has not begun then, which would add what it does, and tracebacks."""
    absent, nothing, wrong = (tmp_path / name for name in ("absent.gguf", "nothing.gguf", "wrong.json"))
    nothing.write_bytes(b"nothing")
    wrong.write_text('{"models": [{"model": "a.gguf", "n_parallel": 0}]}')
    for said, arguments in {
        "absent.json": ["--config_file", str(tmp_path / "absent.json")],
        "wrong.json: models.0.n_parallel: Input should be": ["--config_file", str(wrong)],
        "no model was given": [],
        "two models were given": [str(absent), "--model", "y.gguf"],
        "does not exist": [str(absent)],
        "Failed to load model": [str(nothing)],
        "n_parallel: Input should be": [str(absent), "--n_parallel", "0"],
        "type_k: 999 is no type": [str(absent), "--type_k", "999"],
        "n_ctx: 999999999999 does not fit": [str(absent), "--n_ctx", "999999999999"],
        "draft_model: 'x' is no method": [str(absent), "--draft_model", "x"],
        "cannot listen at 127.0.0.1:": [str(absent), "--host", "127.0.0.1", "--port", taken],
        "port '65536'": [str(absent), "--port", "65536"],
        "ssl_keyfile goes with": [str(absent), "--ssl_keyfile", str(nothing)],
        "ssl_certfile and ssl_keyfile cannot be used": [str(absent), "--ssl_certfile", str(nothing)],
    }.items():
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert result.exit_code == 1
        (line,) = result.output.splitlines()
        assert line.startswith("error: ")
        assert said in line
        assert "pydantic" not in line


@pytest.mark.parametrize(
    "wrong", [["--lora_path", "/nonexistent"], ["--chat_format", "nope"], ["--chat_format", "llava-1-5"]]
)
def test_model_option_error_is_one_line(tiny_model: Callable[..., Path], wrong: list[str]) -> None:
    options = [str(tiny_model("qwen35")), "--port", "0", "--n_ctx", "256", *wrong]
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("error: ")


def test_serve_opens_the_default_model_first(tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("llama"))
    made = server([model, "--n_ctx", "256", "--n_threads", "1", "--ram-bytes", "100000"])
    models = made.config.app.state.service.models  # type: ignore[union-attr]
    assert models.llm is not None
    assert not made.started
    models.close()
