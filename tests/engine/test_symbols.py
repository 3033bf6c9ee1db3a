"""What a library has is told from its file where it cannot be loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from llamahybrid.engine import bindings, symbols
from llamahybrid.errors import EngineError
from llamahybrid.upstream import OPTIONAL
from tests.engine.compiled import cuda_engine, shared


def test_a_gpu_build_needs_no_driver_to_be_looked_at(tmp_path: Path) -> None:
    folder = cuda_engine(tmp_path / "lib")
    with pytest.raises(OSError, match="libcuda"):
        ctypes.CDLL(str(folder / "libllama.so"))
    assert symbols.optional(folder) == ("llama_n_rs_seq", "llama_set_n_rs_seq")
    assert set(symbols.optional(folder)) < set(OPTIONAL)


def test_a_gpu_build_is_not_loaded_where_there_is_a_driver(tmp_path: Path) -> None:
    """Loading it would load the driver, which a build machine must not need."""
    code = "#include <stdlib.h>\n__attribute__((constructor)) void now(void){ abort(); }"
    code += "void llama_n_rs_seq(void){}"
    folder = shared(tmp_path / "lib" / "libllama.so", code).parent
    for name in ("cpu", "cuda"):
        (folder / f"libggml-{name}.so").touch()
    assert symbols.optional(folder) == ("llama_n_rs_seq",)


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


def test_where_nothing_can_be_loaded_the_file_is_asked(tmp_path: Path) -> None:
    folder = bindings.stock()
    assert folder is not None
    assert symbols.named(folder) == symbols.optional(folder) != ()
    assert symbols.named(tmp_path) == ()
    (tmp_path / "libllama.so").write_bytes(b"\x7fELF, cut short")
    assert symbols.named(tmp_path) == ()
