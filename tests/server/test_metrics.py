"""What Prometheus reads."""

from __future__ import annotations

from dataclasses import replace

from llamahybrid.request.report import RequestReport
from llamahybrid.server.metrics import Gauges, Metrics

REPORT = RequestReport(
    total=100,
    matched=80,
    cached=75,
    source="ram",
    reason="",
    generated=10,
    prefill_seconds=0.5,
    first_token_seconds=1.0,
    last_token_seconds=3.0,
)


def told(metrics: Metrics) -> dict[str, float]:
    lines = metrics.text().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}


def test_counters_and_gauges() -> None:
    metrics = Metrics(
        lambda: Gauges(2, 3, 4, 1, {"ram": 1000, "disk": 5000, "remote": 6000}, {"disk": 7, "remote": 8})
    )
    metrics.answered((REPORT,), 0.5, "done")
    metrics.answered((), 0.5, "failed")
    metrics.refused("key")
    says = told(metrics)
    assert says["llamacpp:prompt_tokens_total"] == 25
    assert says["llamacpp:prompt_seconds_total"] == 0.5
    assert says["llamacpp:prompt_tokens_seconds"] == 50
    assert says["llamacpp:tokens_predicted_total"] == 10
    assert says["llamacpp:tokens_predicted_seconds_total"] == 2
    assert says["llamacpp:predicted_tokens_seconds"] == 5
    assert says["llamacpp:requests_processing"] == 2
    assert says["llamacpp:requests_deferred"] == 3
    assert says["vllm:prefix_cache_queries_total"] == 100
    assert says["vllm:prefix_cache_hits_total"] == 75
    assert says["vllm:time_to_first_token_seconds_sum"] == 1.5
    assert says['vllm:time_to_first_token_seconds_bucket{le="1.0"}'] == 0
    assert says["llamahybrid:slots"] == 4
    assert says["llamahybrid:slots_busy"] == 1
    assert says['llamahybrid:cache_bytes{tier="disk"}'] == 5000
    assert says['llamahybrid:cache_bytes{tier="remote"}'] == 6000
    assert says["llamahybrid:cache_disk_errors_total"] == 7
    assert says["llamahybrid:cache_remote_errors_total"] == 8
    assert says['llamahybrid:requests_total{end="failed"}'] == 1
    assert says['llamahybrid:refused_total{why="key"}'] == 1


def test_two_servers_of_a_process_count_for_themselves() -> None:
    one, other = (Metrics(lambda: Gauges(0, 0, 1, 0, {}, {})) for _ in range(2))
    one.answered((REPORT,), 0.0, "done")
    assert told(other)["llamacpp:tokens_predicted_total"] == 0
    assert told(other)["llamacpp:predicted_tokens_seconds"] == 0


def test_a_prompt_that_was_cancelled_counts_as_far_as_it_was_decoded() -> None:
    metrics = Metrics(lambda: Gauges(0, 0, 1, 0, {}, {}))
    metrics.answered((replace(REPORT, unreached=20, generated=0),), 0.0, "cancelled")
    assert told(metrics)["llamacpp:prompt_tokens_total"] == 5
    assert told(metrics)["llamacpp:prompt_tokens_seconds"] == 10
