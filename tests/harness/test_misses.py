"""Explanations of cache misses: the token where prompts diverge, and the usual causes by name."""

from __future__ import annotations

from collections.abc import Sequence

from llamahybrid.harness.conversation import Message, Request
from llamahybrid.harness.misses import explain, explain_text, parting
from llamahybrid.harness.runner import RequestResult
from llamahybrid.harness.targets.base import Reply
from llamahybrid.harness.traces.trace import rendered

HEAD = (
    "The keeper of the lighthouse answers questions of visitors, briefly and without inventing figures. " * 2
)


def spell(tokens: Sequence[int]) -> str:
    """Tokens are characters here."""
    return "".join(map(chr, tokens))


def past(
    prompt: str,
    answer: str = "",
    chat: str = "0",
    *,
    messages: Sequence[Message] = (),
    salt: str = "",
    cached: int | None = None,
    reason: str | None = None,
) -> RequestResult:
    codes = tuple(map(ord, prompt)), tuple(map(ord, answer + "."))
    request = Request(8, messages=messages, salt=salt, chat=chat)
    return RequestResult(request, Reply("", 0.1, None, *codes, reported=cached, reason=reason), 0)


def test_full_reuse_has_no_miss() -> None:
    one = past(HEAD, "yes", cached=0)
    assert explain(one, [], spell) is None
    two = past(HEAD + "yes" + " and then?", cached=len(HEAD) + 3)
    assert explain(two, [one], spell) is None


def test_miss_names_dropped_thinking() -> None:
    one = past(HEAD + "Who?<think>", "Let me see now.</think>The second keeper, who had the watch", cached=0)
    two = past(HEAD + "Who?The second keeper, who had the watch", cached=0)
    said = explain(two, [one], spell)
    assert said is not None
    assert f"part at token {len(HEAD) + 4}" in said
    assert "'The seco' was '<think>L'" in said
    assert "drops it from the history" in said
    assert "recurrent" in said, "and why the target could not go back there"
    faulty = explain(two, [one], spell, sound=False)
    assert faulty is not None
    assert "from the history" not in faulty, "the client is not to blame for a cache with faults"
    assert said.startswith(faulty)


def test_miss_names_a_changing_date() -> None:
    def asked(minute: int) -> RequestResult:
        system = f"It is 2026-03-01 09:{minute}. {HEAD}"
        messages = ({"role": "system", "content": system}, {"role": "user", "content": "Who?"})
        return past(system + "Who?", messages=messages, cached=0)

    said = explain(asked(17), [asked(10)], spell)
    assert said is not None
    assert "a date or time changes there" in said
    longer = explain(past(asked(17).request.messages[0]["content"], cached=17), [asked(10)], spell)
    assert longer is not None
    assert "stand in both and had to be decoded again" in longer


def test_miss_names_an_edited_message() -> None:
    def asked(first: str, cached: int = 0) -> RequestResult:
        texts = [
            HEAD,
            first,
            "It was finished in 1878, and has stood there ever since, in all weathers",
            "When?",
        ]
        roles = ["system", "user", "assistant", "user"]
        messages = tuple({"role": r, "content": t} for r, t in zip(roles, texts, strict=True))
        return past("".join(texts), messages=messages, cached=cached)

    said = explain(asked("How old is it?", len(HEAD)), [asked("What age has it?")], spell)
    assert said is not None
    assert "message 2 (user) is not what it was" in said


def test_miss_names_another_chat_in_the_slot() -> None:
    one, other = past(HEAD, "yes", cached=0), past("Something else. " * 10, "no", chat="1", cached=0)
    said = explain(past(HEAD + "yes, go on", cached=0), [one, other], spell)
    assert said is not None
    assert "another chat took its place" in said


def test_miss_names_eviction() -> None:
    one = past(HEAD, "yes", cached=0)
    again_ = past(HEAD + "yes, go", "on", cached=len(HEAD) + 3)
    other = past("Something else. " * 10, "no", chat="1", cached=0)
    said = explain(past(HEAD + "yes, no", cached=0), [one, again_, other], spell)
    assert said is not None
    assert "evicted" in said


def test_miss_names_another_salt() -> None:
    said = explain(past(HEAD, salt="b", cached=0), [past(HEAD, salt="a", cached=0)], spell)
    assert said is not None
    assert "another salt" in said
    assert parting(past(HEAD).prompt, [past(HEAD, salt="a")], "b") == (0, None)
    assert explain(past(HEAD, salt="b", cached=len(HEAD)), [past(HEAD, salt="a", cached=0)], spell) is None


def test_miss_quotes_the_reason_of_the_target() -> None:
    said = explain(
        past(HEAD + "yes", cached=0, reason="no restore point before it"), [past(HEAD, "no")], spell
    )
    assert said is not None
    assert "the target says: no restore point before it" in said


def test_misses_without_token_ids_count_characters() -> None:
    def asked(minute: int) -> RequestResult:
        messages = ({"role": "system", "content": f"It is 09:{minute}. {HEAD}"},)
        return past(rendered(Request(8, messages=messages)), messages=messages)

    said = explain_text(asked(17), [asked(10)])
    assert said is not None
    assert "character" in said
    assert "a date or time changes" in said
