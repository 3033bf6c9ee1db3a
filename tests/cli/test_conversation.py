"""The messages of a chat and the files in which they are saved."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llamahybrid.cli import conversation
from llamahybrid.cli.conversation import Message, read, save

TEXTS = {"system": "Be brief.", "user": "Hé\nthere", "assistant": "[/] \x1b \u2028"}


def chat(*roles: str) -> list[Message]:
    return [{"role": role, "content": TEXTS[role]} for role in roles or ("system", "user", "assistant")]


@pytest.mark.parametrize("last", [(), ("user",), ("user", "assistant")])
@pytest.mark.parametrize("first", [(), ("system",), ("system", "user", "assistant"), ("user", "assistant")])
def test_saved_chat_is_read_as_it_was(tmp_path: Path, first: tuple[str, ...], last: tuple[str, ...]) -> None:
    messages = [message for role in (*first, *last) for message in chat(role)]
    for _ in range(2):  # over its own file, too
        save(tmp_path / "c.json", messages)
    assert read(tmp_path / "c.json") == json.loads((tmp_path / "c.json").read_bytes()) == messages
    assert os.listdir(tmp_path) == ["c.json"]


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import os", "Invalid JSON"),
        ('[{"role": "user"', "Invalid JSON"),
        ("[" * 200_000, "Invalid JSON"),
        ("3", "valid array"),
        ('{"messages": []}', "valid array"),
        (["x"], "0: "),
        ([USER, {"role": "tool", "content": "x"}], "1: role: .*'assistant'"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "0: content: .*string"),
        ([{"role": ["user"], "content": "x"}], "0: role: "),
        ([USER, USER], "take turns"),
        ([{"role": "assistant", "content": "x"}], "take turns"),
        ([USER, {"role": "system", "content": "x"}], "may come first"),
        ([{"role": "user", "content": "\ud800"}], "Invalid JSON"),
    ],
)
def test_files_without_messages_are_refused(tmp_path: Path, content: object, said: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    before = file.read_bytes()
    with pytest.raises(ValueError, match=said):
        read(file)
    with pytest.raises(ValueError, match="left alone"):
        save(file, chat())
    assert file.read_bytes() == before


def test_a_file_that_an_editor_began_with_a_mark_is_read(tmp_path: Path) -> None:
    save(tmp_path / "c.json", chat())
    (tmp_path / "c.json").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "c.json").read_bytes())
    assert read(tmp_path / "c.json") == chat()


def test_folders_pipes_and_missing_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    for name in ("pipe", ".", "absent"):
        with pytest.raises(ValueError, match=r"file"):
            read(tmp_path / name)
    save(tmp_path / "c.json", chat())
    monkeypatch.setattr(conversation, "LARGEST_FILE", 20)
    with pytest.raises(ValueError, match="larger"):
        read(tmp_path / "c.json")


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c.json", chat())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "c.json", [])
    assert os.listdir(tmp_path) == ["c.json"]
    assert read(tmp_path / "c.json") == chat()
