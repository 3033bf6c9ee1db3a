"""The requests that docs/guide/server.md gives to paste are answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lab.gguf_edits import with_template
from tests.lab.serving import serving

from .conftest import TinyModel

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "server.md").read_text(encoding="utf-8")
ASKED = re.compile(
    r"^(?:ask (?P<path>\S+)|curl .*?127\.0\.0\.1:8000(?P<url>/\S+).*? -d) '(?P<body>.*?)'$", re.S | re.M
)
BASE = re.compile(r"^ask\(\) \{ curl -s \S+:8000(\S*)/\$1 ", re.M)


def requests() -> list[Any]:
    found = []
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S):
        base = BASE.search(block)
        for each in ASKED.finditer(block):
            path = each["url"] or f"{base[1] if base else ''}/{each['path']}"
            found.append(pytest.param(path, json.loads(each["body"]), id=f"{len(found)}-{path}"))
    return found


@pytest.fixture(scope="module")
def http(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = with_template(tiny_model("qwen35"), tmp_path_factory.mktemp("docs") / "switch.gguf")
    options: Any = {"model": {"logits_all": True, "embedding": True}, "open_page": True}
    with serving(model, **options) as server, server.client() as client:
        yield client


@pytest.mark.parametrize(("path", "body"), requests())
def test_a_request_of_the_docs_is_answered(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    got = http.post(path, json=body)
    assert got.status_code == (501 if path == "/infill" else 200), got.text


def test_all_requests_of_the_docs_are_found() -> None:
    assert len(requests()) == len(re.findall(r"^ask \S+ '| -d '\{", PAGE, re.M)) > 10
