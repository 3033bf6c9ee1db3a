"""Correctness on a GPU, then speed beside stock (`benchmarks.clients alone`), with all layers offloaded.

Hazards, and campaigns against fresh stock contexts on the same GPU: histories, drafts, several requests at
once. Writes benchmarks/results/gpu-DEVICE.json and gpu-DEVICE-speed.json. Without a GPU it prints one line.
Run: python -m benchmarks.gpu [--seconds N] [--rpc HOST:PORT] [--json FILE]
--rpc takes an RPC server for the GPU and leaves the speed out: a machine without one can try this program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llamahybrid.capi.shim import library
from llamahybrid.devices import ggml
from llamahybrid.engine.bindings import loaded_from
from llamahybrid.engine.doctor import examine
from tests.lab.reference import LAYERS, RPC

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
        return {"passed": passed, "printed": printed[:4] + printed[-8:] if passed else printed}

    print(", ".join(commands), "...", file=sys.stderr)
    with ThreadPoolExecutor(1 if rpc else len(commands)) as pool:
        return dict(zip(commands, pool.map(result, commands.values()), strict=True))


def main(seconds: float, rpc: str, out: Path | None) -> int:
    devices = [rpc] if rpc else ggml.gpus()
    if not devices:
        print("no GPU: left out")
        return 0
    place = {RPC: rpc} if rpc else {LAYERS: "-1"}
    shown = [f"{f.topic}: {f.text}" for f in examine(lambda: (), True, ggml.gpus) if f.topic != "engine"]
    report: dict[str, Any] = {
        "device": devices,
        "engine": str(loaded_from()),
        "doctor": shown,
        "right": right(seconds, place, rpc),
    }
    name = re.sub(r"[^a-z0-9]+", "-", devices[0].lower()).strip("-")
    path = out or RESULTS / f"gpu-{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(path)
    if not rpc:
        speed = ("benchmarks.clients", "alone", "--n-gpu-layers", "-1")
        file = path.with_name(f"{path.stem}-speed.json")
        subprocess.run([sys.executable, "-m", *speed, "--json", str(file)])
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
