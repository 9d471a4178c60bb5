"""The metrics of a server: one registry in the supervisor, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from exl_serve.engine.client import EngineStatus

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "Metrics"]

_TIMES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
COUNTERS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "exl_requests_total": ("Finished requests", ("model_name", "finished_reason"), "vllm:request_success_total"),
    "exl_prompt_tokens_total": ("Prompt tokens", ("model_name",), "vllm:prompt_tokens_total"),
    "exl_looked_up_tokens_total": (
        "Prompt tokens looked up in the cache",
        ("model_name",),
        "vllm:prefix_cache_queries_total",
    ),
    "exl_generation_tokens_total": ("Generated tokens", ("model_name",), "vllm:generation_tokens_total"),
    "exl_cached_tokens_total": ("Prompt tokens found in the cache", ("model_name",), "vllm:prefix_cache_hits_total"),
    "exl_rejected_total": ("Refused requests by error code", ("code",), None),
    "exl_disconnects_total": ("Requests whose client left", ("phase",), None),
    "exl_stalled_streams_total": ("Streams ended because nobody read them", (), None),
    "exl_ignored_fields_total": ("Unknown fields in requests, by name where it is a common one", ("field",), None),
    "exl_engine_restarts_total": ("Engine processes that were started again", ("model_name",), None),
    "exl_worker_restarts_total": ("API workers that were started again", (), None),
}
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "exl_request_seconds": ("Whole requests", ("model_name",), "vllm:e2e_request_latency_seconds"),
    "exl_time_to_first_token_seconds": ("First token", ("model_name",), "vllm:time_to_first_token_seconds"),
    "exl_request_prompt_tokens": ("Prompt tokens of a request", ("model_name",), "vllm:request_prompt_tokens"),
    "exl_request_generation_tokens": ("Tokens of its answers", ("model_name",), "vllm:request_generation_tokens"),
    "exl_request_params_n": ("Answers asked for", ("model_name",), "vllm:request_params_n"),
    "exl_request_params_max_tokens": ("Tokens asked for", ("model_name",), "vllm:request_params_max_tokens"),
    "exl_request_queue_seconds": ("Waiting for a place", ("model_name",), "vllm:request_queue_time_seconds"),
    "exl_request_prefill_seconds": ("Computing prompts", ("model_name",), "vllm:request_prefill_time_seconds"),
    "exl_request_decode_seconds": ("Generating", ("model_name",), "vllm:request_decode_time_seconds"),
    "exl_token_seconds": (
        "Mean of a request between its tokens",
        ("model_name",),
        "vllm:request_time_per_output_token_seconds",
    ),
    "exl_loop_lag_seconds": ("How late an API worker's event loop runs a timer while there are requests", (), None),
}
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_SHORT = tuple(m * 10**e for e in (-4, -3, -2, -1, 0) for m in (1, 2.5, 5))
_BUCKETS = {
    "exl_request_prompt_tokens": _TOKENS,
    "exl_request_generation_tokens": _TOKENS,
    "exl_request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
    "exl_request_params_max_tokens": _TOKENS,
    "exl_token_seconds": _SHORT,
    "exl_loop_lag_seconds": _SHORT,
}
GAUGES: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "exl_requests_running": ("Requests in the engine", ("model_name",), "vllm:num_requests_running"),
    "exl_requests_waiting": ("Requests in the queue", ("model_name",), "vllm:num_requests_waiting"),
    "exl_queued_prompt_tokens": ("Prompt tokens that are not computed yet", ("model_name",), None),
    "exl_kv_cache_usage": ("Pinned pages of all", ("model_name",), "vllm:kv_cache_usage_perc"),
    "exl_pages": ("Pages of the cache", ("model_name", "state"), None),
    "exl_rounds": ("Generator steps since the engine's start", ("model_name",), None),
    "exl_prefill_tokens_per_second": ("Running average", ("model_name",), None),
    "exl_decode_tokens_per_second": ("Running average", ("model_name",), None),
    "exl_model_state": ("1 for the state that a model is in", ("model_name", "state"), None),
    "exl_device_bytes": ("Planned bytes of the loaded models", ("device",), None),
    "exl_process_rss_bytes": ("Resident memory", ("process",), None),
    "exl_ready": ("1 while requests are taken", (), None),
}


class Metrics:
    """Metrics by name; with `alias`, also under the names of vLLM, which published dashboards and scalers read."""

    def __init__(self, alias: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._alias = alias
        self._made: dict[str, list[Any]] = {}
        for name, (text, labels, other) in COUNTERS.items():
            self._made[name] = [Counter(one, text, labels, registry=self.registry) for one in self._names(name, other)]
        for name, (text, labels, other) in HISTOGRAMS.items():
            buckets = _BUCKETS.get(name, _TIMES)
            self._made[name] = [
                Histogram(one, text, labels, registry=self.registry, buckets=buckets)
                for one in self._names(name, other)
            ]
        for name, (text, labels, other) in GAUGES.items():
            self._made[name] = [Gauge(one, text, labels, registry=self.registry) for one in self._names(name, other)]

    def _names(self, name: str, other: str | None) -> list[str]:
        return [name] if other is None or not self._alias else [name, other]

    def take(self, reported: Iterable[tuple[bool, str, Mapping[str, str], float]]) -> None:
        """Add the counts and values of a worker. Unknown names and labels are left out."""
        for is_count, name, labels, value in reported:
            known = COUNTERS if is_count else HISTOGRAMS
            if name not in known or set(labels) != set(known[name][1]) or not value >= 0:
                continue
            for metric in self._made[name]:
                one = metric.labels(**labels) if labels else metric
                if is_count:
                    one.inc(value)
                else:
                    one.observe(value)

    def count(self, name: str, **labels: str) -> None:
        """Add one to a counter."""
        self.take([(True, name, labels, 1.0)])

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        for metric in self._made[name]:
            (metric.labels(**labels) if labels else metric).set(value)

    def forget(self, name: str, **labels: str) -> None:
        """Remove a gauge's value, of something that is gone."""
        for metric in self._made[name]:
            metric.remove(*(labels[label] for label in GAUGES[name][1]))

    def engine(self, model: str, status: EngineStatus) -> None:
        """Set the gauges of an engine."""
        pages = status.pages_pinned + status.pages_cached + status.pages_free
        self.set("exl_requests_running", status.decoding + status.prefilling, model_name=model)
        self.set("exl_requests_waiting", status.queued, model_name=model)
        self.set("exl_queued_prompt_tokens", status.queued_prompt_tokens, model_name=model)
        self.set("exl_kv_cache_usage", status.pages_pinned / max(pages, 1), model_name=model)
        for state in ("pinned", "cached", "free"):
            self.set("exl_pages", getattr(status, f"pages_{state}"), model_name=model, state=state)
        self.set("exl_rounds", status.step, model_name=model)
        self.set("exl_prefill_tokens_per_second", status.prefill_rate, model_name=model)
        self.set("exl_decode_tokens_per_second", status.decode_rate, model_name=model)

    def text(self) -> str:
        """Return all metrics in Prometheus's text format."""
        return str(generate_latest(self.registry).decode())
