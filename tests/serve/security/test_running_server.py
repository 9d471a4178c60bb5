"""A running `exl serve`: its files, log lines, headers and descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import SECONDS, Served, processor_seconds

from exl_generate import bundled
from exl_serve.api.app import ROUTES
from exl_serve.testing.waiting import until

FAILURES = 60
KEY, INFER_KEY, WRONG = (f"exl-{letter * 43}" for letter in "kiw")
MODEL = f'[[model]]\nid = "free"\npath = "{bundled.default_model_dir()}"\ndevice = "cpu"\nengine = "free"\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def keyed(place: Path) -> Iterator[Served]:
    """A server with a key, its most talkative log, and temporary files of its own."""
    keys, config = place / "keys.toml", place / "serve.toml"
    keys.touch(0o600)
    keys.write_text(
        f'[[key]]\nname = "one"\nkey = "{KEY}"\nscopes = ["infer", "admin", "metrics"]\n'
        f'[[key]]\nname = "two"\nkey = "{INFER_KEY}"\nscopes = ["infer"]\n'
    )
    auth = f'auth.key_file = "{keys}"\nauth.max_failures_per_minute = {FAILURES}\n'
    config.write_text(f'{auth}log.level = "debug"\nlog.format = "json"\n{MODEL}')
    (place / "tmp").mkdir()
    options = ("--config", str(config), "--trusted-proxy", "127.0.0.0/8", "--trusted-proxy", "::1")
    server = Served(*options, environment={"TMPDIR": str(place / "tmp")}).up()
    yield server
    server.close()


def ask(server: Served, path: str, body: Any = None, key: str = KEY, **headers: str) -> httpx.Response:
    given = {"x-api-key": key, **headers}
    return httpx.request(
        "GET" if body is None else "POST", server.url + path, json=body, headers=given, timeout=SECONDS
    )


def raw(server: Served, data: bytes) -> bytes:
    """The whole answer to these bytes."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=SECONDS) as connection:
        connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
        return answer


def test_wrong_keys_count_for_a_client_behind_a_proxy_and_right_ones_pass(keyed: Served) -> None:
    def by(client: str, key: str) -> int:
        headers = {"x-api-key": key, "x-forwarded-for": f"198.51.100.9, {client}"}
        return connection.get("/v1/models", headers=headers).status_code

    with httpx.Client(base_url=keyed.url, timeout=SECONDS) as connection:
        assert {by("203.0.113.5", WRONG) for _ in range(FAILURES)} == {401}
        assert [by(client, WRONG) for client in ("203.0.113.5", "203.0.113.6", "198.51.100.9")] == [429, 401, 401]
        assert by("203.0.113.5", KEY) == 200


def test_sockets_and_files_are_their_owners(keyed: Served, place: Path) -> None:
    folders = [one for one in (place / "tmp").iterdir() if one.name.startswith("exl-serve-")]
    assert [stat.S_IMODE(one.stat().st_mode) for one in folders] == [0o700]
    assert any(one.is_socket() for one in folders[0].iterdir())
    assert any(one.is_file() for one in folders[0].iterdir()), "the status page"
    assert ask(keyed, "/v1/models").status_code == 200


def test_answers_name_no_server_and_no_path(keyed: Served) -> None:
    answers = [ask(keyed, path) for path in ("/", "/v1/models", "/nothing", "/version", "/health")]
    answers.append(ask(keyed, "/v1/completions", {"prompt": 5}))
    for answer in answers:
        assert not {"server", "x-powered-by", "via"} & set(answer.headers), answer.headers
        assert str(bundled.default_model_dir()) not in answer.text
        assert "Traceback" not in answer.text
    for data in (
        b"\0\0\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"a: " + b"x" * (17 << 10) + b"\r\n\r\n",
    ):
        assert b"uvicorn" not in raw(keyed, data).lower()


def test_the_limits_of_headers_hold_in_the_server(keyed: Served) -> None:
    many = b"".join(b"x-%d: 1\r\n" % i for i in range(200))
    assert raw(keyed, b"GET /ping HTTP/1.1\r\nhost: 127.0.0.1\r\n" + many + b"\r\n").startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("mine.1_2-3", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("../../etc/passwd", False),
        ("http://127.0.0.1:1/x", False),
        ("a b", False),
        ("a;b", False),
        ("\xe9", False),
    ],
)
def test_only_plain_request_ids_are_repeated(keyed: Served, given: str, kept: bool) -> None:
    answer = httpx.get(f"{keyed.url}/ping", headers={b"x-request-id": given.encode("latin-1")}, timeout=SECONDS)
    assert (answer.headers["x-request-id"] == given) == kept
    assert kept or answer.headers["x-request-id"].startswith("req-")


def test_every_route_but_the_open_ones_needs_a_key(keyed: Served) -> None:
    for route in ROUTES:
        url = keyed.url + re.sub(r"\{.*?\}", "x", route.path)
        tries: tuple[dict[str, str], ...] = ({}, {"x-api-key": WRONG}, {"authorization": f"Bearer {INFER_KEY}"})
        without, wrong, status = (
            httpx.request(route.method, url, headers=headers, timeout=SECONDS).status_code for headers in tries
        )
        if route.scope == "open":
            assert (without, wrong) == (200, 200), route
            continue
        assert (without, wrong) == (401, 401), route
        assert (status == 403) == (route.scope not in ("infer", "own")), route


def test_text_of_clients_begins_no_line_of_the_log_and_keys_are_in_none(keyed: Served) -> None:
    forged = "\n[ERROR] forged by a client\n\x1b[31m\r"
    body = {"prompt": "a secret prompt", "max_tokens": 2, "user": forged, "stop": forged}
    assert ask(keyed, "/v1/completions", body).status_code == 200
    assert ask(keyed, "/v1/completions", body | {"model": forged}).status_code == 404
    assert ask(keyed, "/v1/load_lora_adapter", {"lora_name": forged, "lora_path": forged}).status_code in (400, 403)
    assert ask(keyed, "/%0a[ERROR]%20forged%20by%20a%20client", key=WRONG).status_code == 404
    assert ask(keyed, "/v1/models", key=WRONG).status_code == 401
    assert ask(keyed, "/v1/models", authorization=f"Basic {WRONG}", key="").status_code == 401
    assert raw(keyed, f"GET /\x00{WRONG} HTTP/1.1\r\nx-api-key: {WRONG}\r\n\r\n".encode()).startswith(b"HTTP/1.1 400")
    until(lambda: any('"status"' in line for line in keyed.lines), lambda: keyed.log)
    assert not [line for line in keyed.lines if "forged" in line and not line.startswith("{")]
    for line in keyed.lines:
        if line.startswith("{"):
            json.loads(line)
    for text in (KEY, INFER_KEY, WRONG, "a secret prompt"):
        assert text not in keyed.log
        for process in (keyed.process.pid, *keyed.children("exl_serve.api"), *keyed.children("exl_serve.engine")):
            for file in ("cmdline", "environ"):
                assert text.encode() not in Path(f"/proc/{process}/{file}").read_bytes()


@pytest.mark.full
def test_text_of_clients_begins_no_line_of_a_terminals_log(served: Callable[..., Served]) -> None:
    server = served("--set", "log.format=text").up()
    assert server.complete().status_code == 200
    assert server.get("/%0aforged%1b[31m") == 404
    until(lambda: "forged" in server.log, lambda: server.log)
    assert re.search(r"^[0-9:]{8} 200 fable-10m length: 3 \(0 cached\) \+ 4 tokens in", server.log, re.MULTILINE)
    (line,) = [line for line in server.lines if "forged" in line]
    assert line[8:] == " 404 GET /\\nforged\\x1b[31m: not_found\n"


def test_without_descriptors_nothing_turns_and_the_server_recovers(
    served: Callable[..., Served], tmp_path: Path
) -> None:
    """The process has fewer descriptors than clients have connections."""
    (tmp_path / "serve.toml").write_text(f"server.limits.max_connections_per_address = 10000\n{MODEL}")
    server = served("--config", str(tmp_path / "serve.toml"), descriptors=100).up()
    assert "100 open files are allowed" in server.log
    (worker,) = server.children("exl_serve.api")
    port = int(server.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SECONDS))
        until(lambda: len(os.listdir(f"/proc/{worker}/fd")) >= 95)
        before = processor_seconds(worker)
        time.sleep(2)  # a loop that turns would take more of it than half a second, other work only less
        assert processor_seconds(worker) - before < 0.5
        assert server.children("exl_serve.api") == [worker]
    until(lambda: server.get("/health/ready") == 200, lambda: server.log)
    assert server.complete().status_code == 200
