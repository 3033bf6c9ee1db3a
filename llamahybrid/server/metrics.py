"""Metrics for Prometheus, with the names of llama-server and vLLM for equal quantities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llamahybrid.core.report import RequestReport
from llamahybrid.server.usage import leading

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
)
"""Seconds, as vLLM's (vllm/v1/metrics/loggers.py)."""


def gauge(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """Return a gauge with its value, or with one for each value of a label."""
    made = GaugeMetricFamily(name, text, labels=[label] if label else None)
    for each, number in value.items() if isinstance(value, Mapping) else [("", value)]:
        made.add_metric([each] if label else [], number)
    return made


class Metrics(Collector):
    """The metrics of one server."""

    def __init__(self, state: Callable[[], Iterator[Metric]]) -> None:
        """`state`: yields metrics of the server's state, at each scrape."""
        self._registry = CollectorRegistry()
        self._state = state

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
        self._registry.register(self)

    def answered(self, reports: tuple[RequestReport, ...], waited: float, end: str, prompts: int = 1) -> None:
        """Count a request that is over; `waited`: seconds from its arrival to its start."""
        self._requests.labels(end).inc()
        for report in reports:
            self._prompt.inc(report.decoded)
            self._prompt_seconds.inc(report.prefill_seconds)
            self._predicted.inc(report.generated)
            self._predicted_seconds.inc(max(0.0, report.last_token_seconds - report.first_token_seconds))
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

    def describe(self) -> list[Metric]:
        """See `Collector`: no names before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the server's state and average rates; see `Collector`."""
        yield from self._state()
        averages = {
            "llamacpp:prompt_tokens_seconds": (self._prompt, self._prompt_seconds),
            "llamacpp:predicted_tokens_seconds": (self._predicted, self._predicted_seconds),
        }
        for name, (tokens, seconds) in averages.items():
            rate = _total(tokens) / max(_total(seconds), 1e-9)
            yield gauge(name, "Average throughput in tokens/s.", rate)


def _total(counter: Counter) -> float:
    (family,) = counter.collect()
    return float(family.samples[0].value)
