"""`llamahybrid bench`: its table, its JSON file and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.harness import bench
from llamahybrid.harness.bench import Bench, Cell, Results
from llamahybrid.harness.targets.base import Saving

RESULTS = Results(
    "2026-01-01T00:00:00+00:00",
    {"cores": "2"},
    {"name": "a.gguf"},
    1,
    {"ours": {}, "http://x": {}},
    (
        Cell("a chat", "ours", 5, 110, 100, 0.5, 20.0, 3 << 20),
        Cell("a chat", "http://x", 5),
        Cell("a chat", "stock", error="it died"),
        Cell(bench.SAVED, "ours", 1, saving=Saving(3 << 20, 0.006, 0.012, 0.004)),
        Cell(bench.SAVED, "http://x", 1),
    ),
)


def test_bench_writes_results_and_fails_on_a_failed_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Bench] = []

    def run(self: Bench) -> Results:
        seen.append(self)
        self.progress("a", 0, 1)
        self.found(RESULTS)
        return RESULTS

    monkeypatch.setattr(bench.Bench, "run", run)
    model, out = tmp_path / "m.gguf", tmp_path / "out.json"
    model.write_bytes(b"GGUF")
    ran = CliRunner().invoke(
        app, ["bench", str(model), "--clients", "2", "--threads", "3", "--json", str(out)]
    )
    assert ran.exit_code == 1
    assert [t.name for t in seen[0].targets] == ["stock", "stock+ram", "ours"]
    assert seen[0].clients == (2,)
    assert seen[0].model.options == {"n_threads": 3, "n_threads_batch": 3}
    assert Results.from_json(json.loads(out.read_text())) == RESULTS


def test_unknown_target_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    ran = CliRunner().invoke(app, ["bench", str(model), "--on", "nonsense"])
    assert ran.exit_code == 1
    assert "no target 'nonsense'" in ran.output
