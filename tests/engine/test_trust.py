"""Libraries that another user could have written are not loaded."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamahybrid.engine.trust import untrusted

INSIDE = ("home/lib/libllama.so", "home/lib", "home/manifest.json", "home")
ABOVE = ("", "..")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a library, two folders below `tmp_path`, all writable by their owner alone."""
    home = tmp_path / "cache" / "engines" / "home"
    (home / "lib").mkdir(parents=True)
    for file in ("lib/libllama.so", "manifest.json"):
        (home / file).touch()
    for path in (home.parents[1], *home.parents[1].rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # under any umask
    assert untrusted(home) == ""
    return home


def writable(path: Path) -> str:
    return f"{path} can be written by others: `chmod go-w {path}`"


def make_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("place", [*INSIDE, *ABOVE])
def test_files_of_other_users_are_untrusted(home: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    path = (home.parent / place).resolve()
    make_foreign(path, monkeypatch)
    said = untrusted(home)
    assert f"belongs to another user (uid {path.stat().st_uid})" in said
    assert said.endswith("`llamahybrid engine build --force`")


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("place", INSIDE)
def test_files_writable_by_others_are_untrusted(home: Path, place: str, mode: int) -> None:
    path = home.parent / place
    path.chmod(path.stat().st_mode | mode)
    assert untrusted(home) == writable(path)


@pytest.mark.parametrize("place", ABOVE)
def test_folder_above_may_be_of_the_users_private_group(
    home: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = (home.parent / place).resolve()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_gid=path.stat().st_gid, pw_name="me"))
    path.chmod(0o775)
    for name, members, said in (
        ("staff", [], writable(path)),
        ("me", ["you"], writable(path)),
        ("me", [], ""),  # a group of one's own
    ):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        assert untrusted(home) == said
    path.chmod(0o777)
    assert untrusted(home) == writable(path)
    path.chmod(0o1777)
    assert untrusted(home) == "", "in a sticky folder others cannot replace it"


def test_folders_above_the_target_of_a_link_count(home: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(home)
    assert untrusted(tmp_path / "link") == ""
    home.parent.chmod(0o777)
    assert untrusted(tmp_path / "link") == writable(home.parent)


def test_folders_above_the_home_folder_are_not_looked_at(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.parents[1].chmod(0o777)
    monkeypatch.setenv("HOME", str(home.parent))
    assert untrusted(home) == ""
    monkeypatch.setenv("HOME", str(home))
    assert untrusted(home) == writable(home.parents[1])


def test_command_of_the_advice_is_quoted(home: Path) -> None:
    odd = home / "a b"
    odd.touch()
    odd.chmod(0o666)
    assert untrusted(home).endswith(f"`chmod go-w '{odd}'`")
