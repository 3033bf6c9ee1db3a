"""The C API as the probes use it, and the child process that runs one probe against one library.

`python capi.py MODULE PROBE MODEL` imports MODULE from this folder and prints PROBE(MODEL) as JSON: a library
that dies takes only this process with it. Which library is loaded is decided by `LLAMAHYBRID_ENGINE`.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from llamahybrid.engine import installed
from llamahybrid.harness.hazards import context
from llamahybrid.harness.hazards.context import FULL, ON_DEVICE, PARTIAL, lib
from llamahybrid.harness.hazards.effect import Logits, gap
from llamahybrid.harness.hazards.model import ModelUnderTest

__all__ = [
    "EXACT",
    "FULL",
    "ON_DEVICE",
    "PARTIAL",
    "Context",
    "continued",
    "difference",
    "fresh",
    "function",
    "lib",
    "split",
]

EXACT = 1e-4  # two clean runs differ by less, as a part of the range of the logits


def difference(got: Logits, wanted: Logits) -> float:
    """Largest difference of two logit rows, as a part of the wanted row's range; infinite when not finite."""
    apart = gap(got, wanted)
    return apart.largest / apart.span


class Context(context.Context):
    """A native context on the model at `path`; keywords are fields of `llama_context_params`."""

    def __init__(self, path: str, **params: Any) -> None:
        super().__init__(ModelUnderTest(path), params)
        self.path = path

    def feed(self, begin: int, end: int, seq: int = 0, *, text: int | None = None, chunk: int = 256) -> int:
        """As the hazard catalogue does, by default with a text of its own for each sequence."""
        return super().feed(begin, end, seq, text=seq if text is None else text, chunk=chunk)

    def ends(self, seq: int = 0) -> tuple[int, int]:
        """First and last position the memory reports for `seq`."""
        return int(lib.llama_memory_seq_pos_min(self.memory, seq)), self.last(seq)


def fresh(path: str, length: int, *, text: int = 0, seq: int = 0, **params: Any) -> Logits:
    """Logits at position `length` of the test text in a context that saw nothing else."""
    context = Context(path, **params)
    assert context.feed(0, length, seq, text=text) == 0
    assert context.feed(length, length + 1, seq, text=text) == 0
    return context.logits()


def continued(context: Context, path: str, length: int, seq: int = 0, **params: Any) -> float | None:
    """Return the difference of logits after a token at position `length`; None for a refused decode."""
    if context.feed(length, length + 1, seq):
        return None
    return difference(context.logits(), fresh(path, length, text=seq, seq=seq, **params))


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


MISSING = 77
"""Exit status of a probe whose function the library has not."""


def function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the library that only a patch has; the process ends where there is none."""
    found = getattr(lib._lib, name, None)
    if found is None:
        print(f"no function {name}", file=sys.stderr)
        sys.exit(MISSING)
    found.restype, found.argtypes = result, arguments
    return found


if __name__ == "__main__":
    sys.modules["capi"] = sys.modules["__main__"]
    module, probe, model = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), probe)(model)))
