"""Hashed traces contain no text, and their prompts share the prefixes that the real ones share."""

from __future__ import annotations

from pathlib import Path

from llamahybrid.harness.conversation import Request
from llamahybrid.harness.oracle import common_prefix
from tests.harness.traces.said import MESSAGES, MORE, SECRET, written


def test_hashed_trace_contains_no_text(tmp_path: Path) -> None:
    ask = Request(
        8, messages=MESSAGES, tools=({"type": "function", "function": {"name": "Seagull"}},), salt="Berta"
    )
    written(tmp_path / "t", ask, Request(8, text=SECRET), hashed=True)
    text = (tmp_path / "t").read_text()
    for word in ("password", "Seagull", "Who", "an answer", "Berta", "harbour"):
        assert word not in text


def test_equal_words_have_different_replacements(tmp_path: Path) -> None:
    words = range(100_000)
    (ask,) = written(tmp_path / "t", Request(1, tokens=(5,) * 50), hashed=True, words=words)
    assert len(set(ask.tokens)) >= 49
    (other,) = written(tmp_path / "u", Request(1, tokens=(5,) * 50), hashed=True, words=words)
    assert len(set(ask.tokens) & set(other.tokens)) <= 1, "the key is the trace's own"
    (small,) = written(tmp_path / "v", Request(1, tokens=(5,) * 50), hashed=True)
    assert max(small.tokens) <= 5, "a token of any vocabulary that has the real ones"


def test_hashed_prompts_share_the_same_prefix(tmp_path: Path) -> None:
    one, two = tuple(range(60)), (*range(40), 99, *range(41, 60))
    asked = [Request(1, tokens=one), Request(1, tokens=two)]
    asked += [Request(8, messages=messages) for messages in (MESSAGES, MORE)]
    played = written(tmp_path / "t", *asked, hashed=True, words=range(1000, 3000), control=(3,))
    assert 40 <= common_prefix(played[0].tokens, played[1].tokens) < 45
    assert len(played[1].tokens) == 60
    assert played[0].tokens[3] == 3, "control tokens are structure"
    assert played[3].messages[:2] == played[2].messages
    assert [len(m["content"]) for m in played[3].messages] == [len(m["content"]) for m in MORE]
    assert [m["role"] for m in played[3].messages] == [m["role"] for m in MORE]
