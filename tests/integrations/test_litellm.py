"""LiteLLM's proxy in front of `llamahybrid serve`: Anthropic's client, by the recipe of docs/server.md."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.integrations.sides import free_port, listening, needed

anthropic = needed("anthropic", "litellm")
needed("litellm", "litellm")
needed("sse_starlette", "litellm")

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
HELLO: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
CALL = (
    "I look it up.\n</think>\n\nOne moment.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n"
    "</parameter>\n</function>\n</tool_call>"
)


def recipe(port: int) -> str:
    """LiteLLM's config file as the docs give it, with this port."""
    found = re.search(r"```yaml\n(model_list:.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert found is not None
    text = found.group(1)
    assert "127.0.0.1:8000" in text
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")


@contextmanager
def proxied(port: int, folder: Path) -> Iterator[Any]:
    """Anthropic's client of a proxy in front of that port."""
    config, log = folder / "litellm.yaml", folder / "litellm.log"
    config.write_text(recipe(port))
    own = free_port()
    program = Path(sys.executable).with_name("litellm")
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(own)]
    key = f"sk-{secrets.token_hex(32)}"
    env = {
        **os.environ,
        "LITELLM_MASTER_KEY": key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "*",
        "PYTHONWARNINGS": "ignore",
    }
    url = f"http://127.0.0.1:{own}"
    with listening(command, own, log, env=env, cwd=folder):
        try:
            yield anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=120)
        except anthropic.APIError as error:
            raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from error


@pytest.fixture(scope="module")
def upstream(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    from tests.lab.serving import serving

    settings = {"n_ctx": 8192, "api_config": "qwen3.5-0.8b", "model_alias": "local"}
    with (
        serving(tiny_model("qwen35"), model=settings, api="upstream") as server,
        proxied(server.port, tmp_path_factory.mktemp("proxy")) as client,
    ):
        yield server, client


def script(server: Any, *texts: str) -> None:
    """Have the model say these texts, and end each."""
    tokens = (server.llm.tokenize((t + "<|im_end|>").encode(), add_bos=False, special=True) for t in texts)
    said = chain.from_iterable(tokens)
    server.llm.sample = lambda *args, **kwargs: next(said)


def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    return client.messages.create(model="local", max_tokens=400, messages=messages, **more)


def test_a_message(upstream: tuple[Any, Any]) -> None:
    server, client = upstream
    script(server, "Hm.\n</think>\n\nIt rains.")
    got = ask(client, HELLO, system="You are brief.")
    said = "".join(block.text for block in got.content if block.type == "text")
    assert said.strip() == "It rains."
    assert got.stop_reason == "end_turn"
    assert got.usage.output_tokens > 5


def test_a_tool_and_its_result(upstream: tuple[Any, Any]) -> None:
    server, client = upstream
    script(server, CALL, "\n</think>\n\nIt rains.")
    got = ask(client, HELLO, tools=[TOOL])
    (use,) = [block for block in got.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("weather", {"city": "Paris"})
    assert got.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    said = [
        block.model_dump(exclude_none=True) for block in got.content if block.type in ("text", "tool_use")
    ]
    longer = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    second = ask(client, longer, tools=[TOOL])
    assert "It rains." in "".join(block.text for block in second.content if block.type == "text")
    cached = server.llm.last_request.cached
    assert cached > 500, "the tools and the question were decoded once"


def test_streams(upstream: tuple[Any, Any]) -> None:
    server, client = upstream
    script(server, CALL)
    with client.messages.stream(model="local", max_tokens=400, messages=HELLO, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        got = stream.get_final_message()
    (use,) = [block for block in got.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("weather", {"city": "Paris"})
    assert "One moment." in "".join(block.text for block in got.content if block.type == "text")
    assert got.stop_reason == "tool_use"
    assert kinds.count("content_block_delta") > 10, "it comes as it is made"
    assert got.usage.output_tokens > 20
