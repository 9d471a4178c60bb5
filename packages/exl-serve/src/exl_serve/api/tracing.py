"""Traces of requests for OpenTelemetry collectors. Without an endpoint nothing of OpenTelemetry is imported."""

from __future__ import annotations

import logging
import threading
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from exl_serve.config.load import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from exl_serve.config.model import Otel

__all__ = ["Tracing", "check_tracing"]

log = logging.getLogger(__name__)

EXPORT_SECONDS = 5.0
"""An export that takes longer fails. The end of a server waits no longer than this for the last spans."""


def check_tracing(config: Otel) -> None:
    """Check that traces can be exported where the configuration asks for it. Raises ConfigError."""
    if config.endpoint is None:
        return
    if not config.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otel.endpoint is {config.endpoint!r}; it must be a URL of OTLP over HTTP, such as "
            "http://127.0.0.1:4318/v1/traces",
            "otel.endpoint",
        )
    try:
        found = find_spec("opentelemetry.sdk.trace") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(
            "otel.endpoint is set and OpenTelemetry is not installed: in a checkout, "
            'pip install "./packages/exl-serve[otel]" installs it',
            "otel.endpoint",
        )


class TracedRequest(Protocol):
    """A request that has ended, as spans describe it; `exl_serve.api.http.Call` is one."""

    id: str
    operation: str
    model: str
    began: float
    phases: list[tuple[str, float, float]]
    line: Mapping[str, Any] | None
    scope: MutableMapping[str, Any]

    def header(self, name: str) -> str | None:
        """Return a header of the request by its lower-case name, or None."""


class Tracing:
    """Makes the spans of each request when it has ended, from times that were taken on the way.

    A request is a server span with the parts admit, tokenise, grammar, queue, prefill and decode, under the span that
    the client's `traceparent` names. Spans hold names and numbers, no prompts and answers.
    """

    def __init__(self, config: Otel, exporter: Any = None) -> None:
        """Export to the endpoint, or to `exporter`, which then gets each span at once."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider: Any = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.ratio)),
            resource=Resource.create({"service.name": config.service_name}),
            shutdown_on_exit=False,
        )
        processor: Any
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint, timeout=EXPORT_SECONDS))
        else:
            processor = SimpleSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer: Any = self._provider.get_tracer("exl_serve")
        self._context: Any = TraceContextTextMapPropagator()

    def record(self, call: TracedRequest) -> None:
        """Make the spans of a request that has ended."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        offset = time.time() - time.monotonic()

        def at(moment: float) -> int:
            return round((offset + moment) * 1e9)

        headers = {name: value for name in ("traceparent", "tracestate") if (value := call.header(name)) is not None}
        request = self._tracer.start_span(
            f"{call.operation} {call.model}".rstrip(),
            context=self._context.extract(headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(call),
            start_time=at(call.began),
        )
        if request.is_recording():
            context = set_span_in_context(request)
            for name, began, ended in call.phases:
                self._tracer.start_span(name, context=context, start_time=at(began)).end(at(ended))
            line = call.line or {}
            if line.get("code") is not None and line["status"] >= 500:
                request.set_status(StatusCode.ERROR, line["code"])
        request.end(at(time.monotonic()))

    def close(self) -> None:
        """Export the last spans; give up those that a slow collector has not taken after `EXPORT_SECONDS`."""
        # The exporter's own limit is for each of up to four exports. A daemon thread does not hold up the process.
        ending = threading.Thread(target=self._provider.shutdown, name="exl-traces", daemon=True)
        ending.start()
        ending.join(EXPORT_SECONDS)
        if ending.is_alive():
            log.warning("the last spans were given up: the collector did not take them in %g s", EXPORT_SECONDS)


def _attributes(call: TracedRequest) -> dict[str, Any]:
    """Return the attributes of a request by the semantic conventions for generative AI and HTTP."""
    line = call.line or {"status": 499, "finish": "abort"}
    found: dict[str, Any] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "exl",
        "gen_ai.request.model": call.model,
        "gen_ai.response.finish_reasons": (line["finish"],),
        "gen_ai.usage.input_tokens": line.get("prompt_tokens"),
        "gen_ai.usage.cache_read.input_tokens": line.get("cached_tokens"),
        "gen_ai.usage.output_tokens": line.get("completion_tokens"),
        "error.type": line.get("code"),
        "http.request.method": call.scope["method"],
        "http.route": call.scope["path"],
        "http.response.status_code": line["status"],
        "exl.request.id": call.id,
    }
    return {name: value for name, value in found.items() if value is not None and value != ""}
