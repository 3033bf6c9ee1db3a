"""Servers on tiny models, and clients of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import llama_cpp
import openai
import pytest

from tests.lab.serving import SMALL, Serving, serving

TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def shared(tiny_model: TinyModel) -> Iterator[Serving]:
    """A server that all tests share, and leave unchanged."""
    with serving(tiny_model("qwen35")) as server:
        yield server


@pytest.fixture
def server(shared: Serving) -> Iterator[Serving]:
    """The same; after each test nobody is in, nobody waits, and every slot is free."""
    yield shared
    shared.await_settled()


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    """OpenAI's client of it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: Serving) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client of it."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    """A plain client of it."""
    with httpx.Client(base_url=server.url, timeout=180, trust_env=False) as client:
        yield client


@pytest.fixture
def stock(tiny_model: TinyModel) -> Iterator[Callable[[], Any]]:
    """`stock()`: a fresh stock `Llama` of the same model."""
    options = {name: value for name, value in SMALL.items() if name != "n_parallel"}
    model = str(tiny_model("qwen35"))
    with ExitStack() as stack:

        def fresh() -> llama_cpp.Llama:
            llm = llama_cpp.Llama(model, verbose=False, logits_all=True, **options)
            return stack.enter_context(closing(llm))

        yield fresh
