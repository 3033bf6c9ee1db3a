"""A sentence a miss: where histories part, what stood there, and the usual causes by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamahybrid.evaluate.misses import Past, again, explain, explain_text, parting
from llamahybrid.evaluate.targets.base import Ask
from llamahybrid.evaluate.traces.trace import rendered

HEAD = (
    "The keeper of the lighthouse answers questions of visitors, briefly and without inventing figures. " * 2
)


def spell(tokens: Sequence[int]) -> str:
    """Tokens are characters here."""
    return "".join(map(chr, tokens))


def past(prompt: str, answer: str = "", chat: str = "0", turn: int = 0, **more: Any) -> Past:
    ask = Ask(8, salt=more.pop("salt", ""), messages=more.pop("messages", ()))
    codes = tuple(map(ord, prompt)), tuple(map(ord, answer + "."))
    return Past(ask, chat, turn, *codes, **more)


def test_nothing_is_said_where_all_was_reused() -> None:
    one = past(HEAD, "yes", cached=0)
    assert explain(one, [], spell) is None
    two = past(HEAD + "yes" + " and then?", cached=len(HEAD) + 3)
    assert explain(two, [one], spell) is None


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert explain(past(HEAD, cached=None), [past(HEAD)], spell) is None


def test_thinking_that_the_client_drops() -> None:
    one = past(HEAD + "Who?<think>", "Let me see now.</think>The second keeper, who had the watch", cached=0)
    two = past(HEAD + "Who?The second keeper, who had the watch", cached=0, turn=1)
    said = explain(two, [one], spell)
    assert said is not None
    assert f"part at token {len(HEAD) + 4}" in said
    assert "'The seco' was '<think>L'" in said
    assert "drops it from the history" in said
    assert "recurrent" in said, "and why the target could not go back there"


def test_a_date_in_the_system_prompt() -> None:
    def asked(minute: int) -> Past:
        system = f"It is 2026-03-01 09:{minute}. {HEAD}"
        messages = ({"role": "system", "content": system}, {"role": "user", "content": "Who?"})
        return past(system + "Who?", messages=messages, cached=0, turn=minute - 10)

    said = explain(asked(17), [asked(10)], spell)
    assert said is not None
    assert "a date or time changes there" in said
    longer = explain(past(asked(17).ask.messages[0]["content"], cached=17), [asked(10)], spell)
    assert longer is not None
    assert "stand in both and had to be decoded again" in longer


def test_an_edited_message() -> None:
    def asked(first: str, turn: int) -> Past:
        texts = [
            HEAD,
            first,
            "It was finished in 1878, and has stood there ever since, in all weathers",
            "When?",
        ]
        roles = ["system", "user", "assistant", "user"]
        messages = tuple({"role": r, "content": t} for r, t in zip(roles, texts, strict=True))
        return past("".join(texts), messages=messages, cached=len(HEAD) if turn else 0, turn=turn)

    said = explain(asked("How old is it?", 1), [asked("What age has it?", 0)], spell)
    assert said is not None
    assert "message 2 (user) is not what it was" in said


def test_a_changing_system_prompt() -> None:
    def asked(name: str, turn: int) -> Past:
        messages = ({"role": "system", "content": name + HEAD}, {"role": "user", "content": "Who?"})
        return past("sys:" + name + HEAD + "Who?", messages=messages, cached=4 if turn else 0, turn=turn)

    said = explain(asked("Berta. ", 1), [asked("Anna. ", 0)], spell)
    assert said is not None
    assert "the system prompt changes between turns" in said


def test_the_same_text_in_other_tokens() -> None:
    words = {1: "in", 2: "side", 3: "inside", 4: " the tower", 5: " is a lamp"}

    def spelled(tokens: Sequence[int]) -> str:
        return "".join(words.get(token, f" w{token}") for token in tokens)

    head = tuple(range(100, 140))
    one = Past(Ask(4), "0", 0, head, (1, 2, 4, 5, 9))
    two = Past(Ask(4), "0", 1, (*head, 3, 4, 5, 20, 21), cached=0)
    said = explain(two, [one], spelled)
    assert said is not None
    assert "the text is the same, but in other tokens" in said


def test_another_chat_took_the_slot() -> None:
    one, other = past(HEAD, "yes", cached=0), past("Something else. " * 10, "no", chat="1", cached=0)
    said = explain(past(HEAD + "yes, go on", cached=0, turn=1), [one, other], spell)
    assert said is not None
    assert "another chat took its place" in said


def test_what_was_there_has_been_evicted() -> None:
    one = past(HEAD, "yes", cached=0)
    again_ = past(HEAD + "yes, go", "on", cached=len(HEAD) + 3, turn=1)
    other = past("Something else. " * 10, "no", chat="1", cached=0)
    said = explain(past(HEAD + "yes, no", cached=0, turn=2), [one, again_, other], spell)
    assert said is not None
    assert "evicted" in said


def test_salts_that_differ() -> None:
    said = explain(past(HEAD, salt="b", cached=0), [past(HEAD, salt="a", cached=0)], spell)
    assert said is not None
    assert "another salt" in said
    assert parting(past(HEAD).prompt, [past(HEAD, salt="a")], "b") is None
    assert explain(past(HEAD, salt="b", cached=len(HEAD)), [past(HEAD, salt="a", cached=0)], spell) is None


def test_the_targets_own_words_are_quoted() -> None:
    said = explain(past(HEAD + "yes", cached=0), [past(HEAD, "no")], spell, "no restore point before it")
    assert said is not None
    assert "the target says: no restore point before it" in said


def test_hashed_texts_are_not_shown() -> None:
    said = explain(past(HEAD + "yes", cached=0), [past(HEAD, "no")], lambda tokens: None)
    assert said is not None
    assert "'" not in said


def test_characters_stand_for_tokens_where_none_are_told() -> None:
    def asked(minute: int) -> Past:
        messages = ({"role": "system", "content": f"It is 09:{minute}. {HEAD}"},)
        ask = Ask(8, messages=messages)
        return Past(ask, "0", minute - 10, tuple(map(ord, rendered(ask))))

    said = explain_text(asked(17), [asked(10)])
    assert said is not None
    assert "character" in said
    assert "a date or time changes" in said


def test_what_comes_again_is_counted_in_runs() -> None:
    assert again((1, 2, 3), (1, 2, 3)) == 0
    assert again(tuple(range(20)), tuple(range(100))) == 20
    assert again((*range(10), 50, *range(10, 20)), tuple(range(20))) == 20
