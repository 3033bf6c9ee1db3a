"""What a library has is told from its file where it cannot be loaded."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from llamahybrid.capi import shim as native
from llamahybrid.engine import activation, elf, installed, symbols
from llamahybrid.errors import EngineError


def shared(path: Path, source: str, *options: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    code = path.with_suffix(".c")
    code.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, code, *options], check=True)
    code.unlink()
    return path


def cuda_engine(folder: Path, driver: str = "libcuda.so.1") -> Path:
    """An engine that needs a driver which this machine has not."""
    stub = shared(folder.parent / "stubs" / "libstub.so", "void cuInit(void){}", f"-Wl,-soname,{driver}")
    code = "void cuInit(void); void llama_n_rs_seq(void){cuInit();} int llama_set_n_rs_seq;"
    shared(folder / "libllama.so", code + "void llama_set_abort_callback(void);", str(stub))
    return folder


def test_the_file_names_what_the_loaded_library_has() -> None:
    folder = activation.stock()
    assert folder is not None
    path = installed.library(folder, "llama")
    assert path is not None
    library, names = ctypes.CDLL(str(path)), elf.exported(path)
    assert len(names) > 200
    assert all(hasattr(library, name) for name in names if name.startswith("llama_"))
    assert "ggml_init" not in names, "it is ggml-base's"
    assert symbols.named(folder) == symbols.optional(folder)


def test_a_gpu_build_needs_no_driver_to_be_looked_at(tmp_path: Path) -> None:
    folder = cuda_engine(tmp_path / "lib")
    with pytest.raises(OSError, match="libcuda"):
        ctypes.CDLL(str(folder / "libllama.so"))
    assert symbols.optional(folder) == ("llama_n_rs_seq", "llama_set_n_rs_seq")
    assert set(symbols.optional(folder)) < set(native.OPTIONAL)


def test_any_other_library_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot be loaded.*libnowhere"):
        symbols.optional(cuda_engine(tmp_path / "lib", "libnowhere.so.1"))


def test_a_library_that_takes_its_process_down_is_an_error(tmp_path: Path) -> None:
    shared(
        tmp_path / "lib" / "libllama.so",
        "#include <stdlib.h>\n__attribute__((constructor)) void now(void){ abort(); }",
    )
    with pytest.raises(EngineError, match="ended its process"):
        symbols.optional(tmp_path / "lib")


def test_no_truncated_library_is_more_than_a_value_error(tmp_path: Path) -> None:
    whole = cuda_engine(tmp_path / "lib") / "libllama.so"
    assert {"llama_n_rs_seq", "llama_set_n_rs_seq"} <= elf.exported(whole)
    content = whole.read_bytes()
    cut = tmp_path / "libllama.so"
    for size in range(0, len(content), 97):
        cut.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"libllama\.so"):
            elf.exported(cut)
    assert symbols.named(tmp_path) == ()
    os.unlink(cut)
    assert symbols.named(tmp_path) == ()
