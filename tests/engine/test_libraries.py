"""Functions and backends of libraries that cannot be loaded are read from their files."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from llamahybrid.engine import libraries


def shared(path: Path, source: str, *options: str) -> Path:
    path.with_suffix(".c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, path.with_suffix(".c"), *options], check=True)
    return path


def test_gpu_build_is_inspected_without_its_driver(tmp_path: Path) -> None:
    driver = shared(tmp_path / "libstub.so", "void cuInit(void){}", "-Wl,-soname,libcuda.so.1")
    code = "void cuInit(void); void llama_n_rs_seq(void){cuInit();} int llama_state_seq_get_data_range;"
    folder = tmp_path / "lib"
    folder.mkdir()
    library = shared(folder / "libllama.so", code + "void llama_set_abort_callback(void);", str(driver))
    with pytest.raises(OSError, match="libcuda"):
        ctypes.CDLL(str(library))
    libraries.require_loadable(folder)
    assert libraries.optional(folder) == ("llama_n_rs_seq", "llama_state_seq_get_data_range")


def test_backends_of_a_static_build_are_read_from_its_names(tmp_path: Path) -> None:
    names = b"".join(b"ggml_backend_%s_reg\0" % name for name in (b"cpu", b"cuda", b"vk"))
    (tmp_path / "libllama.so").write_bytes(b"\x7fELF\0" + names)
    assert libraries.backends(tmp_path) == {"cpu", "cuda", "vulkan"}
