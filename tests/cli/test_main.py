"""Commands: their options, error messages and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from llamahybrid import __version__, llama, tiny
from llamahybrid.cli.main import app
from llamahybrid.devices import server as rpc_server
from llamahybrid.engine.bindings import stock
from llamahybrid.errors import DeviceError

TinyModel = Callable[..., Path]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_version_prints_both_packages() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert (
        result.output
        == f"llamahybrid {__version__}\nllama-cpp-python {metadata.version('llama_cpp_python')}\n"
    )


@pytest.mark.parametrize("command", ["check", "bench", "hazards", "compare", "report", "record", "replay"])
def test_help_explains_every_option(command: str) -> None:
    root = typer.main.get_command(app)
    found = root.get_command(typer.Context(root), command)  # type: ignore[attr-defined]
    assert not [each.name for each in found.params if not getattr(each, "help", None)]


def test_tiny_writes_a_model(tmp_path: Path, tiny_model: TinyModel) -> None:
    out = tmp_path / "m.gguf"
    result = run("tiny", "qwen35", out, "--seed", "1")
    assert result.exit_code == 0, result.output
    assert out.read_bytes() == tiny_model("qwen35", seed=1).read_bytes()
    assert f"{out.stat().st_size:,}" in result.output
    assert run("tiny", "--list").output.split() == list(tiny.architectures())
    unknown = run("tiny", "gpt9", out)
    assert unknown.exit_code == 1
    assert "gpt9" in unknown.output
    for bad in ([], ["llama", out, "--vocab", "x"], ["llama", out, "--params", "x"]):
        assert run("tiny", *bad).exit_code == 2


def test_file_that_is_no_model_is_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(200))
    result = run("chat", tmp_path / "bad.gguf", "--threads", "1")
    assert result.exit_code != 0
    assert "Failed to load model" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("said", "layers", "servers", "draft"),
    [
        ([], 0, None, 0),
        (["--draft", "6"], 0, None, 6),
        (["--rpc", "a:1,b:2"], -1, "a:1,b:2", 0),
        (["--rpc", "a:1", "--n-gpu-layers", "3"], 3, "a:1", 0),
    ],
)
def test_chat_options_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, said: list[str], layers: int, servers: str | None, draft: int
) -> None:
    given: dict[str, Any] = {}

    def made(model: str, **options: object) -> None:
        given.update(options)
        raise DeviceError("nobody there")

    monkeypatch.setattr(llama, "Llama", made)
    assert run("chat", __file__, *said).output == "error: nobody there\n"
    assert (given["n_gpu_layers"], given["rpc_servers"]) == (layers, servers)
    assert getattr(given["draft_model"], "num_pred_tokens", 0) == draft


def test_rpc_server_warns_on_a_public_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(rpc_server, "run", lambda *arguments: asked.append(arguments))
    assert run("rpc-server", "--threads", 2).output == ""
    assert "no passwords" in run("rpc-server", "--host", "0.0.0.0", "--port", 7).output
    assert asked == [("127.0.0.1", 50052, 2, None), ("0.0.0.0", 7, None, None)]


def test_hazards_fails_on_stock_and_writes_its_report(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    chosen = ["--probe", "rollback-one-batch", "--probe", "rollback-twice"]
    assert run("hazards", "--lib", stock(), "--json", file, *chosen).exit_code == 1
    (target,) = json.loads(file.read_text())["targets"]
    assert [each["name"] for each in target["hazards"]] == [f"hazard:{name}" for name in chosen[1::2]]


def test_hazards_refuses_unknown_libraries_and_probes(tmp_path: Path) -> None:
    result = run("hazards", "--lib", tmp_path)
    assert result.exit_code == 1
    assert "no libllama" in result.output
    result = run("hazards", "--probe", "nonsense")
    assert result.exit_code == 1
    assert "rollback-twice" in result.output
    for command in ("check", "hazards"):
        assert run(command, "--lib", tmp_path / "none").exit_code == 2


@pytest.mark.parametrize(
    ("command", "fake"),
    [(["hazards", "--probe", "rollback-twice"], False), (["chat", __file__], True), (["serve", "x"], True)],
)
def test_broken_llama_cpp_is_one_error_line(command: list[str], fake: bool, tmp_path: Path) -> None:
    """Either its library is missing, or another package has its name."""
    environment = {**os.environ, "LLAMAHYBRID_ENGINE": ""}
    if fake:
        (tmp_path / "llama_cpp").mkdir()
        (tmp_path / "llama_cpp" / "__init__.py").touch()
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    else:
        environment["LLAMA_CPP_LIB_PATH"] = str(tmp_path)
    for arguments in (command, ["engine", "doctor"]):
        done = subprocess.run(
            [sys.executable, "-m", "llamahybrid", *arguments],
            **{"env": environment, "capture_output": True, "text": True, "stdin": subprocess.DEVNULL},
        )
        if arguments is command:
            assert done.returncode == 1
            assert done.stderr.startswith("error: llama_cpp cannot be imported: ")
            assert done.stderr.count("\n") == 1
        else:
            assert done.returncode == 0, done.stderr
            assert "cannot be loaded" in done.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_behind_standard_output_is_one_error_line(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "llamahybrid", "tiny", "--list"]
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"
