"""Traces of requests: their spans, sampling, the protocol, and that nothing is imported without them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from preloaded import run
from served import SECONDS, Served
from typer.testing import CliRunner

from exl_generate import bundled
from exl_generate.dynamic.times import JobTimes
from exl_serve.api import tracing
from exl_serve.api.tracing import Tracing
from exl_serve.cli import app
from exl_serve.config.model import ModelConfig, Otel
from exl_serve.engine import compiling
from exl_serve.testing.local import EngineThread
from exl_serve.testing.server import LiveServer
from exl_serve.testing.waiting import until

MODEL = ModelConfig(id="scripted", path=str(bundled.default_model_dir()))
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Traced = Callable[..., tuple[httpx.Client, Any]]


@pytest.fixture
def traced(scripted: EngineThread) -> Iterator[Traced]:
    """Starts a server whose spans an exporter in memory gets."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    made: list[LiveServer] = []

    def start(**config: Any) -> tuple[httpx.Client, Any]:
        exporter = memory.InMemorySpanExporter()
        live = LiveServer({"scripted": scripted}, [MODEL])
        made.append(live)
        assert live.state is not None
        live.state.tracing = Tracing(Otel(endpoint="http://127.0.0.1:9", **config), exporter)
        return httpx.Client(base_url=live.url, timeout=120), exporter

    yield start
    for live in made:
        live.close()


def complete(http: httpx.Client, **headers: str) -> int:
    body = {"prompt": "a secret prompt", "max_tokens": 4, "ignore_eos": True}
    return http.post("/v1/completions", json=body, headers=headers).status_code


def test_a_request_and_its_parts_are_spans_of_the_client_s_trace(traced: Traced) -> None:
    http, exporter = traced(service_name="mine")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a secret prompt"}], "max_tokens": 4}
    chat |= {"ignore_eos": True, "cache_salt": "no other test has it"}
    assert http.post("/v1/chat/completions", json=chat, headers=headers).status_code == 200
    until(lambda: len(exporter.get_finished_spans()) == 6)
    *parts, request = exporter.get_finished_spans()
    assert [one.name for one in parts] == ["admit", "tokenise", "queue", "prefill", "decode"]
    assert request.name == "chat scripted"
    assert request.resource.attributes["service.name"] == "mine"
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert {one.parent.span_id for one in parts} == {request.context.span_id}
    times = [moment for one in parts for moment in (one.start_time, one.end_time)]
    assert times == sorted(times)
    assert request.start_time == times[0]
    assert times[-1] <= request.end_time
    attributes = dict(request.attributes)
    assert attributes.pop("gen_ai.usage.input_tokens") > 0
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "exl",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 4,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "exl.request.id": "one",
    }


def test_counting_tokens_has_no_span(traced: Traced) -> None:
    http, exporter = traced()
    assert http.post("/v1/responses/input_tokens", json={"input": "a secret prompt"}).status_code == 200
    assert complete(http) == 200
    until(lambda: exporter.get_finished_spans())
    assert {one.name for one in exporter.get_finished_spans() if one.parent is None} == {"text_completion scripted"}


def spans_of(exporter: Any, count: int) -> dict[str, Any]:
    until(lambda: len(exporter.get_finished_spans()) == count)
    return {one.name: one for one in exporter.get_finished_spans()}


def seconds(span: Any) -> float:
    return float(span.end_time - span.start_time) / 1e9


def test_the_engine_s_spans_are_of_one_choice(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice waits while another decodes: the longest wait and the longest decoding are of two choices."""
    phases = iter([(0.01, 0.02, 9.0), (9.0, 0.03, 0.5)])
    monkeypatch.setattr(JobTimes, "phases", lambda _: next(phases))
    http, exporter = traced()
    body = {"prompt": ["a", "b"], "max_tokens": 4, "ignore_eos": True}
    told = http.post("/v1/completions", json=body, headers={"x-exl-debug": "1"}).json()["exl"]["timings"]
    assert (told["queue_seconds"], told["prefill_seconds"], told["generate_seconds"]) == (9.0, 0.03, 0.5)
    spans = spans_of(exporter, 6)
    assert [round(seconds(spans[name]), 3) for name in ("queue", "prefill", "decode")] == [9.0, 0.03, 0.5]
    assert spans["decode"].end_time <= spans["text_completion scripted"].end_time


def test_a_phase_of_a_microsecond_has_a_span(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobTimes, "phases", lambda _: (2e-6, 0.0, 3e-6))
    http, exporter = traced()
    assert complete(http) == 200
    assert set(spans_of(exporter, 5)) == {"admit", "tokenise", "queue", "decode", "text_completion scripted"}


def test_the_compilation_of_a_grammar_has_a_span_before_the_queue(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[float] = []

    def compile_slowly(*_: Any) -> list[Any]:
        time.sleep(0.2)
        compiled.append(time.time() * 1e9)  # clock: spans have times of the day
        return []

    monkeypatch.setattr(compiling, "compile_constraints", compile_slowly)
    http, exporter = traced()
    body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True, "regex_pattern": "[a-z]+"}
    assert http.post("/v1/completions", json=body).status_code == 200
    spans = spans_of(exporter, 7)
    assert seconds(spans["grammar"]) >= 0.2
    assert spans["queue"].start_time >= compiled[0] - 1_000_000  # two clocks are compared
    assert spans["decode"].end_time <= spans["text_completion scripted"].end_time


def test_a_collector_that_does_not_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.1)
    answers, ended = threading.Event(), threading.Event()

    class Exporter(memory.InMemorySpanExporter):  # type: ignore[name-defined]
        def shutdown(self) -> None:
            answers.wait(120)
            ended.set()

    Tracing(Otel(endpoint="http://127.0.0.1:9"), Exporter()).close()
    assert not ended.is_set(), "the end waited for the collector"
    answers.set()
    assert ended.wait(120), "the last spans were not exported"


def test_a_refused_request_has_a_span_with_its_error(traced: Traced) -> None:
    http, exporter = traced()
    assert http.post("/v1/completions", json={"prompt": "a", "model": "nowhere"}).status_code == 404
    assert http.get("/v1/models").status_code == 200  # asks for no answer
    until(lambda: len(exporter.get_finished_spans()) == 1)
    (request,) = exporter.get_finished_spans()
    assert (request.name, request.attributes["error.type"]) == ("text_completion", "model_not_found")
    assert request.attributes["http.response.status_code"] == 404


def test_the_sender_decides_and_else_the_ratio(traced: Traced) -> None:
    http, exporter = traced(ratio=0.0)
    assert complete(http) == 200
    assert complete(http, traceparent=f"00-{TRACE}-{PARENT}-00") == 200
    assert complete(http, traceparent="not a context") == 200
    assert complete(http, traceparent=f"00-{TRACE}-{PARENT}-01") == 200
    until(lambda: len(exporter.get_finished_spans()) == 6)
    assert {f"{one.context.trace_id:032x}" for one in exporter.get_finished_spans()} == {TRACE}


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An endpoint that keeps the bodies of what it is sent."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", bodies
        server.shutdown()
        thread.join()


def test_spans_of_the_command_reach_a_collector_without_content(served: Callable[..., Served], tmp_path: Path) -> None:
    """A server that stops sends the last spans."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (url, bodies):
        config = f'otel.endpoint = "{url}"\ndrain.delay = 0\n[[model]]\nid = "scripted"\npath = "{MODEL.path}"\n'
        (tmp_path / "serve.toml").write_text(f'{config}device = "cpu"\nengine = "free"\n')
        server = served("--config", str(tmp_path / "serve.toml")).up()
        assert server.complete(prompt="a secret prompt").status_code == 200
        server.process.terminate()
        assert server.process.wait(SECONDS) == 0, server.log
        (body,) = bodies
        (told,) = ExportTraceServiceRequest.FromString(body).resource_spans
        names = [span.name for scope in told.scope_spans for span in scope.spans]
        assert sorted(names) == ["admit", "decode", "prefill", "queue", "text_completion scripted", "tokenise"]
        assert b"secret" not in body


def test_without_traces_nothing_of_them_is_imported() -> None:
    program = "import exl_serve.api.__main__, sys; print([n for n in sys.modules if n.startswith('opentelemetry')])"
    done = run(["-c", program])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    ("endpoint", "says"), [("localhost:4318", "must be a URL"), ("http://x/v1/traces", "packages/exl-serve[otel]")]
)
def test_an_endpoint_that_cannot_be_used_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, says: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    done = CliRunner().invoke(app, ["--port", "0", "--set", f"otel.endpoint={endpoint}"])
    assert done.exit_code == 1
    assert says in done.output
