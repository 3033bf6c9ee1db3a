"""The messages of a chat and the files in which they are saved."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llamahybrid.cli import conversation
from llamahybrid.cli.conversation import Conversation, Turn, read


def chat() -> Conversation:
    return Conversation("Be brief.", [Turn("Hé\nthere", "[/] \x1b \u2028"), Turn("And?", "")])


@pytest.mark.parametrize("turns", [chat().turns, [*chat().turns, Turn("open")], []])
def test_saved_chat_is_read_as_it_was(tmp_path: Path, turns: list[Turn]) -> None:
    saved = Conversation("Be brief.", list(turns))
    saved.save(tmp_path / "c.json")
    assert read(tmp_path / "c.json") == saved
    assert json.loads((tmp_path / "c.json").read_bytes()) == saved.messages
    Conversation("", saved.turns).save(tmp_path / "c.json")
    assert read(tmp_path / "c.json").system == ""
    assert os.listdir(tmp_path) == ["c.json"]


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import os", "not JSON"),
        ('[{"role": "user"', "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("3", "not a list"),
        ('{"a": []}', "not a list"),
        (["x"], "message 1"),
        ([USER, {"role": "tool", "content": "x"}], "message 2"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "message 1"),
        ([{"role": ["user"], "content": "x"}], "message 1"),
        ([USER, USER], "take turns"),
        ([{"role": "assistant", "content": "x"}], "take turns"),
        ([USER, {"role": "system", "content": "x"}], "may come first"),
        ([{"role": "user", "content": "\ud800"}], "half a character"),
    ],
)
def test_files_without_messages_are_refused(tmp_path: Path, content: object, said: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    before = file.read_bytes()
    with pytest.raises(ValueError, match=said):
        read(file)
    with pytest.raises(ValueError, match="left alone"):
        chat().save(file)
    assert file.read_bytes() == before


def test_folders_pipes_and_missing_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    for name in ("pipe", ".", "absent"):
        with pytest.raises(ValueError, match=r"file"):
            read(tmp_path / name)
    chat().save(tmp_path / "c.json")
    monkeypatch.setattr(conversation, "LARGEST_FILE", 20)
    with pytest.raises(ValueError, match="larger"):
        read(tmp_path / "c.json")


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat().save(tmp_path / "c.json")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        Conversation().save(tmp_path / "c.json")
    assert os.listdir(tmp_path) == ["c.json"]
    assert read(tmp_path / "c.json") == chat()
