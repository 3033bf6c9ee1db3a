"""Correctness and speed on a GPU, beside the stock library and a plain copy.

With all layers offloaded: the hazards, campaigns against fresh stock contexts on the same GPU (histories,
drafts, several requests at once), then prefill, decode, snapshot, restore and the measured costs of a
Qwen3.5-architecture model of about 100M parameters, next to llama_cpp's own class in the same process and to
a copy of as many bytes from the device. Writes benchmarks/results/gpu-DEVICE.json. Without a GPU it prints
one line.
Run: python -m benchmarks.gpu [--seconds N] [--rpc HOST:PORT] [--json FILE]
--rpc takes an RPC server for the GPU: the same numbers of a machine without one, for trying this program.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from llamahybrid import Llama

# isort: split
import llama_cpp
import numpy as np

from llamahybrid.capi.shim import library
from llamahybrid.devices import ggml
from llamahybrid.devices.rpc import connect, endpoints
from llamahybrid.engine.bindings import loaded_from
from llamahybrid.engine.doctor import examine
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.prompt_cache.base import Costs
from llamahybrid.prompt_cache.placement import cut_tokens
from llamahybrid.tiny import make
from tests.lab.reference import LAYERS, RPC

PARAMETERS = 100_000_000
PROMPT, ANSWER, ROUNDS = 4096, 128, 5
CAMPAIGNS = {"histories": "fuzz", "drafts": "draft_fuzz", "parallel": "parallel_fuzz"}
RESULTS = Path(__file__).parent / "results"


def right(seconds: float, place: dict[str, str], rpc: str) -> dict[str, Any]:
    """Hazards and campaigns, each in a process of its own: exit status, and what it printed last.

    All at once on a GPU; an RPC server serves one program at a time.
    """
    environment = {**os.environ, **place}
    jobs = "1" if rpc else "4"
    hazards = ("llamahybrid", "hazards", "--n-gpu-layers", "-1", "--rpc", rpc, "--jobs", jobs)
    stock = "llama_state_seq_get_data_range" not in library().optional
    commands: dict[str, tuple[str, ...]] = {"hazards": hazards}
    commands |= {name: (f"tests.lab.{each}", "--seconds", str(seconds)) for name, each in CAMPAIGNS.items()}

    def result(command: tuple[str, ...]) -> dict[str, Any]:
        program = [sys.executable, "-m", *command]
        run = subprocess.run(program, env=environment, capture_output=True, text=True, errors="replace")
        known = run.returncode == 1 and command is hazards and stock  # some of stock's are unsound
        printed = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
        passed = known or run.returncode == 0
        short = passed and command is hazards  # one line for each; campaigns end with a table
        return {"passed": passed, "printed": printed[:4] + printed[-8:] if short else printed}

    print(", ".join(commands), "...", file=sys.stderr)
    with ThreadPoolExecutor(1 if rpc else len(commands)) as pool:
        return dict(zip(commands, pool.map(result, commands.values()), strict=True))


def fast(place: dict[str, Any], device: ggml.Device) -> dict[str, float]:
    """Medians: seconds of a prompt, of an answer, of a snapshot, of its restore, of a plain copy."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make("qwen35", Path(folder, "model.gguf"), params=PARAMETERS, context=PROMPT * 2))
        shape: dict[str, Any] = {
            "n_ctx": PROMPT + 2 * ANSWER,
            "n_batch": 2048,
            "n_gpu_layers": -1,
            "verbose": False,
        }
        found: dict[str, list[float]] = {}
        with closing(Llama(model, **shape, **place)) as ours:
            stock = None if place else llama_cpp.Llama(model, **shape)
            speech, runner = Speech(ours, 1), ours.runner
            assert runner is not None
            native = runner.live.native
            with closing(Plain(device.handle, native.state_size(partial=True))) as plain:
                for _ in range(ROUNDS + 1):
                    prompt = speech.words(PROMPT)
                    for name, llm in (("stock", stock), ("ours", ours)):
                        if llm is not None:
                            _request(found, name, llm, prompt)
                            _chats(found, name, llm, speech)
                    _states(found, native)
                    plain.copy(found)
            _costs(found, runner.meter.costs())
            if stock is not None:
                stock.close()
    return {name: statistics.median(times[1:]) for name, times in found.items()}


@contextmanager
def timed(found: dict[str, list[float]], name: str) -> Iterator[None]:
    """Note the seconds of the body."""
    started = time.perf_counter()
    yield
    found.setdefault(name, []).append(time.perf_counter() - started)


def _request(found: dict[str, list[float]], name: str, llm: Any, prompt: list[int]) -> None:
    """A prompt, its answer, and what is stored at its end; then a short prompt's answer as a stream."""
    answer = llm.generate(prompt, temp=0.0)
    with timed(found, f"{name} prefill"):
        next(answer)
    with timed(found, f"{name} decode"):
        list(islice(answer, ANSWER))
    with timed(found, f"{name} end"):
        answer.close()
    chunks = llm.create_completion(prompt[:50], max_tokens=ANSWER, stream=True, temperature=0.0)
    next(chunks)
    with timed(found, f"{name} stream"):
        list(chunks)


def _chats(found: dict[str, list[float]], name: str, llm: Any, speech: Speech) -> None:
    """The first token of the third turn: of a chat that grows, and of one whose thinking is stripped."""
    for kind, kept in (("grows", 0), ("stripped", ANSWER // 4)):
        history = speech.words(PROMPT // 2)
        for turn in range(3):
            history = [*history, *speech.words(60)]
            with closing(llm.generate(history, temp=0.0)) as answer:
                began = time.perf_counter()
                said = [next(answer)]
                if turn == 2:
                    found.setdefault(f"{name} {kind}", []).append(time.perf_counter() - began)
                said += islice(answer, ANSWER // 2)
            history += said[kept:]


def _states(found: dict[str, list[float]], native: Any) -> None:
    """The PARTIAL state out and back in."""
    state = np.empty(native.state_size(partial=True), dtype=np.uint8)
    found.setdefault("snapshot bytes", []).append(state.nbytes)
    with timed(found, "snapshot"):
        saved = native.save_partial(state)
    with timed(found, "restore"):
        if saved is None or not native.load_partial(state):
            raise RuntimeError("a state was refused")


def _costs(found: dict[str, list[float]], costs: Costs) -> None:
    """The costs that decide about checkpoints: seconds, and the tokens of a prompt in the time of a cut."""
    measured = {name: value for name, value in asdict(costs).items() if name.endswith("_seconds")}
    for name, value in {**measured, "cut_tokens": cut_tokens(costs)}.items():
        found[f"ours {name.replace('_', ' ')}"] = [0.0, value]


class Plain:
    """As many bytes on a device, in one piece."""

    def __init__(self, device: int, size: int) -> None:
        self._library, self._size = ctypes.CDLL(str(ggml.file())), size
        self._host = ctypes.create_string_buffer(size)
        self._context = self._call("ggml_init", ctypes.c_void_p, _Memory(4096, None, True))
        self._tensor = self._call(
            "ggml_new_tensor_1d", ctypes.c_void_p, self._context, _I8, ctypes.c_int64(size)
        )
        kind = self._call("ggml_backend_dev_buffer_type", ctypes.c_void_p, device)
        self._buffer = self._call(
            "ggml_backend_alloc_ctx_tensors_from_buft", ctypes.c_void_p, self._context, kind
        )
        if not self._buffer:
            raise RuntimeError("the device has no memory left")

    def close(self) -> None:
        """Free the memory; an RPC server serves other programs only then."""
        self._call("ggml_backend_buffer_free", None, self._buffer)
        self._call("ggml_free", None, self._context)

    def copy(self, found: dict[str, list[float]]) -> None:
        """To the host, and back."""
        for name, function in (
            ("copy out", "ggml_backend_tensor_get"),
            ("copy in", "ggml_backend_tensor_set"),
        ):
            size = ctypes.c_size_t(self._size)
            with timed(found, name):
                self._call(function, None, self._tensor, self._host, ctypes.c_size_t(0), size)

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        return function(*(ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments))


class _Memory(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


_I8 = ctypes.c_int(24)  # GGML_TYPE_I8


def main(seconds: float, rpc: str, out: Path | None) -> int:
    devices = [rpc] if rpc else ggml.gpus()
    if not devices:
        print("no GPU: left out")
        return 0
    place = {RPC: rpc} if rpc else {LAYERS: "-1"}
    device = connect(endpoints(rpc))[0] if rpc else ggml.local()[0]
    shown = [f"{f.topic}: {f.text}" for f in examine(lambda: (), True, ggml.gpus) if f.topic != "engine"]
    report: dict[str, Any] = {
        "device": devices,
        "engine": str(loaded_from()),
        "doctor": shown,
        "right": right(seconds, place, rpc),
        "seconds": fast({"rpc_servers": rpc} if rpc else {}, device),
    }
    name = re.sub(r"[^a-z0-9]+", "-", devices[0].lower()).strip("-")
    path = out or RESULTS / f"gpu-{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(path)
    return 0 if all(part["passed"] for part in report["right"].values()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="for each campaign")
    parser.add_argument("--rpc", default="", metavar="HOST:PORT")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sys.exit(main(given.seconds, given.rpc, given.json))
