"""A replayed trace keeps its chats, and sends prompts in a form that the target takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.errors import ReportError, TargetError
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.report import Report
from llamahybrid.harness.targets.base import ModelFile
from llamahybrid.harness.targets.http import UrlTarget
from llamahybrid.harness.traces.replay import Replay, needed_context, suited
from llamahybrid.harness.traces.trace import Entry
from llamahybrid.harness.workloads.speech import Vocabulary
from tests.harness.fake_server import FakeServer
from tests.harness.pretended import PretendSession, PretendTarget
from tests.harness.traces.said import MESSAGES, MORE, written


def test_recorded_chat_is_replayed_on_a_url(tmp_path: Path) -> None:
    written(tmp_path / "t", Request(5, messages=MESSAGES), Request(5, messages=MORE))
    with FakeServer() as server:
        arguments = ["replay", str(tmp_path / "t"), "--on", server.url, "--json", str(tmp_path / "r")]
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    one, two = Report.read(tmp_path / "r").targets[0].workloads[0].requests
    assert two.chat == one.chat
    assert (two.cached or 0) > 0


def test_request_is_replayed_as_tokens_or_messages() -> None:
    tokens, chats = PretendSession(print), PretendSession(print)
    chats.takes_tokens = False
    both = Request(5, tokens=(1, 2), messages=MESSAGES, seed=3, salt="a")
    assert suited(tokens, both) == replace(both, messages=())
    assert suited(chats, both) == replace(both, tokens=())
    ids = Request(5, tokens=(1, 2))
    assert suited(chats, ids) == ids, "there is nothing else to ask"
    tokens.vocabulary = Vocabulary((5, 6, 7), opening=1, thinking=2, unspoken=(0, 1, 2))
    assert suited(tokens, Request(5, tokens=(1, 6, 90, 91, 90))).tokens == (1, 6, 5, 6, 5)


def test_context_holds_the_longest_request() -> None:
    def needed(*asks: Request, total: int | None = None) -> int:
        return needed_context([Entry(0.0, ask, total=total) for ask in asks])

    assert needed(Request(1, tokens=(1,))) == 1024
    assert needed(Request(100, tokens=(1,) * 3000), Request(1, tokens=(1,))) >= 3100
    assert needed(Request(2000, tokens=(1,))) >= 2001, "answers take room, too"
    assert needed(Request(1, messages=MESSAGES), total=3000) >= 3001
    assert needed(Request(1, text="x" * 5000)) >= 5001


def test_empty_trace_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "empty")
    with pytest.raises(ReportError, match="empty: no request"):
        Replay([], [], [tmp_path / "empty"]).run()


def dying(request: Request) -> None:
    raise TargetError("it died")


def test_traces_of_one_name_are_named_with_their_folders(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder / "t", Request(5, messages=MESSAGES))
    paths = [tmp_path / "a" / "t", tmp_path / "b" / "t"]
    models = [ModelFile(name, tmp_path / name) for name in ("one", "two")]
    nothing = PretendTarget(asked=dying)
    with FakeServer() as server:
        url, none = Replay([UrlTarget("url", server.url), nothing], models, paths).run().targets
    assert [w.workload for w in url.workloads] == ["a/t", "b/t"]
    assert none.error == "one: a/t, one: b/t, two: a/t, two: b/t: it died"
    with pytest.raises(ValueError, match="given twice"):
        Replay([], [], [paths[0]] * 2).run()
