"""Chats as people have them, played against whatever answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Messages: TypeAlias = list[dict[str, str]]
Ask: TypeAlias = Callable[[Messages], str]

SYSTEM = {"role": "system", "content": "You keep the log of a small ship, and answer in a few words. " * 4}
QUESTIONS = (
    "What lies ahead of us, and how far is it by the chart from the harbour we left?",
    "Then tell me who stands the next watch, and what he is to look out for in the night.",
    "How much water have we left, counting the two casks under the forward hatch?",
    "Write down the course since noon, with every change of it and the reason for the change.",
    "Is there anything in the hold that the salt could spoil before we are there?",
)


def user(text: str) -> dict[str, str]:
    """A question."""
    return {"role": "user", "content": text}


def _thought(text: str) -> dict[str, str]:
    """A finished answer: from the next turn on the template shows what follows </think> only."""
    return {"role": "assistant", "content": f"<think>\n{text}</think>\nSo be it."}


def transcript(questions: Sequence[str]) -> Messages:
    """A chat up to its last question, each but that one answered."""
    chat = [SYSTEM]
    for question in questions:
        chat += [user(question), _thought("Let me see.")]
    return chat[:-1]


def talk(ask: Ask) -> Messages:
    """Turn after turn, thinking stripped from the history."""
    chat = [SYSTEM]
    for question in QUESTIONS:
        chat.append(user(question))
        chat.append(_thought(ask(chat)))
    return chat


def regenerate(ask: Ask) -> None:
    """The last answer, asked for again and again."""
    chat = talk(ask)[:-1]
    for _ in range(3):
        ask(chat)


def edit(ask: Ask) -> None:
    """Another question in the middle, then the old one again."""
    chat = talk(ask)
    ask([*chat[:5], user("No: how much bread?")])
    ask(chat[:-1])


def branches(ask: Ask) -> None:
    """Two continuations of one beginning, in turn; then an edit in the middle of one of them."""
    left = talk(ask)[:-1]
    right = [*left[:3], user("Forget the watch: where is the cat?")]
    for _ in range(3):
        ask(right)
        ask(left)
    ask([*left[:7], user("And the course before noon?")])


SCRIPTS: dict[str, Callable[[Ask], object]] = {
    "talk": talk,
    "regenerate": regenerate,
    "edit": edit,
    "branches": branches,
}
