"""Results are written as a whole: links and devices stay what they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

from llamahybrid.files import write_json


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "results.json", tmp_path / "latest.json"
    link.symlink_to(file)
    write_json(link, [1])
    assert link.is_symlink()
    assert json.loads(file.read_text()) == [1]
    assert {*tmp_path.iterdir()} == {file, link}


def test_a_device_is_written_into() -> None:
    screen, terminal = os.openpty()
    try:
        write_json(Path(os.ttyname(terminal)), [1])
        assert json.loads(os.read(screen, 100)) == [1]
    finally:
        os.close(screen)
        os.close(terminal)
