"""Links of requests with a common prefix have common names; reports have the resumable links."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.ray.conversations import (
    MOST_CONVERSATIONS,
    NO_HINTS,
    PIECE,
    Hints,
    RecentPrompts,
    deepest,
    hints_of,
)

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=3)}
    ),
    max_size=6,
)


def hints(body: Any, **headers: str) -> Hints:
    return hints_of(headers, json.dumps(body).encode())


def names(body: Any, **headers: str) -> list[int]:
    return [link.name for link in hints(body, **headers).chain]


@given(MESSAGES, MESSAGES)
def test_chats_share_the_names_of_common_messages(one: Any, other: Any) -> None:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    a, b = names({"messages": one}), names({"messages": other})
    assert (len(a), len(b)) == (len(one), len(other))
    assert a[:same] == b[:same]
    assert set(a[same:]).isdisjoint(b[same:])


def test_system_prompt_link_is_shared() -> None:
    chain = hints({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}).chain
    assert [link.own for link in chain] == [False, True]


def test_prompts_are_cut_into_pieces() -> None:
    one, other = "x" * (3 * PIECE) + "a", "x" * (3 * PIECE) + "b"
    assert names({"prompt": one})[:3] == names({"prompt": other})[:3]
    assert names({"prompt": one})[3] != names({"prompt": other})[3]
    assert len(names({"prompt": [1, 2, 3]})) == 1
    assert [link.own for link in hints({"prompt": one}).chain] == [False, True, True, True]


def test_models_tools_and_tenants_share_no_names() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    every = [
        names(body),
        names({**body, "model": "b"}),
        names({**body, "tools": [{}]}),
        names({**body, "cache_salt": "s"}),
        names(body, authorization="Bearer k"),
        names(body, **{"x-api-key": "k"}),
    ]
    assert len({tuple(each) for each in every}) == len(every)


def test_session_names_differ_between_tenants() -> None:
    body = {"messages": [], "prompt_cache_key": "mine"}
    assert hints(body).session == hints(body).session
    assert hints(body).session != hints(body, authorization="Bearer k").session
    assert hints({}, **{"x-session-id": "mine"}).session == hints(body).session
    assert hints({"prompt_cache_key": 5}).session is None


def test_invalid_body_gives_no_hints() -> None:
    for raw in (b"", b"{", b"[]", b"\xff", b"5", b'{"messages": 3}'):
        assert hints_of({}, raw).chain == NO_HINTS.chain
    assert len(hints({"messages": ["no message", None]}).chain) == 2


def ids(n: int) -> Tokens:
    return np.arange(n, dtype=np.int32)


def chat(n: int, first: str = "s") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{first}{i}"} for i in range(n)]}


def test_resumable_links_depend_on_the_depth() -> None:
    asked, four = RecentPrompts(), hints(chat(4))
    asked.add(four, ids(100))
    assert asked.resumable(lambda prompt: 0) == set()
    assert asked.resumable(lambda prompt: 99) == {link.name for link in four.chain}
    half = asked.resumable(lambda prompt: 55)
    assert half == {link.name for link in four.chain[:2]}
    assert deepest(hints(chat(9)).chain, half) == four.chain[1]
    assert deepest(hints(chat(9, "t")).chain, half) is None


def test_longer_prompt_replaces_its_prefix() -> None:
    asked = RecentPrompts()
    for n in range(1, 10):
        asked.add(hints(chat(n)), ids(10 * n))
    looked: list[int] = []
    asked.resumable(lambda prompt: looked.append(len(prompt)) or 0)  # type: ignore[func-returns-value]
    assert looked == [90]
    asked.add(NO_HINTS, ids(5))
    assert len(asked.resumable(len)) == 9


def test_oldest_conversations_are_dropped_first() -> None:
    asked = RecentPrompts()
    for n in range(MOST_CONVERSATIONS + 5):
        asked.add(hints(chat(1, f"{n} ")), ids(10))
    told = asked.resumable(len)
    assert len(told) == MOST_CONVERSATIONS
    assert names(chat(1, "4 "))[0] not in told
    assert names(chat(1, "5 "))[0] in told


def test_surrogates_and_deep_nesting_are_accepted() -> None:
    body = json.dumps(
        {"model": "\ud800", "cache_salt": "\udfff", "messages": [{"role": "user", "content": "\ud800"}]}
    )
    assert len(hints_of({}, body.encode()).chain) == 1
    assert hints_of({}, b"[" * 200_000) == hints_of({}, b"")


def test_session_name_is_short_and_without_the_api_key() -> None:
    body = json.dumps({"prompt_cache_key": "x" * 100_000, "messages": []}).encode()
    session = hints_of({"authorization": "Bearer secret"}, body).session
    assert session is not None
    assert len(session) < 100
    assert "secret" not in session
