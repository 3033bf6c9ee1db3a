"""The C API as the tests use it, and the child process that runs a test against one library.

A test with the argument `path` runs in a process of its own (conftest.py): a library that dies takes only
this process with it. `python capi.py MODULE TEST JSON` imports MODULE from this folder and calls TEST with
these arguments. Which library is loaded is decided by `LLAMAHYBRID_ENGINE`.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.engine import installed
from llamahybrid.harness.hazards import context
from llamahybrid.harness.hazards.context import (
    FULL,
    ON_DEVICE,
    PARTIAL,
    SPLIT,
    TWO,
    lib,
    load_range,
    save_range,
)
from llamahybrid.harness.hazards.effect import Gap, NotApplicable, gap
from llamahybrid.harness.hazards.model import ModelUnderTest

__all__ = [
    "FULL",
    "ON_DEVICE",
    "PARTIAL",
    "SPLIT",
    "TWO",
    "Context",
    "NotApplicable",
    "function",
    "gap",
    "lib",
    "load_range",
    "on",
    "save_range",
    "sound",
    "split",
]

FLASH = {"flash_attn_type": 1}
"""Attention whose values are in rows: only those can be split over devices."""

FAILED, SKIPPED = 77, 78
"""Exit statuses of a test that failed, and of one that cannot run here."""


def on(*archs: str, windowed: Sequence[str] = (), **sizes: int) -> pytest.MarkDecorator:
    """A test on models of these architectures, and on some with a window of 16 tokens: its `path`."""
    models = [(arch, sizes) for arch in archs] + [(arch, {**sizes, "window": 16}) for arch in windowed]
    return pytest.mark.parametrize("path", models, indirect=True, ids=[arch for arch, _ in models])


class Context(context.Context):
    """A native context on the model at `path`; keywords are fields of `llama_context_params`."""

    def __init__(self, path: str, **params: Any) -> None:
        super().__init__(ModelUnderTest(path), params)

    def feed(self, begin: int, end: int, seq: int = 0, *, text: int | None = None, chunk: int = 256) -> int:
        """As the hazard catalogue does, by default with a text of its own for each sequence."""
        return super().feed(begin, end, seq, text=seq if text is None else text, chunk=chunk)


def sound(context: context.Context, length: int, seq: int = 0, *, text: int | None = None) -> bool:
    """Tell whether a token at `length` is decoded with the logits of a context that saw its text alone."""
    found = context.goes_on(length, seq, text=seq if text is None else text)
    return isinstance(found, Gap) and found.exact


def split(tested: ModelUnderTest) -> ModelUnderTest:
    """Return the model again, each tensor in two parts: the CPU serves as two devices.

    The CPU holds such tensors but cannot compute with them: states come from a context on the whole model.
    """
    ggml = installed.library(Path(lib._lib._name).parent, "ggml")
    device = ctypes.CDLL(str(ggml)).ggml_backend_dev_by_type
    device.restype = ctypes.c_void_p
    cpu = device(0)  # GGML_BACKEND_DEVICE_TYPE_CPU
    params = lib.llama_model_default_params()
    devices = (ctypes.c_void_p * 3)(cpu, cpu, None)
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.split_mode, params.n_gpu_layers = 3, 99  # LLAMA_SPLIT_MODE_TENSOR
    other = copy.copy(tested)
    other.model = lib.llama_model_load_from_file(tested.path.encode(), params)
    assert other.model
    return other


def function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the library that only a patch has. Raises AssertionError where there is none."""
    found = getattr(lib._lib, name, None)
    assert found is not None, f"no function {name}"
    found.restype, found.argtypes = result, arguments
    return found


def main(module: str, test: str, arguments: str) -> int:
    """Run a test in this process; its exit status."""
    try:
        getattr(importlib.import_module(module), test)(**json.loads(arguments))
    except (AssertionError, NotApplicable, pytest.fail.Exception):
        traceback.print_exc()
        return FAILED
    except pytest.skip.Exception as reason:
        print(reason, file=sys.stderr)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.modules["capi"] = sys.modules["__main__"]
    sys.exit(main(*sys.argv[1:]))
