"""Which functions a library has, read from its file."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from llamahybrid.engine import bindings, elf, installed
from tests.engine.compiled import shared


def test_the_file_names_what_the_loaded_library_has() -> None:
    folder = bindings.stock()
    assert folder is not None
    path = installed.library(folder, "llama")
    assert path is not None
    library, names = ctypes.CDLL(str(path)), elf.exported(path)
    assert len(names) > 200
    assert all(hasattr(library, name) for name in names if name.startswith("llama_"))
    assert "ggml_init" not in names, "it is ggml-base's"


def test_no_truncated_library_is_more_than_a_value_error(tmp_path: Path) -> None:
    whole = shared(tmp_path / "lib" / "libx.so", "void one(void){} int two; extern void three(void);")
    assert elf.exported(whole) >= {"one", "two"}
    assert "three" not in elf.exported(whole)
    content = whole.read_bytes()
    cut = tmp_path / "libx.so"
    for size in range(0, len(content), 97):
        cut.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"libx\.so"):
            elf.exported(cut)
        assert elf.cut_short(cut) is (size > 0), (
            "an empty file is no library, which is said when it is loaded"
        )
    assert not elf.cut_short(whole)


def test_what_a_library_needs_is_named(tmp_path: Path) -> None:
    stub = shared(tmp_path / "stubs" / "libstub.so", "void one(void){}", "-Wl,-soname,libcublas.so.13")
    path = shared(tmp_path / "lib" / "libx.so", "void one(void); void two(void){one();}", str(stub))
    assert elf.needed(path) - {"libc.so.6"} == {"libcublas.so.13"}
    with pytest.raises(ValueError, match="no ELF"):
        elf.needed(Path(__file__))


def test_no_damage_is_more_than_a_value_error(tmp_path: Path) -> None:
    path = shared(tmp_path / "lib" / "libx.so", "void one(void){}")
    content = path.read_bytes()
    headers = int.from_bytes(content[40:48], "little")  # e_shoff of a 64-bit library
    refused = 0
    for at in range(headers, len(content), 4):
        path.write_bytes(content[:at] + b"\xff" * 4 + content[at + 4 :])
        try:
            elf.exported(path)
        except ValueError:
            refused += 1
    assert refused
