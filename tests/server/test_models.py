"""Models by alias."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llamahybrid.errors import DeviceError
from llamahybrid.server.errors import Refusal
from llamahybrid.server.models import Models
from llamahybrid.server.settings import ModelSettings


class Opened:
    """A model that notes when it is closed."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.offload = SimpleNamespace(lost=False)
        self.prompt_cache = f"what {name} knows"
        log.append(f"open {name}")

    def close(self) -> None:
        self._log.append(f"close {self._name}")


def models(*names: str, log: list[str] | None = None) -> Models:
    settings = [ModelSettings(model=f"/models/{name}.gguf", model_alias=name) for name in names]
    loader: Any = lambda s: Opened([] if log is None else log, str(s.model_alias))  # noqa: E731
    return Models(settings, loader)


def test_one_is_open_at_a_time() -> None:
    log: list[str] = []
    both = models("a", "b", log=log)
    assert both.default == "a"
    assert both.open("a") is both.open("a") is both.llm
    both.open("b")
    both.close()
    both.close()
    assert log == ["open a", "close a", "open b", "close b"]
    assert both.llm is None


def test_a_model_whose_server_is_gone_is_opened_again_with_what_it_knew() -> None:
    given: list[tuple[Any, ...]] = []
    failing: list[Exception] = []

    def load(settings: ModelSettings, *cache: Any) -> Any:
        given.append(cache)
        if failing:
            raise failing.pop()
        return Opened([], str(settings.model_alias))

    both = Models([ModelSettings(model=f"/{n}.gguf", model_alias=n) for n in "ab"], load)
    first: Any = both.open("a")
    assert both.open("a") is first
    first.offload.lost = True
    failing.append(DeviceError("it is not back yet"))
    with pytest.raises(DeviceError):
        both.open("a")
    assert (both.llm, both.current) == (None, None)
    again: Any = both.open("a")
    assert given == [(), ("what a knows",), ("what a knows",)]
    assert both.open("a") is again is not first
    again.offload.lost = True
    both.open("b")
    both.open("a")
    assert given[3:] == [(), ()], "one that was closed as usual begins anew, as ever"


def test_a_name_that_nobody_gave_means_the_default() -> None:
    both = models("a", "b")
    assert [both.alias(name) for name in (None, "b", "gpt-4o")] == ["a", "b", "a"]


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/b", "\\\\host\\x", "c:\\x", "x.gguf", "/models/a.gguf"]
)
def test_a_path_is_no_name(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        models("a").alias(name)
    assert refused.value.status == 404
    assert refused.value.code == "model_not_found"
    assert name not in str(refused.value)


def test_an_alias_may_look_like_a_path_if_the_operator_says_so() -> None:
    assert models("Qwen/Qwen3").alias("Qwen/Qwen3") == "Qwen/Qwen3"


@pytest.mark.parametrize("path", ["/models/deep/x.gguf", "C:\\models\\x.gguf", "x.gguf"])
def test_a_model_without_an_alias_is_called_as_its_file(path: str) -> None:
    assert list(Models([ModelSettings(model=path)], lambda _: None)) == ["x.gguf"]  # type: ignore[arg-type, return-value]


def test_two_of_one_name_and_none_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="'a'"):
        models("a", "a")
    with pytest.raises(ValueError, match="no model"):
        models()
