"""Models by alias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.ram import default_ram_bytes
from llamahybrid.server.errors import Refusal
from llamahybrid.server.models import Models
from llamahybrid.server.settings import ModelSettings


class Opened:
    """A model that notes when it is closed."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.prompt_cache = PromptCache(1 << 20)
        log.append(f"open {name}")

    def close(self) -> None:
        self._log.append(f"close {self._name}")


def models(*names: str, log: list[str] | None = None) -> Models:
    settings = [ModelSettings(model=f"/models/{name}.gguf", model_alias=name) for name in names]
    loader: Any = lambda s: Opened([] if log is None else log, str(s.model_alias))  # noqa: E731
    return Models(settings, loader)


def test_open_models_stay_open_until_they_are_closed() -> None:
    log: list[str] = []
    both = models("a", "b", log=log)
    assert both.default == "a"
    assert both.open("a") is both.open("a") is both.llm
    both.open("b")
    assert list(both.opened) == ["a", "b"]
    both.close("b")
    assert list(both.opened) == ["a"]
    both.close()
    both.close()
    assert log == ["open a", "open b", "close b", "close a"]
    assert both.llm is None


def sized(tmp_path: Path, sizes: dict[str, int], budget: int | None, **more: Any) -> Models:
    """Return models with files of these sizes, without attention."""
    settings = []
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
        settings.append(ModelSettings(model=str(tmp_path / name), model_alias=name, **more))
    return Models(settings, lambda s: Opened([], str(s.model_alias)), budget)  # type: ignore[arg-type, return-value]


def test_as_many_are_closed_for_another_as_the_budget_asks_for(tmp_path: Path) -> None:
    all_of_them = sized(tmp_path, {"a": 1000, "b": 1000, "c": 1000, "large": 90_000}, 3000)
    for name in "ab":
        all_of_them.open(name)
    assert all_of_them.in_the_way("a", ["b"]) == [], "it is open already"
    assert all_of_them.in_the_way("c", ["b", "a"]) == ["b"], "a tenth on top leaves room for two"
    assert all_of_them.in_the_way("c", []) is None, "those that may be closed are too few"
    assert all_of_them.in_the_way("large", ["b", "a"]) == ["b", "a"], "it is open alone"
    assert all_of_them.in_the_way("large", ["b"]) is None


def test_with_layers_on_devices_one_is_open_at_a_time_unless_the_operator_says_more(tmp_path: Path) -> None:
    for budget, closed in ((None, ["a"]), (1 << 30, [])):
        both = sized(tmp_path, {"a": 1000, "b": 1000}, budget, n_gpu_layers=-1)
        both.open("a")
        assert both.in_the_way("b", ["a"]) == closed


def test_caches_without_a_budget_of_their_own_share_one() -> None:
    settings = [ModelSettings(model=f"/{n}.gguf", model_alias=n) for n in "ab"]
    settings.append(ModelSettings(model="/c.gguf", model_alias="c", ram_bytes=1 << 20))
    three = Models(settings, lambda s: Opened([], str(s.model_alias)))  # type: ignore[arg-type, return-value]
    for name in "abc":
        three.open(name)
    shares = [cache.ram_bytes for cache in three.caches.values()]
    assert shares == [default_ram_bytes() // 2, default_ram_bytes() // 2, 1 << 20]


@pytest.mark.parametrize("name", [None, "a", "gpt-4o", "Qwen/Qwen3-0.6B", "/etc/passwd", "x.gguf"])
def test_a_single_model_answers_to_every_name(name: str | None) -> None:
    assert models("a").alias(name) == "a"


def test_a_name_that_none_of_several_models_has_is_refused_with_the_nearest_one() -> None:
    both = models("qwen", "llama")
    assert [both.alias(name) for name in (None, "", "qwen", "llama")] == ["qwen", "qwen", "qwen", "llama"]
    for name, hint in (("qwen3", "did you mean 'qwen'"), ("/etc/passwd", "/v1/models")):
        with pytest.raises(Refusal, match=hint) as refused:
            both.alias(name)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_a_model_may_have_several_names_the_first_of_which_answers_have() -> None:
    both = models("Qwen/Qwen3, gpt-4o,local", "b")
    assert list(both) == ["Qwen/Qwen3", "b"]
    assert {both.alias(name) for name in ("Qwen/Qwen3", "gpt-4o", "local")} == {"Qwen/Qwen3"}
    assert both.names("Qwen/Qwen3") == ["gpt-4o", "local"]
    assert both.names("b") == []
    with pytest.raises(ValueError, match="'b'"):
        models("a,b", "c,b")


@pytest.mark.parametrize("path", ["/models/deep/x.gguf", "C:\\models\\x.gguf", "x.gguf"])
def test_a_model_without_an_alias_is_called_as_its_file(path: str) -> None:
    assert list(Models([ModelSettings(model=path)], lambda _: None)) == ["x.gguf"]  # type: ignore[arg-type, return-value]


def test_two_of_one_name_and_none_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="'a'"):
        models("a", "a")
    with pytest.raises(ValueError, match="no model"):
        models()
