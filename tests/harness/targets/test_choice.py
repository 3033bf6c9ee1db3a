"""Targets by their names on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamahybrid.errors import EngineError, TargetError
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.targets.base import Shape
from llamahybrid.harness.targets.choice import KEY, target, targets
from tests.harness.fake_server import FakeServer


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "no target ''"),
        ("stok", "there are stock, "),
        ("server:/nowhere", "/nowhere is no program"),
        ("class:nowhere.py:X", "class:nowhere.py:X: there is no file nowhere.py"),
        ("class:X", "class:X: give class:FILE.py:NAME"),
        ("ftp://x", "no target 'ftp://x'"),
        ("server:" + __file__, "is no program"),
    ],
)
def test_unknown_targets_are_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        target(name)


def test_target_may_have_a_label_and_a_library(tmp_path: Path) -> None:
    assert target("stock").name == "stock"
    mine = tmp_path / "x@y" / "mine.py"
    mine.parent.mkdir()
    mine.touch()
    (tmp_path / "libllama.so").touch()
    for written, name, kind in (
        (f"patched engine=ours@{tmp_path}", "patched engine", "ours"),
        (f"stock@{tmp_path}", f"stock@{tmp_path}", "stock"),
        (f"a cache=class:{mine}:Mine@{tmp_path}", "a cache", f"class:{mine}:Mine"),
        (f"class:{mine}:Mine@{tmp_path}", f"class:{mine}:Mine@{tmp_path}", f"class:{mine}:Mine"),
    ):
        one = target(written)
        assert (one.name, one.kind) == (name, kind)
    with pytest.raises(EngineError, match=f"no libllama at {mine.parent}:"):
        target(f"stock@{mine.parent}")
    assert target(f"class:{mine}:Mine").kind == f"class:{mine}:Mine"
    url = target("new=http://127.0.0.1:9/?a=b")
    assert (url.name, url.kind) == ("new", "url")
    assert target("old=server:/bin/true").name == "old"


def test_duplicate_target_names_are_refused() -> None:
    assert [each.name for each in targets(["stock", "again=stock"])] == ["stock", "again"]
    with pytest.raises(TargetError, match="called stock; LABEL=TARGET"):
        targets(["stock", "ours", "stock"])


def test_api_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    with FakeServer() as server, target(server.url).open(None, Shape(256)) as session:
        session.ask(Request(4, messages=({"role": "user", "content": "Hello."},)))
    assert server.keys == ["Bearer secret"]
