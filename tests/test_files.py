"""Files of results are whole or not there, and name no folder of the user's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llamahybrid import files
from llamahybrid.evaluate.report import Report, TargetFigures
from llamahybrid.files import distinct_names, printable, require_writable, without_home, write_json


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))


def test_the_home_folder_is_a_tilde() -> None:
    data = {
        "a": ["stock@/home/ada/x.y/bin", "/home/ada"],
        "/home/ada/b": "died: /home/ada/lib.so, 3",
        "n": 1.5,
    }
    shown = {"a": ["stock@~/x.y/bin", "~"], "~/b": "died: ~/lib.so, 3", "n": 1.5}
    assert without_home(data) == shown
    assert without_home("/home/adam/x, /home/ada-2") == "/home/adam/x, /home/ada-2", "another's"


def test_a_home_that_is_all_of_the_disk_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert without_home("/opt/x") == "/opt/x"


def test_what_xml_cannot_hold_is_a_blank() -> None:
    assert printable("a\x1b[1m\x00é\n\ud800") == "a [1m é  "


def test_a_report_names_no_home(tmp_path: Path) -> None:
    kind = "class:/home/ada/cache.py:Mine"
    target = TargetFigures("stock@/home/ada/bin", kind, {}, (), (), "no libllama at /home/ada/bin")
    Report("now", {}, (), (target,)).write(tmp_path / "r.json")
    assert "/home/ada" not in (tmp_path / "r.json").read_text()
    assert Report.read(tmp_path / "r.json").targets[0].name == "stock@~/bin"


def test_what_was_there_stays_until_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"n": 1})

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            write_json(path, {"n": 2})
    assert json.loads(path.read_text()) == {"n": 1}
    assert os.listdir(tmp_path) == ["r.json"], "nothing is left behind"


def test_a_file_that_is_written_may_be_read_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    (tmp_path / "link").symlink_to("real")
    write_json(tmp_path / "link", [])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no such device here")
def test_a_device_stays_one() -> None:
    write_json(Path("/dev/null"), [1])
    assert Path("/dev/null").is_char_device()


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    def names(*paths: str) -> list[str]:
        return distinct_names([Path(path) for path in paths])

    assert names() == []
    assert names("/a/m.gguf", "/a/n.gguf") == ["m.gguf", "n.gguf"]
    assert names("/a/x/m.gguf", "/b/x/m.gguf", "n.gguf")[:2] == ["a/x/m.gguf", "b/x/m.gguf"]
    with pytest.raises(ValueError, match="m is given twice"):
        names("/a/m", "/b/m", "/a/m")


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    require_writable(None, tmp_path / "new", tmp_path / "file", Path("/dev/stdout"), Path("/dev/full"))
    for path in (tmp_path, tmp_path / "none" / "x", tmp_path / "file" / "x"):
        with pytest.raises(OSError, match="/"):
            require_writable(tmp_path / "new", path)
    assert os.listdir(tmp_path) == ["file"]
