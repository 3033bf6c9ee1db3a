"""The README's example runs as it stands, on a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_reuses_the_first_turn(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "model.gguf").symlink_to(tiny_model("qwen35"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    small = example.replace("n_ctx=32768", "n_ctx=1024, n_threads=1, verbose=False")
    exec(small.replace("completion(messages)", "completion(messages, max_tokens=16)"), names)
    request = names["llm"].last_request
    assert request.left == request.total - request.cached
    assert request.cached == names["answer"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    names["llm"].close()
