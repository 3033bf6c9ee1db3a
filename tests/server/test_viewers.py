"""Access rights at /cache."""

from __future__ import annotations

from typing import Any

import pytest

from llamahybrid.server.settings import ServerSettings
from llamahybrid.server.viewers import Viewer, Viewers


def viewer(key: str | None, **settings: Any) -> Viewer:
    return Viewers(ServerSettings(**settings)).of(key)


def test_the_holder_of_the_only_key_is_the_operator() -> None:
    assert viewer("one", api_key="one").operator
    assert viewer("one", api_key="one", api_keys=["one"]).operator
    assert not viewer("one", api_keys=["one", "two"]).operator
    assert not viewer("other", api_key="one").operator


def test_of_several_keys_the_named_one_is_the_operator_s() -> None:
    settings: dict[str, Any] = {"api_keys": ["one", "two"], "operator_key": "boss"}
    assert viewer("boss", **settings).operator
    assert not viewer("one", **settings).operator
    assert ServerSettings(**settings).keys().count("boss") == 1
    assert "boss" not in repr(ServerSettings(**settings))
    assert not viewer("one", api_key="one", operator_key="boss").operator


@pytest.mark.parametrize("key", [None, "", "anything"])
def test_without_keys_there_is_no_operator_unless_the_page_is_open(key: str | None) -> None:
    assert not viewer(key).operator
    assert viewer(key, open_page=True).operator
    assert not viewer(key, open_page=True, api_keys=["one", "two"]).operator
