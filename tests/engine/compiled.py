"""Shared libraries of a few lines of C."""

from __future__ import annotations

import subprocess
from pathlib import Path


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
    code = "void cuInit(void); void llama_n_rs_seq(void){cuInit();} int llama_state_seq_get_data_range;"
    shared(folder / "libllama.so", code + "void llama_set_abort_callback(void);", str(stub))
    return folder
