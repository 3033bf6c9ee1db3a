"""Files that another user could have written are not executed."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamahybrid.engine.trust import untrusted

PLACES = ("home/lib/libllama.so", "home/lib", "home/manifest.json", "home", "")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a library, writable by its owner alone."""
    (tmp_path / "home" / "lib").mkdir(parents=True)
    for file in ("lib/libllama.so", "manifest.json"):
        (tmp_path / "home" / file).touch()
    assert untrusted(tmp_path / "home") == ""
    return tmp_path / "home"


def make_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("place", PLACES)
def test_files_of_other_users_are_untrusted(home: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    make_foreign(home.parent / place, monkeypatch)
    assert "belongs to another user" in untrusted(home)


@pytest.mark.parametrize("place", PLACES)
def test_files_writable_by_others_are_untrusted(
    home: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = home.parent / place
    mode = path.stat().st_mode
    path.chmod(mode | 0o002)
    assert untrusted(home) == f"{path} can be written by others: chmod o-w it"
    path.chmod(mode | 0o020)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_gid=path.stat().st_gid, pw_name="me"))
    for name, members, said in (
        ("staff", [], f"{path} can be written by its group: chmod g-w it"),
        ("me", ["you"], f"{path} can be written by its group: chmod g-w it"),
        ("me", [], ""),  # a group of one's own
    ):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        assert untrusted(home) == said
