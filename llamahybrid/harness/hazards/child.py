"""The process that runs one probe: `python -m llamahybrid.harness.hazards.child PROBE MODEL GPU_LAYERS RPC`.

Without arguments it loads the library and describes it. The last line on stdout is JSON; `runner` handles
crashes of this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamahybrid.engine import installed
from llamahybrid.harness.hazards.effect import Behaviour, Effect, NotApplicable, Refused


def _load() -> None:
    """Load the chosen libllama first: the ggml libraries beside it must win over llama_cpp's own."""
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    if folder:
        ctypes.CDLL(str(installed.library(Path(folder), "llama")))


def about() -> dict[str, str]:
    """Return path and build of the loaded library."""
    from llama_cpp import llama_cpp

    return {"path": llama_cpp._lib._name, "system": llama_cpp.llama_print_system_info().decode().strip()}


def effect_of(name: str, model: str, gpu_layers: int, rpc: str = "") -> dict[str, Any]:
    """Run one probe on the model file at `model`."""
    from llamahybrid.harness.hazards.catalogue import find
    from llamahybrid.harness.hazards.model import ModelUnderTest

    try:
        found = find(name).run(ModelUnderTest(model, gpu_layers, rpc))
    except NotApplicable as error:
        found = Effect(Behaviour.NOT_APPLICABLE, str(error))
    except Refused as error:
        found = Effect(Behaviour.REFUSED, str(error))
    return asdict(found)


if __name__ == "__main__":
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # processes are expected to die
    _load()
    given = sys.argv[1:]
    result = effect_of(given[0], given[1], int(given[2]), *given[3:]) if given else about()
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # skip the destructors of a misused context
