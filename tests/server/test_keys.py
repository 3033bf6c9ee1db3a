"""API keys."""

from __future__ import annotations

import base64

import pytest

from llamahybrid.server.keys import ApiKeys, key_of, password_of, salt_of


def test_without_keys_all_requests_are_admitted() -> None:
    keys = ApiKeys([])
    assert keys.admit(None)
    assert keys.admit("anything")


def test_with_keys_only_they_open() -> None:
    long = "sk-0123456789abcdef0123456789abcdef"
    keys = ApiKeys(["one", "two", long])
    for right in ("one", "two", long):
        assert keys.admit(right)
    near = (long[:-1], f"{long}0", f"{long[:-1]}e")
    for wrong in (None, "", "on", "one ", "One", "onetwo", *near, "\ud800", "é"):
        assert not keys.admit(wrong)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"authorization": "Bearer one"}, "one"),
        ({"authorization": "bearer  one "}, "one"),
        ({"authorization": "Basic one"}, None),
        ({"authorization": "Bearer"}, None),
        ({"x-api-key": "one"}, "one"),
        ({"authorization": "Bearer two", "x-api-key": "one"}, "two"),
        *[({"authorization": f"Bearer {sent}"}, "é鍵") for sent in ("é鍵".encode().decode("latin-1"), "é鍵")],
        *[({"x-api-key": sent}, "é") for sent in ("é".encode().decode("latin-1"), "é")],
    ],
)
def test_where_a_key_stands(headers: dict[str, str], key: str | None) -> None:
    assert key_of(headers) == key


@pytest.mark.parametrize(
    ("credentials", "password"),
    [
        *[(b"any:one", "one"), (b":one", "one"), (b"any:with:colons", "with:colons"), (b"any:", None)],
        *[("any:é".encode(), "é"), (b"any:\xff", "\udcff"), (b"one", None), (b"", None)],
    ],
)
def test_where_a_browser_puts_a_password(credentials: bytes, password: str | None) -> None:
    header = base64.b64encode(credentials).decode()
    assert password_of({"authorization": f"Basic {header}"}) == password
    for other in (f"Bearer {header}", f"Basic {header[1:]}!", "Basic", "Basic é", ""):
        assert password_of({"authorization": other}) is None
    assert password_of({}) is None


def test_a_key_s_salt_is_its_own_and_does_not_show_it() -> None:
    assert salt_of(None) == salt_of("") == ""
    assert salt_of("one") == salt_of("one") != salt_of("two")
    assert "one" not in salt_of("one")
