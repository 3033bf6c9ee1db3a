"""Metrics for Prometheus, with the names of llama-server and vLLM for equal quantities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llamahybrid.core.report import RequestReport
from llamahybrid.server.usage import leading

TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
)
"""Seconds, as vLLM's (vllm/v1/metrics/loggers.py)."""


@dataclass(frozen=True)
class Gauges:
    """Current values."""

    processing: int
    """Running requests."""
    deferred: int
    """Waiting requests."""
    slots: int
    slots_busy: int
    tier_bytes: Mapping[str, int]
    """Stored bytes by tier: "ram", "disk", "remote"."""
    tier_errors: Mapping[str, int]
    """Failed reads and writes of the disk or the remote store since the model was first opened."""
    models: Mapping[str, bool]
    """True for open models, by alias."""
    prompts: int = 0
    """Prompts in decoding."""
    prompt_tokens_left: int = 0
    """Tokens of these prompts that are not decoded yet."""


class Metrics:
    """The counters of one server."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self._registry)

        self._prompt = counter("llamacpp:prompt_tokens", "Number of prompt tokens processed.")
        self._prompt_seconds = counter("llamacpp:prompt_seconds", "Prompt process time in seconds.")
        self._predicted = counter("llamacpp:tokens_predicted", "Number of generation tokens processed.")
        self._predicted_seconds = counter(
            "llamacpp:tokens_predicted_seconds", "Predict process time in seconds."
        )
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self._requests = counter("llamahybrid:requests", "Requests that are over, by their end.", ("end",))
        self._refused = counter("llamahybrid:refused", "Refused requests, by reason.", ("why",))
        self._first = Histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            buckets=TTFT_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_Now(gauges, self._rates))
        self._sums = dict.fromkeys(("prompt", "prompt_seconds", "said", "said_seconds"), 0.0)

    def _rates(self) -> dict[str, float]:
        return {
            "llamacpp:prompt_tokens_seconds": self._sums["prompt"] / max(self._sums["prompt_seconds"], 1e-9),
            "llamacpp:predicted_tokens_seconds": self._sums["said"] / max(self._sums["said_seconds"], 1e-9),
        }

    def answered(self, reports: tuple[RequestReport, ...], waited: float, end: str, prompts: int = 1) -> None:
        """Count a request that is over; `waited`: seconds from its arrival to its start."""
        self._requests.labels(end).inc()
        for report in reports:
            self._prompt.inc(report.decoded)
            self._prompt_seconds.inc(report.prefill_seconds)
            self._predicted.inc(report.generated)
            said_seconds = max(0.0, report.last_token_seconds - report.first_token_seconds)
            self._predicted_seconds.inc(said_seconds)
            self._sums["prompt"] += report.decoded
            self._sums["prompt_seconds"] += report.prefill_seconds
            self._sums["said"] += report.generated
            self._sums["said_seconds"] += said_seconds
        for report in leading(reports, prompts):
            self._queries.inc(report.total)
            self._hits.inc(report.cached)
        if reports and reports[0].generated:
            self._first.observe(waited + reports[0].first_token_seconds)

    def refused(self, why: str) -> None:
        """Count a refused request."""
        self._refused.labels(why).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """Gauges, computed at each scrape."""

    def __init__(self, gauges: Callable[[], Gauges], rates: Callable[[], Mapping[str, float]]) -> None:
        self._gauges = gauges
        self._rates = rates

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        now = self._gauges()
        for name, text, value in (
            ("llamacpp:requests_processing", "Number of requests processing.", now.processing),
            ("llamacpp:requests_deferred", "Number of requests deferred.", now.deferred),
            ("llamahybrid:slots", "Requests that can run at once.", now.slots),
            ("llamahybrid:slots_busy", "Slots in use.", now.slots_busy),
            ("llamahybrid:prompts_processing", "Prompts in decoding.", now.prompts),
            ("llamahybrid:prompt_tokens_left", "Tokens of these prompts to decode.", now.prompt_tokens_left),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, rate in self._rates().items():
            yield GaugeMetricFamily(name, "Average throughput in tokens/s.", value=rate)
        models = GaugeMetricFamily("llamahybrid:model_open", "Whether a model is open.", labels=["model"])
        for alias, is_open in now.models.items():
            models.add_metric([alias], is_open)
        yield models
        tiers = GaugeMetricFamily("llamahybrid:cache_bytes", "Stored bytes, by tier.", labels=["tier"])
        for tier, n in now.tier_bytes.items():
            tiers.add_metric([tier], n)
        yield tiers
        for tier, n in now.tier_errors.items():
            text = f"Failed reads and writes of the {tier} tier."
            yield CounterMetricFamily(f"llamahybrid:cache_{tier}_errors", text, n)
