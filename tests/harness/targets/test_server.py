"""A llama-server is started for a session with comparable options, and ends with it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamahybrid.errors import TargetError
from llamahybrid.harness.targets.base import ModelFile, Shape
from llamahybrid.harness.targets.server import ServerTarget
from llamahybrid.harness.workloads.speech import Vocabulary

ANSWERS = """#!{python}
import http.server, json, os, sys

told = dict(pid=os.getpid(), command=sys.argv[1:], environment=dict(os.environ))
with open(sys.argv[0] + ".json", "w") as file:
    json.dump(told, file)

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        data = json.dumps(dict(build_info="b1")).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

DIES = """#!{python}
import sys
sys.exit("no such model")
"""


def program(folder: Path, text: str) -> Path:
    path = folder / "llama-server"
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelFile:
    """A model with given properties, which no llama.cpp has to open."""
    about = SimpleNamespace(vocabulary=Vocabulary((1, 2), None, None), takes_chats=False, state_bytes=77)
    monkeypatch.setattr(ServerTarget, "_about", lambda self, model: about)
    return ModelFile("it", tmp_path / "it.gguf", server=["--of-the-model"])


def test_missing_server_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    for path in (tmp_path, tmp_path / "none", tmp_path / "text"):
        with pytest.raises(TargetError, match="is no program"):
            ServerTarget("it", path)


def test_target_needs_a_model() -> None:
    with pytest.raises(TargetError, match="it needs a model"):
        ServerTarget("it", Path(sys.executable)).open(None, Shape(256)).__enter__()


def test_llama_server_runs_for_one_session(
    model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")  # of whoever runs the check
    target = ServerTarget("it", program(tmp_path, ANSWERS), ["--of-the-user"])
    with target.open(model, Shape(256, 3)) as session:
        told = json.loads((tmp_path / "llama-server.json").read_text())
        assert session.resident()
        assert (session.parallel, session.takes_tokens, session.takes_chats) == (3, True, False)
        assert session.state_bytes == 77
    command = " ".join(told["command"])
    assert f"--model {model.path} " in command
    assert " -np 3 -c 768 " in command
    assert " -fa off " in command
    assert command.endswith("--of-the-model --of-the-user")
    assert not [name for name in told["environment"] if name.startswith("LLAMA_")]
    assert target.versions == {"llama-server": "b1"}
    with pytest.raises(ProcessLookupError):
        os.kill(told["pid"], 0)


def test_dead_llama_server_is_reported_with_its_last_line(model: ModelFile, tmp_path: Path) -> None:
    target = ServerTarget("it", program(tmp_path, DIES))
    with pytest.raises(TargetError, match="llama-server died, exit status 1: no such model"):
        target.open(model, Shape(256)).__enter__()
