"""The meaning of typed lines, without a terminal or a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamahybrid.cli.dialogue import Dialogue, Step


def typed(dialogue: Dialogue, *lines: str) -> Step:
    """The last line's step; each question is answered with its own text in capitals."""
    step = Step()
    for line in lines:
        step = dialogue.line(line)
        if step.answer:
            dialogue.answered(dialogue.messages[-1]["content"].upper())
    return step


def said(dialogue: Dialogue) -> list[str]:
    return [message["content"] for message in dialogue.messages if message["role"] == "user"]


@pytest.fixture
def two() -> Dialogue:
    dialogue = Dialogue()
    typed(dialogue, "one", "two")
    return dialogue


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["  plain \n"], "plain"),
        (["a\\", "b \\\r\n", "c"], "a\nb \nc"),
        (['"""', "", "  x\\", "/undo", '"""'], "\n  x\\\n/undo"),
        (['"""\n/a\nb\n"""'], "/a\nb"),
        (["pasted\n/b\n\nc"], "pasted\n/b\n\nc"),
        (["a\\", '"""', "b"], 'a\n"""'),
        ([" /usr/bin"], "/usr/bin"),
        (['"""x"""'], '"""x"""'),
    ],
)
def test_messages_have_one_or_many_lines(lines: list[str], message: str) -> None:
    dialogue = Dialogue()
    for line in lines:
        step = dialogue.line(line)
        if step.answer:
            break
        assert dialogue.unfinished
        assert dialogue.prompt == "... "
    assert said(dialogue) == [message]
    assert dialogue.prompt == "> "


def test_undo_removes_turns(two: Dialogue) -> None:
    assert not typed(two, "/undo").wrong
    assert said(two) == ["one"]
    typed(two, "three", "four")
    assert typed(two, "/undo 3") == Step(notice="3 turns taken back, 0 left")
    for wrong in ("/undo", "/undo 1"):
        assert typed(two, wrong) == Step(notice="no turns to take back", wrong=True)


def test_edit_changes_the_last_message(two: Dialogue) -> None:
    assert typed(two, "/edit  2 apples\\", "and more").answer
    contents = [message["content"] for message in two.messages]
    assert contents == ["one", "ONE", "2 apples\nand more", "2 APPLES\nAND MORE"]


def test_edit_without_text_offers_the_last_message(two: Dialogue) -> None:
    typed(two, "/edit")
    assert (two.prompt, two.prefill) == ("edit> ", "two")
    typed(two, "new\\")
    assert (two.prompt, two.prefill) == ("... ", "")
    assert typed(two, "message").answer
    assert said(two) == ["one", "new\nmessage"]
    assert two.prompt == "> "


@pytest.mark.parametrize("instead", ["", "/help", "^C"])
def test_abandoned_edit_changes_nothing(two: Dialogue, instead: str) -> None:
    typed(two, "/edit")
    if instead == "^C":
        two.interrupt(0.0)
    else:
        typed(two, instead)
    assert (said(two), two.prompt, two.prefill) == (["one", "two"], "> ", "")


@pytest.mark.parametrize(
    "line", ["/retry", "/edit", "/edit x", "/undo", "/save", "/load", "/nonsense", "/", "/usr/bin is what?"]
)
def test_impossible_commands_are_refused(line: str) -> None:
    dialogue = Dialogue()
    step = dialogue.line(line)
    assert (step.answer, step.quit, step.wrong) == (False, False, True)
    assert step.notice
    assert (said(dialogue), dialogue.prompt) == ([], "> ")


def test_system_prompt_is_set_shown_and_removed(two: Dialogue) -> None:
    typed(two, "/system Be brief.\\", "Always.")
    assert two.messages[0] == {"role": "system", "content": "Be brief.\nAlways."}
    assert "Always." in typed(two, "/system").notice
    typed(two, "/system -")
    assert two.messages[0]["role"] == "user"


def test_failed_load_or_save_changes_nothing(two: Dialogue, tmp_path: Path) -> None:
    code = tmp_path / "x.py"
    code.write_text("import os")
    for line in (f"/load {code}", "/load ~nobody-of-that-name/x", "/load a\0b", f"/save {code}"):
        assert typed(two, line).wrong, line
    assert "No such file" in typed(two, f"/save {tmp_path}/absent/c.json").notice
    assert said(two) == ["one", "two"]
    assert code.read_text() == "import os"


@pytest.mark.parametrize(("seconds", "quits"), [(0.9, True), (1.1, False)])
def test_second_interrupt_within_a_second_quits(seconds: float, quits: bool) -> None:
    dialogue = Dialogue()
    assert not dialogue.interrupt(5.0).quit
    assert dialogue.interrupt(5.0 + seconds).quit is quits


def test_interrupt_drops_unfinished_input() -> None:
    dialogue = Dialogue()
    typed(dialogue, '"""', "never sent")
    dialogue.interrupt(5.0)
    assert (dialogue.unfinished, dialogue.prompt) == (False, "> ")
    typed(dialogue, "said")
    assert said(dialogue) == ["said"]
    assert not dialogue.interrupt(5.5).quit
