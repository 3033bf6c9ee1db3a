"""The page at /cache: who gets it, what it says, and that nothing said in a conversation becomes markup."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.client.salt import digest
from llamahybrid.memory.fingerprint import salt_tag
from llamahybrid.server import cache_page
from llamahybrid.server.keys import DIGEST_LETTERS, Viewers, salt_of
from llamahybrid.server.settings import ServerSettings
from tests.lab.serving import Held, Serving, serving, wait_until

FILES = ("/cache", "/cache/cache.js", "/cache/cache.css", "/cache/data")
SYSTEM = "You are a patient assistant who explains one step at a time, and never hurries. "
PAGE = Path(cache_page.__file__).with_name("page")


@pytest.fixture(scope="module")
def keyed(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with two users whose keys are salts, and an operator."""
    folder = tmp_path_factory.mktemp("keyed")
    model = {"disk_dir": str(folder)}
    keys = {"api_keys": ["one", "two"], "operator_key": "boss"}
    with serving(tiny_model("qwen35"), model=model, salt_by_key=True, **keys) as server:
        for key in ("one", "two"):
            for question in ("What is a cache?", "What is a crow?"):
                ask(server, f"{SYSTEM}{question} {key}'s <script>", key)
        yield server


def ask(server: Serving, prompt: str, key: str = "", **more: Any) -> None:
    asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0.0, **more}
    with server.client(headers={"x-api-key": key}) as client:
        assert client.post("/v1/completions", json=asked).status_code == 200
    server.await_settled()


def data(server: Serving, key: str = "", **query: Any) -> dict[str, Any]:
    with server.client(headers={"x-api-key": key}) as client:
        answer = client.get("/cache/data", params=query)
    assert answer.status_code == 200
    told: dict[str, Any] = answer.json()
    return told


def tag(key: str) -> str:
    return salt_tag(digest(salt_of(key)))


def texts(told: dict[str, Any]) -> list[str]:
    return [branch["text"] for branch in told["tree"]["branches"] if "text" in branch]


# -- who gets it -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "operators", "others"),
    [
        ({"api_key": "one", "api_keys": ["one"]}, ["one"], ["other", None]),
        ({"api_keys": ["one", "two"]}, [], ["one", "two"]),
        ({"api_keys": ["one", "two"], "operator_key": "boss"}, ["boss"], ["one"]),
        ({"api_key": "one", "operator_key": "boss"}, ["boss"], ["one"]),
        ({}, [], [None, "", "anything"]),
        ({"open_page": True}, [None, "", "anything"], []),
        ({"open_page": True, "api_keys": ["one", "two"]}, [], ["one"]),
    ],
)
def test_operators(settings: dict[str, Any], operators: list[str | None], others: list[str | None]) -> None:
    viewers = Viewers(ServerSettings(**settings))
    assert all(viewers.of(key).operator for key in operators)
    assert not any(viewers.of(key).operator for key in others)
    assert "boss" not in repr(ServerSettings(**settings))


@pytest.mark.parametrize("path", FILES)
def test_page_needs_a_key(keyed: Serving, path: str) -> None:
    with keyed.client() as client:
        for headers in ({}, {"authorization": "Bearer three"}, basic("three"), basic(""), basic("one", "X")):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic "), "a browser asks for the key"
            assert "<" not in answer.text
        for headers in ({"x-api-key": "one"}, {"authorization": "Bearer one"}, basic("one"), basic("boss")):
            assert client.get(path, headers=headers).status_code == 200


def basic(password: str, name: str = "Basic") -> dict[str, str]:
    return {"authorization": f"{name} {base64.b64encode(f'any:{password}'.encode()).decode()}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/cache"), ("GET", "/cachex")],
)
def test_a_password_opens_nothing_else(keyed: Serving, method: str, path: str) -> None:
    """A browser sends it whatever page makes it ask."""
    with keyed.client() as client:
        answer = client.request(method, path, headers=basic("one"), json={"prompt": "x"})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_nothing_else_is_loaded_and_no_other_page_may_show_it(server: Serving) -> None:
    with server.client() as client:
        for path in FILES:
            answer = client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in answer.headers
    page = (PAGE / "cache.html").read_text()
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["cache/cache.css", "cache/cache.js"]
    assert "style=" not in page
    for name in ("cache.html", "cache.css", "cache.js"):
        assert not re.search(r"https?://|url\(|@import", (PAGE / name).read_text())


def test_script_inserts_data_as_text() -> None:
    script = (PAGE / "cache.js").read_text()
    for name in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval", "DOMParser", "srcdoc"):
        assert name not in script


# -- what it says ----------------------------------------------------------------------------------


def test_users_see_and_read_their_own_conversations(keyed: Serving) -> None:
    for key, other in (("one", "two"), ("two", "one")):
        told = data(keyed, key, text=True)
        assert not told["operator"]
        assert {branch["tenant"] for branch in told["tree"]["branches"]} == {"you"}
        assert {past["tenant"] for past in told["requests"]} == {"you"}
        assert len(told["requests"]) == 2
        said = "".join(texts(told))
        assert f"{key}'s <script>" in said
        assert f"{other}'s" not in json.dumps(told)
        assert tag(other)[:DIGEST_LETTERS] not in json.dumps(told)
        assert {slot["state"] for slot in told["slots"]} == {"idle"}
        assert {slot.get("tenant", "you") for slot in told["slots"]} == {"you"}


def test_the_operator_sees_tenants_by_a_short_digest_and_reads_nothing_of_theirs(keyed: Serving) -> None:
    told = data(keyed, "boss", text=True)
    names = {tag(key)[:DIGEST_LETTERS] for key in ("one", "two")}
    assert {branch["tenant"] for branch in told["tree"]["branches"]} == names
    assert {past["tenant"] for past in told["requests"]} == names
    assert not texts(told)
    assert not any(tag(key) in json.dumps(told) for key in ("one", "two"))
    assert not any(word in json.dumps(told) for word in ("script", "patient"))


def test_without_keys_text_stays_hidden(server: Serving) -> None:
    ask(server, f"{SYSTEM}What is a cow?")
    ask(server, f"{SYSTEM}What is a horse?")
    ask(server, f"{SYSTEM}What is a horse?", cache_salt="mine")
    told = data(server, text=True)
    assert not told["text"]["allowed"]
    assert {branch["tenant"] for branch in told["tree"]["branches"]} == {""}
    assert {past["tenant"] for past in told["requests"]} == {""}
    assert not any(word in json.dumps(told) for word in ("patient", "horse", "mine"))
    assert not texts(told)


def test_no_reason_names_a_token(server: Serving) -> None:
    ask(server, f"{SYSTEM}What is a zebra?")
    ask(server, f"{SYSTEM}What is an okapi?")
    newest, *_ = data(server)["requests"]
    assert newest["reason"].startswith("history differs at token ")
    assert "'" not in newest["reason"]
    assert newest["prompt"] > newest["matched"] >= newest["cached"] > 0
    assert newest["source"] in ("live", "ram")
    assert (newest["end"], newest["generated"]) == ("done", 4)


def test_shared_prefix_is_shown_once(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = {"disk_dir": str(tmp_path / "cache")}
    with serving(tiny_model("qwen35"), model=model, api_key="boss") as server:
        for animal in ("cow", "<script>alert(1)</script>", "horse"):
            ask(server, f"{SYSTEM}What is a {animal}?", "boss")
        assert server.llm.prompt_cache is not None
        server.llm.prompt_cache.flush()
        quiet, told = data(server, "boss"), data(server, "boss", text=True)
        assert not texts(quiet)
        branches = told["tree"]["branches"]
        assert sum(SYSTEM.strip()[:40] in text for text in texts(told)) == 1
        assert sum("<script>alert(1)</script>" in text for text in texts(told)) == 1, "as it was said"
        (top,) = [branch for branch in branches if branch["parent"] < 0]
        assert top["start"] == 0
        assert [branch["start"] for branch in branches if branch["parent"] == 0] == [top["end"]] * 3
        assert any(branch["ram"]["nbytes"] for branch in branches)
        assert any(branch["disk"]["nbytes"] for branch in branches)
        assert {number for branch in branches for number in branch["slots"]} <= {0, 1, 2}
        assert any(branch["slots"] for branch in branches)
        assert told["operator"]
        assert told["text"] == {"allowed": True, "shown": True}
        tiers = told["tiers"]
        assert tiers["ram"]["budget"] == server.llm.prompt_cache.ram_bytes
        assert 0 < tiers["ram"]["bytes"] <= tiers["ram"]["budget"]
        assert sum(branch["disk"]["nbytes"] for branch in branches) == tiers["disk"]["bytes"] > 0
        assert data(server, "boss", most=1)["tree"]["branches"][0]["more"] == 3
        with server.client(headers={"x-api-key": "boss"}) as client:
            for most in (0, 100_000, "x"):
                assert client.get("/cache/data", params={"most": most}).status_code in (400, 422)


def test_slots_show_their_requests(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {
        "prompt": f"{SYSTEM}Tell me a story",
        "max_tokens": 60,
        "min_tokens": 60,
        "stream": True,
    }
    for salt in (None, "mine"):
        held = Held(monkeypatch, after=20)
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=asked | {"cache_salt": salt}),
        ):
            wait_until(lambda held=held: held.batches > 20)
            (busy,) = [slot for slot in data(server)["slots"] if slot["is_processing"]]
            held.go_on()
        monkeypatch.undo()
        server.await_settled()
        if salt is not None:
            assert busy.keys() == {"id", "n_ctx", "speculative", "is_processing", "state"}
            continue
        read = busy["n_prompt_tokens_cache"] + busy["n_prompt_tokens_processed"]
        assert read == busy["n_prompt_tokens"], "it answers"
        assert busy["next_token"][0]["n_decoded"] > 0
        assert busy["n_past"] >= busy["n_prompt_tokens"] > 0
