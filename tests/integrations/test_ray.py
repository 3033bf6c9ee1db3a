"""Replicas on a real Ray Serve: the tests that wait for Ray, and agents whose chats stay where they are."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import TinyModel
from tests.integrations.environments import ROOT
from tests.integrations.sides import needed

needed("ray", "ray")


def test_tests_that_need_ray_run_here() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/ray/test_router.py", "tests/test_ray.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_agents_on_two_replicas_find_their_chats_again(tiny_model: TinyModel) -> None:
    from tests.lab.ray_load import play

    tally = play(tiny_model("qwen35"), 2, clients=4, turns=5)
    assert (tally.failed, tally.lost) == (0, 0)
    assert tally.decoded <= 1.05 * tally.least
