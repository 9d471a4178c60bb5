"""Ctrl-C at a terminal reaches every process of the foreground group: none of them shows a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from terminal import CTRL_C, Terminal

from exl_generate.bundled import default_model_dir

EXAMPLE = Path(__file__).parents[2] / "examples" / "streaming_chat.py"


def chat(model: str, *options: str) -> Terminal:
    return Terminal(sys.executable, "-m", "exl_generate", "chat", "-m", model, *options)


def test_ctrl_c_after_an_answer_ends_the_chat_quietly(chat_model: str) -> None:
    with chat(chat_model, "-n", "6", "--json") as terminal:
        terminal.until("> ")
        terminal.type(b"hello\n")
        terminal.until('"time_generate"')
        terminal.until("> ")
        code, shown = terminal.end(CTRL_C)
    assert code == 0
    assert "Traceback" not in shown
    assert "KeyboardInterrupt" not in shown


def test_ctrl_c_in_an_answer_leaves_the_template_process_alone(chat_model: str) -> None:
    """The conversation goes on with the process that it had."""
    with chat(chat_model, "-n", "1500", "--cache-tokens", "2048", "--seed", "1") as terminal:
        terminal.until("> ")
        terminal.type(b"import os\n")
        shown = terminal.until("\n")
        terminal.type(CTRL_C)
        shown += terminal.until("> ")
        terminal.type(b"/history\n")
        shown += terminal.until("user: import os")
        terminal.type(b"\n/quit\n")
        code, rest = terminal.end()
    assert code == 0
    assert "Traceback" not in shown + rest


@pytest.mark.parametrize("answered", [False, True])
def test_ctrl_c_ends_the_example_quietly(answered: bool) -> None:
    with Terminal(sys.executable, str(EXAMPLE), str(default_model_dir())) as terminal:
        terminal.type(b"Tell me a story about a fox.\n")
        shown = terminal.until("e")  # of the answer
        if answered:
            terminal.type(b"Thank you!\n")
            shown += terminal.until("\n")
        code, rest = terminal.end(CTRL_C)
    assert code == 130
    assert "Traceback" not in shown + rest
    assert "KeyboardInterrupt" not in shown + rest
