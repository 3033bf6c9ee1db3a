"""`make gpu`: one line where there is no GPU, else a report with the device's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from llamahybrid.devices.ggml import Device


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.ggml, "gpus", list)
    assert gpu.main(1, "", None) == 0
    assert capsys.readouterr().out == "no GPU: left out\n"


@pytest.mark.parametrize("passed", [True, False])
def test_a_report_has_the_devices_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, passed: bool) -> None:
    asked: list[Any] = []

    def right(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return {"hazards": {"passed": True}, "drafts": {"passed": passed}}

    monkeypatch.setattr(gpu.ggml, "gpus", lambda: ["CUDA0: NVIDIA H200"])
    monkeypatch.setattr(gpu.ggml, "local", lambda: [Device(1, "CUDA0: NVIDIA H200")])
    monkeypatch.setattr(gpu, "right", right)
    monkeypatch.setattr(gpu, "fast", lambda place, device: {"ours prefill": 0.5})
    monkeypatch.setattr(gpu, "examine", lambda *_: [])
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    assert gpu.main(7, "", None) == (not passed)
    assert asked == [(7, {gpu.LAYERS: "-1"}, "")]
    report = json.loads((tmp_path / "gpu-cuda0-nvidia-h200.json").read_text())
    assert report["device"] == ["CUDA0: NVIDIA H200"]
    assert report["seconds"] == {"ours prefill": 0.5}
