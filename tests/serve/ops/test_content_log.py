"""The content log through the public command: a file of its own, that only its owner can read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import SECONDS, Served
from typer.testing import CliRunner

from exl_generate import bundled
from exl_serve.cli import app
from exl_serve.testing.waiting import until

GUIDE = (Path(__file__).resolve().parents[3] / "docs/guides/serving.md").read_text(encoding="utf-8")
MODEL = f'[[model]]\nid = "free"\npath = "{bundled.default_model_dir()}"\ndevice = "cpu"\nengine = "free"\n'
KEY = f"exl-{'c' * 43}"
SECRET = "a secret of the client"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("content")


@pytest.fixture(scope="module")
def keyed(place: Path) -> Iterator[Served]:
    """A server with two workers that logs content, and everything else that it can log."""
    (place / "keys.toml").touch(0o600)
    (place / "keys.toml").write_text(f'[[key]]\nname = "one"\nkey = "{KEY}"\n')
    config = (
        f'auth.key_file = "{place / "keys.toml"}"\nlog.level = "debug"\nlog.content = "{place / "content.jsonl"}"\n'
    )
    (place / "serve.toml").write_text(f"{config}server.workers = 2\n{MODEL}")
    # The guide's command, with this configuration in place of its model.
    (command,) = re.findall(r"^exl serve -m DIR (.*log\.content.*)$", GUIDE, re.MULTILINE)
    options = command.replace("content.jsonl", str(place / "content.jsonl"))
    server = Served("--config", str(place / "serve.toml"), *shlex.split(options)).up()
    yield server
    server.close()


def ask(server: Served, path: str, body: Any, id: str) -> httpx.Response:
    headers = {"x-api-key": KEY, "x-request-id": id}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=SECONDS)


def line_of(file: Path, id: str) -> dict[str, Any]:
    """The line of a request. It is written when the client has its answer."""

    def found() -> list[dict[str, Any]]:
        whole, _, _ = file.read_text().rpartition("\n")
        lines = map(json.loads, whole.splitlines())
        return [line for line in lines if line["id"] == id]

    until(lambda: bool(file.exists() and found()), lambda: id)
    (line,) = found()
    return line


def streamed(answer: httpx.Response) -> str:
    """The text of a streamed chat."""
    events = map(json.loads, re.findall(r"^data: (\{.*\})$", answer.text, re.MULTILINE))
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def test_a_line_holds_the_request_and_what_the_client_got(keyed: Served, place: Path) -> None:
    file = place / "content.jsonl"
    body = {"prompt": f"{SECRET} \n\u2028é", "max_tokens": 5, "n": 2, "ignore_eos": True}
    answer = ask(keyed, "/v1/completions", body, "whole")
    line = line_of(file, "whole")
    assert (line["request"], line["route"], line["key"], line["model"]) == (body, "/v1/completions", "one", "free")
    assert (line["status"], line["finish"], line["code"]) == (200, "length", None)
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert [one["text"] for one in line["answers"]] == texts
    assert all(texts)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "stream": True, "ignore_eos": True}
    answer = ask(keyed, "/v1/chat/completions", chat, "streamed")
    line = line_of(file, "streamed")
    assert line["request"] == chat
    assert line["answers"][0]["text"] == streamed(answer) != ""

    answer = ask(keyed, "/v1/responses", {"input": SECRET, "max_output_tokens": 5}, "response")
    assert line_of(file, "response")["answers"] == answer.json()["output"] != []


@pytest.mark.parametrize("shape", ["short", "long"])
def test_a_long_image_is_logged_as_its_type_length_and_digest(keyed: Served, place: Path, shape: str) -> None:
    url = "data:image/png;base64," + "A" * (200_000 if shape == "long" else 2_000)
    body: Any = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    assert ask(keyed, "/v1/chat/completions", body, shape).status_code == 400  # the model takes none
    if shape == "long":
        digest = hashlib.sha256(url.encode()).hexdigest()
        body["messages"][0]["content"][0]["image_url"]["url"] = {
            "type": "image/png",
            "length": len(url),
            "sha256": digest,
        }
    assert line_of(place / "content.jsonl", shape)["request"] == body


def test_refused_requests_have_lines_and_other_routes_have_none(keyed: Served, place: Path) -> None:
    assert ask(keyed, "/tokenize", {"prompt": SECRET}, "tokenized").status_code == 200
    assert ask(keyed, "/v1/responses/input_tokens", {"input": SECRET}, "counted").status_code == 200
    assert ask(keyed, "/v1/completions", {"prompt": SECRET, "model": "nowhere"}, "refused").status_code == 404
    line = line_of(place / "content.jsonl", "refused")
    assert (line["status"], line["finish"], line["code"], line["answers"]) == (404, "rejected", "model_not_found", [])
    assert line["request"]["prompt"] == SECRET
    written = (place / "content.jsonl").read_text()
    assert not [id for id in ("tokenized", "counted") if f'"{id}"' in written]


def test_content_is_in_its_file_alone(keyed: Served, place: Path) -> None:
    chat = {"messages": [{"role": "user", "content": SECRET}], "ignore_eos": True}
    asked: dict[str, tuple[str, dict[str, Any], int]] = {
        "plain": ("/v1/completions", {"prompt": SECRET, "ignore_eos": True, "max_tokens": 40}, 200),
        "stream": ("/v1/chat/completions", {**chat, "max_tokens": 40, "stream": True}, 200),
        "items": ("/v1/responses", {"input": SECRET, "max_output_tokens": 40}, 200),
        "roles": ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}, 400),
    }
    told = []
    for id, (path, body, status) in asked.items():
        assert ask(keyed, path, body, id).status_code == status
        told += [text for one in line_of(place / "content.jsonl", id)["answers"] for text in texts_of(one)]
        until(lambda id=id: f'"id": "{id}"' in keyed.log, lambda: keyed.log)  # type: ignore[misc]
    assert len(told) == 3
    assert all(len(text) > 20 for text in told)
    # JSON escapes characters, so words are looked for as well.
    assert not [text for text in (SECRET, *told) if text in keyed.log or json.dumps(text)[1:-1] in keyed.log]
    assert f"prompts and answers are written to {place / 'content.jsonl'}" in keyed.log
    assert KEY not in (place / "content.jsonl").read_text()


def texts_of(answer: dict[str, Any]) -> list[str]:
    """The texts of one of a line's answers: a choice, or an item of a response."""
    return [answer["text"]] if "text" in answer else [part["text"] for part in answer.get("content", [])]


def test_a_file_that_becomes_unsafe_gets_no_more_lines(keyed: Served, place: Path) -> None:
    file = place / "content.jsonl"
    assert ask(keyed, "/v1/completions", {"prompt": "Once", "max_tokens": 2}, "before").status_code == 200
    line_of(file, "before")
    file.chmod(0o644)
    size = file.stat().st_size
    assert ask(keyed, "/v1/completions", {"prompt": SECRET, "max_tokens": 2}, "unsafe").status_code == 200
    until(lambda: "request unsafe: its content was not logged" in keyed.log, lambda: keyed.log)
    assert f"has mode 0644; it must be 0600: chmod 600 {file}" in keyed.log
    assert file.stat().st_size == size
    file.rename(place / "rotated")  # the next line makes a new file
    assert ask(keyed, "/v1/completions", {"prompt": "Once", "max_tokens": 2}, "after").status_code == 200
    assert line_of(file, "after")["status"] == 200
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_unsafe_file_stops_no_worker_and_no_reload(tmp_path: Path, served: Callable[..., Served]) -> None:
    file, config = tmp_path / "content.jsonl", tmp_path / "serve.toml"
    config.write_text(f'log.content = "{file}"\n{MODEL}')
    server = served("--config", str(config)).up()
    assert server.complete().status_code == 200
    until(file.exists)
    file.chmod(0o644)
    (worker,) = server.children("exl_serve.api")
    os.kill(worker, signal.SIGKILL)
    until(lambda: server.children("exl_serve.api") not in ([], [worker]), lambda: server.log)
    until(lambda: server.get("/health/ready") == 200, lambda: server.log)
    size = file.stat().st_size
    assert [server.complete().status_code for _ in range(3)] == [200] * 3
    until(lambda: "its content was not logged" in server.log, lambda: server.log)
    config.write_text(f'log.content = "{file}"\nserver.limits.max_plain_body_bytes = 1024\n{MODEL}')
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.complete(prompt="a" * 2000).status_code == 413, lambda: server.log)
    assert server.log.count("its content was not logged") == 1
    assert file.stat().st_size == size


def refusal(file: Path) -> str:
    """The error of the command, which does not start with this file."""
    done = CliRunner().invoke(app, ["--port", "0", "--set", f"log.content={file}"])
    assert done.exit_code == 1, done.output
    return done.output


@pytest.mark.parametrize("kind", ["mode", "link", "dangling", "hard link", "pipe", "folder", "nowhere"])
def test_a_file_that_others_could_read_is_refused_at_the_start(tmp_path: Path, kind: str) -> None:
    file, other = tmp_path / "content.jsonl", tmp_path / "other"
    if kind != "dangling":
        other.touch(0o600)
    if kind == "mode":
        file.touch(0o600)
        file.chmod(0o640)
    elif kind in ("link", "dangling"):
        file.symlink_to(other)
    elif kind == "hard link":
        file.hardlink_to(other)
    elif kind == "pipe":
        os.mkfifo(file, 0o600)
    elif kind == "folder":
        file.mkdir(0o600)
    elif kind == "nowhere":
        file = tmp_path / "missing" / "content.jsonl"
    says = {
        "mode": f"has mode 0640; it must be 0600: chmod 600 {file}",
        "link": "is a symbolic link: name the file itself",
        "dangling": "is a symbolic link: name the file itself",
        "hard link": "is one of 2 hard links to a file: name another one",
        "pipe": "is not a regular file: name another one",
        "folder": "is not a regular file: name another one",
        "nowhere": f"there is no folder {file.parent}: create it",
    }
    assert says[kind] in refusal(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "content.jsonl"
    file.touch(0o600)
    os.chown(file, 12345, -1)
    assert f"belongs to user 12345, and the server runs as user {os.geteuid()}" in refusal(file)
