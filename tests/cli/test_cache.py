"""`llamahybrid cache` lists records on disk, finds damage, and removes records."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamahybrid.prompt_cache.disk_folder import SHARDS
from typer.testing import CliRunner

from llamahybrid.cli import cache_folder
from llamahybrid.cli.main import app
from llamahybrid.prompt_cache import records
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.records import key_of
from tests.prompt_cache.asking import record_of

TEXT = np.array([*b"the quick brown fox jumps over the lazy dog"], np.int32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two conversations of one model and one of another, with a day between each."""
    store = RecordStore(tmp_path / "cache")
    now = time.time()
    paths = (("aaaa", TEXT), ("aaaa", TEXT[::-1].copy()), ("bbbb", TEXT[:20]))
    for days, (namespace, tokens) in enumerate(paths):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(records.time, "time", lambda days=days: now - 86400 * days)
            for start, end in ((0, len(tokens)), (10, 10), (len(tokens), len(tokens))):
                payload = np.full(100_000, end, np.uint8)
                key = key_of(namespace, start, tokens[:end])
                store.write(key, record_of(namespace, start, tokens[:end], None, payload))
    return tmp_path / "cache"


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)], env={"COLUMNS": "160"})


def say_no(*_: Any, **__: Any) -> None:
    raise OSError(1, "Operation not permitted")


def clutter(folder: Path) -> str:
    """Put a file where a folder of records would be; its name."""
    inside = next(folder.glob("llamahybrid-*"))
    shard = next(name for name in SHARDS if not (inside / name).exists())
    (inside / shard).touch()
    return shard


def keys(folder: Path) -> list[str]:
    return list(RecordStore(folder).keys())


def test_list_shows_conversations_with_sizes_and_ages(folder: Path) -> None:
    result = run("list", "--dir", folder)
    lines = [line.split() for line in result.output.splitlines() if "aaaa" in line or "bbbb" in line]
    assert [(line[1], line[3], line[5]) for line in lines] == [
        ("bbbb", "20", "2"),
        ("aaaa", "43", "2"),
        ("aaaa", "43", "2"),
    ]
    assert all("0.3" in line for line in lines)
    assert "2 d" in result.output
    assert "9 records" in result.output


def test_show_prints_shared_prefixes_once(folder: Path) -> None:
    store = RecordStore(folder)
    other = np.array([*TEXT[:30], *b"sleeps"], np.int32)
    for name in ("aaaa", "aaaa+0aB._[red]zzzz"):
        key = key_of(name, len(other), other)
        payload = np.zeros(2 << 20, np.uint8)
        store.write(key, record_of(name, len(other), other, None, payload))
    result = run("show", "--dir", folder)
    assert result.exit_code == 0, result.output
    lines = [line.strip("│├└─ ") for line in result.output.splitlines()[1:]]
    assert sum(line.startswith("model ") for line in lines) == 3
    assert "model aaaa, salt 0aB._[red]zzzz" in lines
    (shared,) = [i for i, line in enumerate(lines) if line.startswith("0-30")]
    assert "1 checkpoint, 0.1 MiB" in lines[shared]
    assert {line[:5] for line in lines[shared + 1 : shared + 3]} == {"30-43", "30-36"}
    assert "2.0 MiB" in result.output
    assert result.output.count("goes next") == 1


def test_show_preview_has_texts(folder: Path, tiny_model: Any) -> None:
    model = tiny_model("mamba")
    import llama_cpp

    spelt = llama_cpp.Llama(str(model), vocab_only=True, verbose=False).detokenize(TEXT[-6:].tolist())
    assert spelt.decode(errors="replace").strip() in run("show", "--dir", folder, "--preview", model).output
    assert spelt.decode(errors="replace").strip() not in run("show", "--dir", folder).output


def test_show_continues_past_damaged_records(folder: Path) -> None:
    victim = sorted(folder.glob("*/*/*.record"))[3]
    victim.write_bytes(victim.read_bytes()[:100])
    result = run("show", "--dir", folder)
    assert result.exit_code == 0
    assert victim.stem in result.output
    assert victim.exists()


def test_verify_passes_a_sound_folder(folder: Path) -> None:
    result = run("verify", "--dir", folder)
    assert (result.exit_code, result.output.strip()) == (0, "9 records are sound, 0 damaged")


def test_verify_finds_and_removes_damaged_records(folder: Path) -> None:
    victim = sorted(folder.glob("*/*/*.record"))[3]
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    result = run("verify", "--dir", folder)
    assert result.exit_code == 1
    assert "8 records are sound, 1 damaged" in result.output
    assert "payload is damaged" in result.output
    assert len(keys(folder)) == 9
    assert run("verify", "--remove", "--dir", folder).exit_code == 0
    assert len(keys(folder)) == 8
    assert run("verify", "--dir", folder).exit_code == 0


def test_prune_by_age_removes_older_records(folder: Path) -> None:
    run("prune", "--older-than", 0.5, "--dir", folder)
    assert len(keys(folder)) == 3
    assert re.search(r"\d (s|min)\b", run("list", "--dir", folder).output)


def test_prune_by_size_removes_the_oldest_records(folder: Path) -> None:
    result = run("prune", "--max-mib", 0.5, "--dir", folder)
    assert RecordStore(folder).nbytes <= 0.5 * 2**20
    assert "records removed" in result.output
    store = RecordStore(folder)
    assert {store.head(key).namespace for key in keys(folder)} == {"aaaa"}


def test_prune_by_model_removes_records_of_that_model(folder: Path) -> None:
    assert "6 records removed" in run("prune", "--model", "aaaa", "--dir", folder).output
    assert len(keys(folder)) == 3


def test_prune_by_size_removes_damaged_records_first(folder: Path) -> None:
    store = RecordStore(folder)
    victim = sorted(folder.glob("*/*/*.record"))[3]
    size, lost = store.nbytes, victim.stat().st_size
    victim.write_bytes(bytes(2 << 20))
    result = run("prune", "--max-mib", (size - lost) / 2**20, "--dir", folder)
    assert result.exit_code == 0, result.output
    assert "1 records removed" in result.output
    assert f"{victim.stem}: the state's header is damaged" in result.output
    assert len(keys(folder)) == 8
    assert not victim.exists()


def test_unreadable_record_costs_no_other_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = sorted(folder.glob("*/*/*.record"))[3]
    size, lost = RecordStore(folder).nbytes, victim.stat().st_size
    victim.write_bytes(bytes(2 << 20))
    head = RecordStore.head
    monkeypatch.setattr(
        RecordStore, "head", lambda store, key: (say_no if key == victim.stem else head)(store, key)
    )
    result = run("prune", "--max-mib", (size - lost) / 2**20, "--dir", folder)
    assert result.exit_code == 1
    assert "0 records removed" in result.output
    assert "1 could not be read" in result.output
    assert len(keys(folder)) == 9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("list",), "9 records"),
        (("verify",), "9 records are sound, 0 damaged"),
        (("prune", "--older-than", "0.5"), "6 records removed, 0.3 MiB left"),
    ],
)
def test_file_in_place_of_a_folder_is_reported(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    shard = clutter(folder)
    result = run(*arguments, "--dir", folder)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"{os.sep}{shard} is no folder" in result.output
    assert says in result.output
    assert "1 could not be read" in result.output


@pytest.mark.parametrize(
    "arguments",
    [("list",), ("show",), ("verify",), ("prune", "--older-than", "9")],
    ids=" ".join,
)
def test_commands_leave_the_times_of_records_alone(folder: Path, arguments: tuple[str, ...]) -> None:
    for number, path in enumerate(sorted(folder.glob("*/*/*.record"))):
        os.utime(path, (number, number))
    assert run(*arguments, "--dir", folder).exit_code == 0
    times = [path.stat().st_mtime for path in sorted(folder.glob("*/*/*.record"))]
    assert times == list(range(9))


def test_salts_are_listed_and_pruned(folder: Path) -> None:
    assert " salt " not in run("list", "--dir", folder).output
    store = RecordStore(folder)
    for salt in ("0aB._zzzzzzzzz", "[red]zzzzzzzzz"):
        name, payload = f"aaaa+{salt}", np.zeros(100, np.uint8)
        key = key_of(name, len(TEXT), TEXT)
        store.write(key, record_of(name, len(TEXT), TEXT, None, payload))
    output = run("list", "--dir", folder).output
    assert " salt " in output
    assert output.count("0aB._zzzzzzzzz") == output.count("[red]zzzzzzzzz") == 1
    assert "0 records removed" in run("prune", "--salt", "0aB", "--dir", folder).output
    assert "1 records removed" in run("prune", "--salt", "0aB._zzzzzzzzz", "--dir", folder).output
    assert "7 records removed" in run("prune", "--model", "aaaa", "--dir", folder).output
    assert len(keys(folder)) == 3


def test_verify_keeps_records_that_cannot_be_read_now(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("llamahybrid.prompt_cache.disk.read_record", fail)
    result = run("verify", "--remove", "--dir", folder)
    assert result.exit_code == 1
    assert "0 records are sound, 0 damaged, 9 could not be read" in result.output
    assert len(keys(folder)) == 9


def test_prune_needs_a_criterion(folder: Path) -> None:
    assert run("prune", "--dir", folder).exit_code == 2
    assert len(keys(folder)) == 9


@pytest.mark.parametrize("option", ["--max-mib", "--older-than"])
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_prune_refuses_numbers_that_are_not_finite(folder: Path, option: str, number: str) -> None:
    result = run("prune", option, number, "--dir", folder)
    assert result.exit_code == 2
    assert option in result.output


@pytest.mark.parametrize("command", ["list", "show", "verify", "prune"])
def test_empty_folder_is_left_alone(tmp_path: Path, command: str) -> None:
    result = run(command, "--dir", tmp_path, *(["--max-mib", "1"] if command == "prune" else []))
    assert result.exit_code == 1
    assert "nothing is stored" in result.output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["list", "show", "verify", "prune"])
def test_unreachable_folder_is_one_error_line(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder.os, "stat", say_no)
    result = run(command, "--dir", folder, *(["--max-mib", "1"] if command == "prune" else []))
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "cannot be used: [Errno 1] Operation not permitted" in result.output


def test_unknown_home_folder_is_one_error_line() -> None:
    result = run("list", "--dir", "~nobody-has-this-name/cache")
    assert result.exit_code == 1
    assert "cannot be used" in result.output


def test_chat_resumes_from_the_kept_conversations(
    tmp_path: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path))
    arguments = ["chat", str(tiny_model("qwen35")), "--keep", "--max-tokens", "4", "--threads", "1"]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments, input="hello there, how are you today\n/exit\n")
        assert result.exit_code == 0, result.output
    (left,) = re.findall(r"decoded (\d+)", result.output)
    assert int(left) <= 3, "it goes on where the answer begins"
    assert "records" in run("list").output
