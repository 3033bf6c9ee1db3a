"""What the chat in the terminal says about drafts, and how it is told to draft."""

import pytest
from typer.testing import CliRunner

from llamahybrid.cli import chat as terminal_chat
from llamahybrid.cli.chat import turn_line
from llamahybrid.cli.main import app
from llamahybrid.request.report import RequestReport


def line(**drafts) -> str:
    return turn_line(RequestReport(total=9, matched=4, cached=4, source="live", reason="", **drafts))


def test_drafts_are_told_where_there_were_any():
    told = line(drafted=12, accepted=9, rollbacks={"planes": 2, "snapshot": 1})
    assert told.endswith(", drafted 12, accepted 9, taken back 2 by planes, 1 by snapshot")
    assert line(drafted=3, accepted=3).endswith(", drafted 3, accepted 3")
    assert "draft" not in line()


@pytest.mark.parametrize("guess", [0, 6])
def test_the_chat_drafts_when_told_to(tiny_model, monkeypatch, guess):
    given = {}
    monkeypatch.setattr(terminal_chat, "chat", lambda model, **options: given.update(options))
    result = CliRunner().invoke(app, ["chat", str(tiny_model("qwen35")), "--draft", str(guess)])
    assert result.exit_code == 0, result.output
    draft = given["options"].get("draft_model")
    assert (draft.num_pred_tokens if draft else 0) == guess
