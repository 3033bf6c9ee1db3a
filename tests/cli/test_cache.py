"""`llamahybrid cache` lists records on disk, finds damage, and removes records."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from llamahybrid.cli import cache_folder
from llamahybrid.cli.main import app
from llamahybrid.prompt_cache import block_store, disk
from llamahybrid.prompt_cache.block_store import BlockStore
from llamahybrid.prompt_cache.blocks import Why, digest_at
from llamahybrid.prompt_cache.disk import DiskRows
from llamahybrid.prompt_cache.envelope import sealed
from llamahybrid.prompt_cache.nodes import ids_of
from tests.prompt_cache.asking import files

TEXT = np.array([*b"the quick brown fox jumps over the lazy dog"], np.int32)


def put(
    folder: Path, namespace: str, tokens: Any, start: int | None = None, size: int = 100_000, days: int = 0
) -> None:
    """Write a record at the end of these tokens, as of some days ago; attention from `start` on."""
    rows = DiskRows(folder)
    rows.open()
    state = sealed(np.full(size, len(tokens), np.uint8), namespace=namespace, tokens=tokens, start=start)
    written = time.time() - 86400 * days
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_store.time, "time", lambda: written)
        if start is None:
            BlockStore(rows).link(namespace, tokens, Why.SYSTEM)
    rows.write((b"r" if start is None else b"a") + digest_at(namespace, ids_of(tokens)), [state.data])
    rows.release()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two conversations of one model and one of another, with a day between each."""
    paths = (("aaaa", TEXT), ("aaaa", TEXT[::-1].copy()), ("bbbb", TEXT[:20]))
    for days, (namespace, tokens) in reversed(list(enumerate(paths))):
        put(tmp_path / "cache", namespace, tokens, 0, days=days)
        for end in (10, len(tokens)):
            put(tmp_path / "cache", namespace, tokens[:end], days=days)
    return tmp_path / "cache"


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)], env={"COLUMNS": "160"})


def say_no(*_: Any, **__: Any) -> None:
    raise OSError(1, "Operation not permitted")


def keys(folder: Path) -> list[bytes]:
    rows = DiskRows(folder)
    rows.open()
    return [*rows.keys(b"r"), *rows.keys(b"a")]


def victim_of(folder: Path) -> tuple[Path, str]:
    """The file of one record, and what the commands call that."""
    path = files(folder)[3]
    return path, path.parent.name + path.name[:30]


def test_list_shows_shared_prefixes_once_and_why_each_checkpoint_is_kept(folder: Path) -> None:
    other = np.array([*TEXT[:30], *b"sleeps"], np.int32)
    for name in ("aaaa", "aaaa+0aB._[red]zzzz"):
        put(folder, name, other, size=2 << 20)
    result = run("show", "--dir", folder)
    assert result.exit_code == 0, result.output
    lines = [line.strip("│├└─ ") for line in result.output.splitlines()[1:]]
    assert sum(line.startswith("model ") for line in lines) == 3
    assert "model aaaa, salt 0aB._[red]zzzz" in lines
    (shared,) = [i for i, line in enumerate(lines) if line.startswith("0-30")]
    assert "1 checkpoint, 0.1 MiB" in lines[shared]
    assert "system 10" in lines[shared]
    assert {line[:5] for line in lines[shared + 1 : shared + 3]} == {"30-43", "30-36"}
    (old,) = [line for line in lines if line.startswith("0-20")]
    assert "2 checkpoints, 0.3 MiB  2 d" in old
    assert "2.0 MiB" in result.output
    assert "11 records" in result.output
    assert result.output.count("goes next") == 1


def test_preview_has_texts(folder: Path, tiny_model: Any) -> None:
    model = tiny_model("mamba")
    import llama_cpp

    spelt = llama_cpp.Llama(str(model), vocab_only=True, verbose=False).detokenize(TEXT[-6:].tolist())
    found = run("list", "--dir", folder, "--preview", model).output
    assert spelt.decode(errors="replace").strip() in found
    assert "n_ctx_train" not in found, "a warning of llama.cpp about the model that has no context"
    assert spelt.decode(errors="replace").strip() not in run("list", "--dir", folder).output


def test_verify_finds_and_removes_damaged_records(folder: Path) -> None:
    victim, name = victim_of(folder)
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    result = run("verify", "--dir", folder)
    assert result.exit_code == 1
    assert "8 records are sound, 1 damaged" in result.output
    assert f"{name}: the state's payload is damaged" in result.output
    assert len(keys(folder)) == 9
    assert run("verify", "--remove", "--dir", folder).exit_code == 0
    assert len(keys(folder)) == 8
    assert not victim.exists()
    result = run("verify", "--dir", folder)
    assert (result.exit_code, result.output.strip()) == (0, "8 records are sound, 0 damaged")


def test_verify_finds_records_without_a_path(folder: Path) -> None:
    rows = DiskRows(folder)
    rows.open()
    (end,) = [key for key, raw in rows.rows(b"n") if raw.endswith(ids_of(TEXT[:20]))]
    rows.update([b"n" + end], lambda found: dict.fromkeys(found))
    rows.release()
    result = run("verify", "--dir", folder)
    assert result.exit_code == 1
    assert result.output.count("no path leads to it") == 2
    assert run("verify", "--remove", "--dir", folder).exit_code == 0
    assert "7 records are sound, 0 damaged" in run("verify", "--dir", folder).output


def test_prune_by_age_removes_older_records(folder: Path) -> None:
    run("prune", "--older-than", 0.5, "--dir", folder)
    assert len(keys(folder)) == 3
    assert re.search(r"\d (s|min)\b", run("list", "--dir", folder).output)


def test_prune_by_size_removes_the_oldest_records(folder: Path) -> None:
    result = run("prune", "--max-mib", 0.5, "--dir", folder)
    assert sum(path.stat().st_size for path in files(folder)) <= 0.5 * 2**20
    assert "records removed" in result.output
    output = run("list", "--dir", folder).output
    assert ("aaaa" in output, "bbbb" in output) == (True, False)


@pytest.mark.parametrize(
    "arguments",
    [("list",), ("verify",), ("prune", "--older-than", "9")],
    ids=" ".join,
)
def test_commands_leave_the_times_of_records_alone(folder: Path, arguments: tuple[str, ...]) -> None:
    rows = DiskRows(folder)
    rows.open()
    before = rows.last_used(keys(folder))
    assert run(*arguments, "--dir", folder).exit_code == 0
    assert rows.last_used(keys(folder)) == before


def test_salts_are_listed_and_pruned(folder: Path) -> None:
    assert "salt " not in run("list", "--dir", folder).output
    for salt in ("0aB._zzzzzzzzz", "[red]zzzzzzzzz"):
        put(folder, f"aaaa+{salt}", TEXT, size=100)
    output = run("list", "--dir", folder).output
    assert output.count("0aB._zzzzzzzzz") == output.count("[red]zzzzzzzzz") == 1
    assert "0 records removed" in run("prune", "--salt", "0aB", "--dir", folder).output
    assert "1 records removed" in run("prune", "--salt", "0aB._zzzzzzzzz", "--dir", folder).output
    assert "7 records removed" in run("prune", "--model", "aaaa", "--dir", folder).output
    assert len(keys(folder)) == 3


def test_verify_keeps_records_that_cannot_be_read_now(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(disk, "read_record", fail)
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


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_empty_folder_is_left_alone(tmp_path: Path, command: str) -> None:
    result = run(command, "--dir", tmp_path, *(["--max-mib", "1"] if command == "prune" else []))
    assert result.exit_code == 1
    assert "nothing is stored" in result.output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
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
        result = CliRunner().invoke(app, arguments, input="hello there, how are you today\n/quit\n")
        assert result.exit_code == 0, result.output
    (left,) = re.findall(r"decoded (\d+)", result.output)
    assert int(left) <= 3, "it goes on where the answer begins"
    assert "records" in run("list").output
