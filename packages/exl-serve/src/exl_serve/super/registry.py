"""The metrics of a server: one registry in the supervisor, whatever the number of workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily

from exl_serve.engine.client import EngineStatus
from exl_serve.metrics import GAP_BUCKETS

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "SPREADS", "Metrics"]

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
    "exl_stalled_streams_total": ("Answers cut off because nobody read them", (), None),
    "exl_ignored_fields_total": ("Unknown fields in requests, by name where it is a common one", ("field",), None),
    "exl_engine_restarts_total": ("Engine processes that were started again", ("model_name",), None),
    "exl_events_total": ("Writes of streams", ("model_name",), None),
    "exl_drafted_tokens_total": (
        "Tokens that a draft has guessed",
        ("model_name",),
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    "exl_accepted_tokens_total": (
        "Guessed tokens that were right",
        ("model_name",),
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
    "exl_steps_total": ("Generator steps", ("model_name",), None),
    "exl_step_seconds_total": ("Seconds in generator steps", ("model_name",), None),
    "exl_preemptions_total": (
        "Completions that gave up their pages for others and began again",
        ("model_name",),
        "vllm:num_preemptions_total",
    ),
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
    "exl_request_inference_seconds": (
        "Computing prompts and generating",
        ("model_name",),
        "vllm:request_inference_time_seconds",
    ),
    "exl_template_seconds": ("Rendering and encoding a conversation, with the wait for it", ("model_name",), None),
    "exl_tokenize_seconds": ("Encoding the prompts of a text completion", ("model_name",), None),
    "exl_grammar_compile_seconds": ("Compiling the grammars of a request, with the wait for it", ("model_name",), None),
    "exl_token_seconds": (
        "Mean of a request between its tokens",
        ("model_name",),
        "vllm:request_time_per_output_token_seconds",
    ),
    "exl_loop_lag_seconds": ("How late an API worker's event loop runs a timer while there are requests", (), None),
}
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
SPREADS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "exl_inter_token_seconds": (
        "Between the tokens of a completion, as they reach the API worker",
        ("model_name",),
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ),
}
"""Histograms with a value for each token, of the buckets `GAP_BUCKETS`."""
_BUCKETS = {
    "exl_request_prompt_tokens": _TOKENS,
    "exl_request_generation_tokens": _TOKENS,
    "exl_request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
    "exl_request_params_max_tokens": _TOKENS,
    "exl_token_seconds": GAP_BUCKETS,
    "exl_loop_lag_seconds": GAP_BUCKETS,
    "exl_template_seconds": GAP_BUCKETS,
    "exl_tokenize_seconds": GAP_BUCKETS,
}
GAUGES: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "exl_requests_running": ("Requests in the engine", ("model_name",), "vllm:num_requests_running"),
    "exl_requests_waiting": ("Requests in the queue", ("model_name",), "vllm:num_requests_waiting"),
    "exl_queued_prompt_tokens": ("Prompt tokens that are not computed yet", ("model_name",), None),
    "exl_kv_cache_usage": ("Pinned pages of all", ("model_name",), "vllm:kv_cache_usage_perc"),
    "exl_pages": ("Pages of the cache", ("model_name", "state"), None),
    "exl_prefill_tokens_per_second": ("Running average", ("model_name",), None),
    "exl_decode_tokens_per_second": ("Running average", ("model_name",), None),
    "exl_model_state": ("1 for the state that a model is in", ("model_name", "state"), None),
    "exl_device_bytes": ("Planned bytes of the loaded models", ("device",), None),
    "exl_process_rss_bytes": ("Resident memory", ("process",), None),
    "exl_cache_info": (
        "1, with the size of the cache",
        ("model_name", "block_size", "num_gpu_blocks"),
        "vllm:cache_config_info",
    ),
    "exl_ready": ("1 while requests are taken", (), None),
}


UNSUCCESSFUL = ("abort", "error")
"""Reasons of requests whose client left, or that failed."""


class _Spread:
    """A histogram whose values come as their number in each bucket."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], tuple[list[int], float]] = {}

    def add(self, labels: Mapping[str, str], counts: Sequence[int], total: float) -> None:
        """Add values: their number in each bucket, and their sum."""
        key = tuple(labels[name] for name in self._labels)
        known, before = self._values.get(key, ([0] * len(counts), 0.0))
        self._values[key] = ([a + b for a, b in zip(known, counts, strict=True)], before + total)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Yield the histogram, as prometheus_client asks for it."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = [*map(str, GAP_BUCKETS), "+Inf"]
        for key, (counts, total) in self._values.items():
            family.add_metric(list(key), list(zip(bounds, itertools.accumulate(counts), strict=True)), total)
        yield family


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
        self._spreads: dict[str, list[_Spread]] = {}
        for name, (text, labels, others) in SPREADS.items():
            self._spreads[name] = [_Spread(one, text, labels) for one in (name, *(others if alias else ()))]
            for spread in self._spreads[name]:
                self.registry.register(spread)
        #: by model: boot id of its engine, and its counts so far
        self._engines: dict[str, tuple[bytes, tuple[float, ...]]] = {}
        #: by model: the labels of its cache's size
        self._caches: dict[str, dict[str, str]] = {}
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
            # vLLM counts successes alone under its name.
            last = 1 if labels.get("finished_reason") in UNSUCCESSFUL else None
            for metric in self._made[name][:last]:
                one = metric.labels(**labels) if labels else metric
                if is_count:
                    one.inc(value)
                else:
                    one.observe(value)

    def spread(self, reported: Iterable[tuple[str, Mapping[str, str], Sequence[int], float]]) -> None:
        """Add a worker's values by their buckets. Unknown names and labels are left out."""
        for name, labels, counts, total in reported:
            known = SPREADS.get(name)
            if known is None or set(labels) != set(known[1]) or len(counts) != len(GAP_BUCKETS) + 1:
                continue
            if min(counts) >= 0 and total >= 0:
                for one in self._spreads[name]:
                    one.add(labels, counts, total)

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
        self._count_steps(model, status)
        if status.page_size and pages:
            sizes = {"block_size": str(status.page_size), "num_gpu_blocks": str(pages)}
            before = self._caches.get(model, sizes)
            if before != sizes:  # the model was loaded again with another cache
                self.forget("exl_cache_info", model_name=model, **before)
            self._caches[model] = sizes
            self.set("exl_cache_info", 1.0, model_name=model, **sizes)
        self.set("exl_prefill_tokens_per_second", status.prefill_rate, model_name=model)
        self.set("exl_decode_tokens_per_second", status.decode_rate, model_name=model)

    def _count_steps(self, model: str, status: EngineStatus) -> None:
        """Add what an engine has counted since the last look; a new engine begins at 0."""
        names = ("exl_steps_total", "exl_step_seconds_total", "exl_preemptions_total")
        counts = (float(status.step), status.step_seconds, float(status.preemptions))
        boot, before = self._engines.get(model, (b"", ()))
        self._engines[model] = (status.boot, counts)
        base = before if boot == status.boot else (0.0,) * len(counts)
        labels = {"model_name": model}
        self.take((True, name, labels, new - old) for name, new, old in zip(names, counts, base, strict=True))

    def text(self) -> str:
        """Return all metrics in Prometheus's text format."""
        return str(generate_latest(self.registry).decode())
