"""Replicas on a real Ray Serve: the tests that wait for Ray, and agents whose chats stay where they are."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.conftest import TinyModel
from tests.integrations.environments import ROOT
from tests.integrations.sides import needed
from tests.lab.waiting import free_port

ray = needed("ray", "ray")

SYSTEM = "You are an agent that answers with the tools it has, step by step, and says why. " * 4
WORDS = ("river", "stone", "crow", "bridge", "winter", "letter", "engine", "garden", "window")


def test_tests_that_need_ray_run_here() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/ray/test_router.py", "tests/test_ray.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def talk(url: str, number: int) -> tuple[int, int]:
    """Play a chat of five turns; return the prompt tokens decoded behind the first turn, and the least."""
    chance, decoded, least, known = random.Random(number), 0, 0, 0
    headers = {"x-session-id": str(number)} if number % 2 else {}

    def say(role: str, n: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(chance.choices(WORDS, k=n))}

    history = [{"role": "system", "content": SYSTEM}, say("user", 40)]
    with httpx.Client(base_url=url, timeout=120, trust_env=False, headers=headers) as client:
        for _ in range(5):
            asked = {"messages": history, "max_tokens": 12, "temperature": 0}
            usage = client.post("/v1/chat/completions", json=asked).raise_for_status().json()["usage"]
            total, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
            if known:
                decoded, least = decoded + total - cached, least + max(1, total - known)
            known = total
            # Not the answer of a random model, whose text comes back as other tokens.
            history = [*history, say("assistant", 12), say("user", 12)]
    return decoded, least


def test_agents_on_two_replicas_find_their_chats_again(tiny_model: TinyModel) -> None:
    from ray import serve

    import llamahybrid.ray

    port = free_port()
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        small = {"n_ctx": 4096, "n_threads": 1, "n_threads_batch": 1, "chat_format": "chatml"}
        cpus = {"num_cpus": 0.5}
        app = llamahybrid.ray.app(str(tiny_model("qwen35")), 2, n_parallel=4, ray_actor_options=cpus, **small)
        serve.start(http_options={"port": port})
        serve.run(app)
        with ThreadPoolExecutor(4) as pool:
            costs = list(pool.map(lambda number: talk(f"http://127.0.0.1:{port}", number), range(4)))
    finally:
        serve.shutdown()
        ray.shutdown()
    assert sum(decoded for decoded, _ in costs) <= 1.05 * sum(least for _, least in costs)
