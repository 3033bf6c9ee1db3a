"""What a release's patches cure: two reports of `llamahybrid hazards --json` as one.

Under that release: llamahybrid hazards --lib STOCK --json stock.json; the same with the engine that
`llamahybrid engine build` made; then python -m benchmarks.releases 0.3.35 stock.json patched.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llamahybrid.engine import series

RESULTS = Path(__file__).parent / "results"


def together(release: str, stock: Mapping[str, Any], patched: Mapping[str, Any]) -> dict[str, Any]:
    """Both reports, probe by probe; what is not needed for the table is left out."""
    after = {probe["id"]: probe for probe in patched["probes"]}
    return {
        "release": release,
        "made": datetime.now(timezone.utc).date().isoformat(),
        "system": stock["system"],
        "patches": [name[:4] for name in series.patches(release)],
        "probes": [
            {
                "id": before["id"],
                "title": before["title"],
                "model": before["model"],
                "patches": before["patches"],
                "stock": _short(before),
                "patched": _short(after[before["id"]]),
            }
            for before in stock["probes"]
        ],
    }


def _short(probe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: probe[name] for name in ("verdict", "difference")}


def main() -> None:
    """Write `benchmarks/results/hazards-RELEASE.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release")
    parser.add_argument("stock", type=Path)
    parser.add_argument("patched", type=Path)
    arguments = parser.parse_args()
    stock, patched = (json.loads(path.read_text()) for path in (arguments.stock, arguments.patched))
    path = RESULTS / f"hazards-{arguments.release}.json"
    path.write_text(json.dumps(together(arguments.release, stock, patched), indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
