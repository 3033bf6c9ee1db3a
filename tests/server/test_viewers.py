"""Who is shown what at /cache."""

from __future__ import annotations

from typing import Any

import pytest

from llamahybrid.memory.fingerprint import salt_tag
from llamahybrid.request.salt import digest
from llamahybrid.server.keys import salt_of
from llamahybrid.server.settings import ServerSettings
from llamahybrid.server.viewers import DIGEST_LETTERS, Viewer, Viewers, tag_of


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


def test_what_is_seen_and_read() -> None:
    operator, user = Viewer(operator=True), Viewer()
    assert operator.sees("")
    assert operator.reads("")
    assert operator.sees("salted")
    assert not operator.reads("salted"), "by its digest only"
    assert operator.name("0123456789abcd") == "0123456789abcd"[:DIGEST_LETTERS]
    assert user.sees("")
    assert not user.reads("")
    assert not user.sees("salted")
    assert not user.reads("salted")


def test_where_keys_are_salts_each_holder_sees_his_own() -> None:
    settings: dict[str, Any] = {"api_keys": ["one", "two"], "salt_by_key": True}
    one = viewer("one", **settings)
    mine, other = (salt_tag(digest(salt_of(key))) for key in ("one", "two"))
    assert (one.sees(mine), one.reads(mine), one.name(mine)) == (True, True, "you")
    assert (one.sees(other), one.reads(other)) == (False, False)
    assert not one.reads("")
    boss = viewer("boss", operator_key="boss", **settings)
    assert (boss.sees(mine), boss.reads(mine)) == (True, False)


def test_the_salt_that_a_namespace_is_of() -> None:
    assert tag_of("0123") == tag_of("0123?") == ""
    assert tag_of("0123+abc") == tag_of("0123+abc?") == "abc"
