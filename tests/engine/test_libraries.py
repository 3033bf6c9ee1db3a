"""Libraries that cannot be loaded: whether it is the fault of a build, and their backends."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from llamahybrid.engine import libraries
from llamahybrid.errors import EngineError


def shared(path: Path, source: str, *options: str) -> Path:
    path.with_suffix(".c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, path.with_suffix(".c"), *options], check=True)
    return path


@pytest.mark.parametrize("absent", ["libcuda.so.1", "libcublas.so.13", "librocblas.so.4"])
def test_a_build_is_accepted_without_libraries_of_the_system(tmp_path: Path, absent: str) -> None:
    driver = shared(tmp_path / "libstub.so", "void cuInit(void){}", f"-Wl,-soname,{absent}")
    folder = tmp_path / "lib"
    folder.mkdir()
    code = "void cuInit(void); void llama_n_rs_seq(void){cuInit();}"
    library = shared(folder / "libllama.so", code, str(driver))
    with pytest.raises(OSError, match=absent):
        ctypes.CDLL(str(library))
    libraries.require_loadable(folder)


@pytest.mark.parametrize("part", ["libggml-base.so.0", "libllama.so.0"])
def test_a_build_that_lacks_a_part_of_itself_is_refused(tmp_path: Path, part: str) -> None:
    stub = shared(tmp_path / "libstub.so", "void part(void){}", f"-Wl,-soname,{part}")
    (tmp_path / "lib").mkdir()
    shared(tmp_path / "lib" / "libllama.so", "void part(void); void use(void){part();}", str(stub))
    with pytest.raises(EngineError, match=part):
        libraries.require_loadable(tmp_path / "lib")


@pytest.mark.parametrize("content", [b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(50)])
def test_a_header_alone_is_cut_short(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "libx.so").write_bytes(content)
    assert libraries.cut_short(tmp_path / "libx.so")
