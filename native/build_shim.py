"""Describes the extension `llamahybrid._shim` to CFFI (API mode, limited API); run by setuptools."""

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
CONTRACT = (HERE / "shim.cdef.h").read_text(encoding="utf-8")

ffibuilder = FFI()
ffibuilder.cdef(CONTRACT)
ffibuilder.set_source(
    "llamahybrid._shim",
    '#include <cstddef>\n#include <cstdint>\nextern "C" {\n' + CONTRACT + "}\n",
    source_extension=".cpp",
    sources=["native/shim.cpp"],
    depends=["native/shim.cdef.h"],
    extra_compile_args=["/std:c++17"] if os.name == "nt" else ["-std=c++17", "-O2"],
    optional=True,  # without a compiler the package installs all the same, and numpy stands in
)
