"""What was measured for a model on this machine, kept between starts: no prompt need measure it again.

One small file for each fingerprint and number of threads, in the folder of things that can be made again
(`LLAMAHYBRID_CACHE_DIR`). Only guesses rest on it: where it cannot be read or written, nothing is kept.
`LLAMAHYBRID_COSTS=off` neither reads nor writes any.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

import xxhash

from llamahybrid.engine.sdist import cache_dir
from llamahybrid.errors import EngineError
from llamahybrid.files import write_whole
from llamahybrid.prompt_cache.base import Costs

VERSION = 2
SECONDS = tuple(f.name for f in fields(Costs) if f.name.endswith("_seconds"))
LONGEST = 3600.0
"""Seconds beyond which no cost is taken for one."""


class RememberedCosts:
    """The file of one model's costs; `context`: what else they depend on (threads, batch sizes, layers)."""

    def __init__(self, fingerprint: bytes, context: object) -> None:
        key = xxhash.xxh3_128(fingerprint + repr(context).encode()).hexdigest()
        self._path: Path | None = None
        if os.environ.get("LLAMAHYBRID_COSTS") != "off":
            with suppress(EngineError):  # no home folder
                self._path = cache_dir() / "costs" / f"{key}.json"
        self._written: dict[str, float] = {}

    def load(self) -> Costs | None:
        """What was kept; None where there is nothing, or nothing that makes sense."""
        if self._path is None:
            return None
        try:
            kept = json.loads(self._path.read_bytes())
            if kept["version"] != VERSION:
                return None
            seconds = {name: float(kept[name]) for name in SECONDS}
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
        if not all(math.isfinite(s) and 0 <= s <= LONGEST for s in seconds.values()):
            return None
        self._written = seconds
        return Costs(**seconds)  # type: ignore[arg-type]  # no field that ends with _seconds is a size

    def save(self, costs: Costs) -> None:
        """Keep `costs`, unless they are kept already, or prefill was not measured yet."""
        seconds = {name: value for name, value in asdict(costs).items() if name in SECONDS}
        if self._path is None or not costs.prefill_seconds or seconds == self._written:
            return
        self._written = seconds
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self._path, json.dumps({"version": VERSION, **seconds}).encode())
        except OSError:
            self._path = None
