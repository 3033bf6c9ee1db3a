"""`llamahybrid run` with upstream's own server, unmodified, and a real client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SYSTEM, listening, needed
from tests.lab.waiting import free_port

openai = needed("openai", "llama_cpp_server")
needed("sse_starlette", "llama_cpp_server")


@contextmanager
def served(command: list[str], model: str, tmp_path: Path) -> Iterator[Any]:
    port = free_port()
    options = ["--model", model, "--n_ctx", "2048", "--chat_format", "chatml", "--port", str(port)]
    options += ["--n_threads", "1", "--n_threads_batch", "1", "--seed", "7"]
    with listening([*command, *options], port, tmp_path / "server.log"):
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def answers(client: Any) -> list[str]:
    said = []
    for question in (*ASKED, ASKED[0]):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        said.append(client.chat.completions.create(**options).choices[0].message.content)
        chunks = client.chat.completions.create(**options, stream=True)
        said.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    return said


def test_unmodified_server_reuses_prompts_with_the_same_answers(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = str(tiny_model("qwen35"))
    with served([sys.executable, "-m", "llama_cpp.server"], model, tmp_path) as client:
        expected = answers(client)
    program = tmp_path / "program.py"
    program.write_text(
        "import llamahybrid, llama_cpp, sys\n"
        "made = llama_cpp.Llama.__init__\n"
        "def __init__(self, *args, **options):\n"
        "    made(self, *args, **options)\n"
        "    self.on_request = lambda r: print('reused', r.cached, file=sys.stderr, flush=True)\n"
        "llama_cpp.Llama.__init__ = __init__\n"
        "import runpy\n"
        "runpy.run_module('llama_cpp.server', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-m", "llamahybrid", "run", str(program)]
    with served(command, model, tmp_path) as client:
        assert answers(client) == expected
    log = (tmp_path / "server.log").read_text()
    reused = [int(line.split()[1]) for line in log.splitlines() if line.startswith("reused")]
    assert len(reused) == len(expected)
    assert all(tokens > len(SYSTEM) for tokens in reused[1:])
