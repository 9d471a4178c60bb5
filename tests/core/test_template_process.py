"""The process that renders chat templates answers correctly under interrupts, forks and odd sys.path entries."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from interrupting import interrupted_at
from vision_models import write_tokenizer

from exl_core import ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_core.errors import ChatTemplateError
from exl_core.tokenizer import sandbox

pytestmark = pytest.mark.covers("core: token-text")

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.fixture
def tokenizer(lab: Any) -> ExLlamaV2Tokenizer:
    folder = lab.write()
    write_tokenizer(folder)
    return ExLlamaV2Tokenizer(ExLlamaV2Config(folder))


def render(tokenizer: ExLlamaV2Tokenizer, text: str) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], chat_template=TEMPLATE)


def test_a_ctrl_c_leaves_no_answer_for_the_next_conversation(tokenizer: ExLlamaV2Tokenizer) -> None:
    """Wherever it comes: the next prompt is made of its own messages, and no process is lost."""
    struck = 0
    for moment in range(1, 2000):
        text = f"conversation {moment}"
        assert render(tokenizer, text) == f"[{text}]"  # the process runs
        try:
            with interrupted_at(moment) as hit:
                render(tokenizer, "interrupted")
        except (KeyboardInterrupt, RuntimeError):  # the second is what `threading` makes of some
            struck += 1
        assert render(tokenizer, text) == f"[{text}]"
        if not hit:
            break
    assert struck > 15
    for _ in range(60_000):
        if not sandbox.pool.busy:
            break
        time.sleep(0.001)
    assert not sandbox.pool.busy, "a process is lost"


def test_a_process_that_was_ended_from_outside_is_replaced(
    tokenizer: ExLlamaV2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a request meets it before its end is noticed."""
    started: list[Any] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

        def poll(self) -> int | None:
            return None  # its end is never noticed in time

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(sandbox, "pool", sandbox.TemplatePool(1))
    assert render(tokenizer, "first") == "[first]"
    subprocess.Popen.kill(started[0])
    started[0].wait()
    assert render(tokenizer, "second") == "[second]"
    assert len(started) == 2
    sandbox.pool.end()


def test_a_template_that_ends_its_process_does_not_run_again(
    tokenizer: ExLlamaV2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time stays limited."""
    short = 0.3  # seconds that a template may take
    monkeypatch.setattr(sandbox, "pool", sandbox.TemplatePool(1))
    assert render(tokenizer, "first") == "[first]"
    monkeypatch.setattr(sandbox, "SECONDS", short)
    started: list[Any] = []
    start = subprocess.Popen.__init__
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *args, **options: started.append(start(*args, **options)))
    endless = "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ChatTemplateError, match=r"more than 0\.3 seconds"):
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=endless)
    assert not started
    sandbox.pool.end()


def test_threads_that_cannot_be_started(tokenizer: ExLlamaV2Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is typed where no thread serves templates; else those that run serve all requests."""

    class Thread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sandbox, "pool", sandbox.TemplatePool(2))
    with monkeypatch.context() as full:
        full.setattr(sandbox.threading, "Thread", Thread)
        with pytest.raises(ChatTemplateError, match="no thread"):
            render(tokenizer, "a")
    assert render(tokenizer, "b") == "[b]"
    with monkeypatch.context() as full:
        full.setattr(sandbox.threading, "Thread", Thread)
        assert [render(tokenizer, text) for text in "cd"] == ["[c]", "[d]"]


def run(code: str) -> None:
    """In an interpreter of its own."""
    path = os.pathsep.join(place for place in sys.path if isinstance(place, str))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env={**os.environ, "PYTHONPATH": path})


def test_entries_of_sys_path_that_are_no_text_are_skipped() -> None:
    """Python passes over a Path there, too."""
    run("""
import sys
from pathlib import Path
from exl_core.tokenizer.sandbox import render
sys.path.insert(0, Path("nowhere"))
assert render("{{ x }}", [], {"x": "y"}) == "y"
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_process_of_its_own() -> None:
    """Also where a thread that stayed with the parent was rendering: the child would wait for it for ever."""
    run("""
import os, threading
from exl_core.tokenizer import sandbox
def show(source):
    return sandbox.render(source, [], {})
assert show("parent") == "parent"
slow = "{% for i in range(400) %}{% for j in range(400) %}{% endfor %}{% endfor %}done"
rendering = [threading.Thread(target=show, args=(slow,)) for _ in range(4)]
for thread in rendering:
    thread.start()
child = os.fork()
if not child:
    os._exit(show("child") != "child")
assert os.waitpid(child, 0)[1] == 0
for thread in rendering:
    thread.join()
assert show("parent") == "parent"
""")
