"""What the chat in the terminal says about drafts."""

from llamahybrid.report import RequestReport
from llamahybrid.terminal_chat import turn_line


def line(**drafts) -> str:
    return turn_line(RequestReport(total=9, matched=4, cached=4, source="live", reason="", **drafts))


def test_drafts_are_told_where_there_were_any():
    told = line(drafted=12, accepted=9, rollbacks={"planes": 2, "snapshot": 1})
    assert told.endswith(", drafted 12, accepted 9, taken back 2 by planes, 1 by snapshot")
    assert line(drafted=3, accepted=3).endswith(", drafted 3, accepted 3")
    assert "draft" not in line()
