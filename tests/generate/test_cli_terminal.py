"""`exl chat` on a pseudo-terminal: keys, history, styles.

Ctrl-C at a terminal reaches every process of the foreground group: none of them shows a traceback.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from terminal import CTRL_C, Terminal

from exl_generate.bundled import default_model_dir

EXAMPLE = Path(__file__).parents[2] / "examples" / "streaming_chat.py"
BUNDLED = str(default_model_dir())
# No reports of the cursor's place: the terminal of the tests does not answer.
XTERM = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
COLOUR = re.compile(r"\x1b\[[\d;]*\b(3[0-7]|38;5;\d+)\b[\d;]*m")


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the input history."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return tmp_path / "state" / "exl"


def chat(model: str, *options: str, **env: str) -> Terminal:
    """A chat. The end of its interpreter is left out."""
    return Terminal("-m", "exl_generate", "chat", "-m", model, *options, env=env, torn_down=False)


def bundled_chat(*options: str, **env: str) -> Terminal:
    """A chat with the bundled model."""
    return chat(BUNDLED, *options, **env)


def test_ctrl_c_after_an_answer_ends_the_chat_quietly(chat_model: str) -> None:
    with Terminal("-m", "exl_generate", "chat", "-m", chat_model, "-n", "6", "--json") as terminal:
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
        shown = terminal.until("import os\r\r\n")
        shown += terminal.until("\n")  # of the answer
        terminal.type(CTRL_C)
        shown += terminal.until("> ")
        terminal.type(b"/history\n")
        shown += terminal.until("user: import os")
        terminal.type(b"\n/quit\n")
        code, rest = terminal.end()
    assert code == 0
    assert "Traceback" not in shown + rest


@pytest.mark.parametrize(
    ("answered", "fresh"),
    [
        pytest.param(False, True, marks=pytest.mark.full),
        pytest.param(True, True, marks=pytest.mark.full),
        (True, False),
    ],
)
def test_ctrl_c_ends_the_example_quietly(answered: bool, fresh: bool) -> None:
    with Terminal(str(EXAMPLE), str(default_model_dir()), fresh=fresh) as terminal:
        shown = ""
        if answered:
            terminal.type(b"Thank you!\n")
            shown += terminal.until("\n")  # after an answer of one line
        terminal.type(b"Tell me a story about a fox.\n")
        shown += terminal.until("e")  # of the answer: a program that begins to wait for keys may miss Ctrl-C
        code, rest = terminal.end(CTRL_C)
    assert code == 130
    assert "Traceback" not in shown + rest
    assert "KeyboardInterrupt" not in shown + rest


def test_ctrl_c_drops_what_was_typed(chat_model: str) -> None:
    with chat(chat_model, "-n", "6", "--json", **XTERM) as terminal:
        terminal.until("> ")
        terminal.type(b"never sent")
        terminal.until("never sent")
        terminal.type(CTRL_C + b"hello\r")
        terminal.until('"message": "hello"')
        terminal.until('"time_generate"')  # the model's answer may hold "> " too
        terminal.until("> ")
        code, _ = terminal.end(CTRL_C)
    assert code == 0


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(b"one\\\ntwo\x1b\nthree\n", id="backslash and Alt-Enter"),
        pytest.param(b'"""one\ntwo\nthree"""\n', id="quotes"),
        pytest.param(b'"""\none\ntwo\nthree\n"""\n', id="quotes on lines of their own", marks=pytest.mark.full),
    ],
)
def test_a_message_has_several_lines(keys: bytes) -> None:
    with bundled_chat("-n", "2", "--json", **XTERM) as terminal:
        terminal.until("> ")
        terminal.type(keys.replace(b"\n", b"\r"))
        shown = terminal.until("}")
        terminal.until("> ")
        code, _ = terminal.end(b"\x04")
    assert code == 0
    assert json.loads(shown[shown.rindex("{") :])["message"] == "one\ntwo\nthree"


def test_typed_messages_are_recalled_in_the_next_session(state: Path) -> None:
    options = ("-n", "2", "--json")
    with bundled_chat(*options, **XTERM) as terminal:
        terminal.until("> ")
        terminal.type(b"remember me\r")
        terminal.until("}")
        terminal.until("> ")
        assert terminal.end(b"/quit\r")[0] == 0
    file = state / "chat_history"
    assert file.stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    assert "+remember me" in file.read_text()
    up = b"\x1b[A"
    with bundled_chat(*options, **XTERM) as terminal:
        terminal.until("> ")
        terminal.type(up + up + b"\r")
        assert '"message": "remember me"' in terminal.until("}")
        terminal.until("> ")
        assert terminal.end(b"\x04")[0] == 0


def test_the_history_of_messages_can_be_left_out(state: Path) -> None:
    with bundled_chat("-n", "2", "--no-input-history") as terminal:
        terminal.until("> ")
        terminal.type(b"forget me\n")
        assert "\x1b" not in terminal.until("tokens/s"), "the terminal is dumb"
        assert terminal.end(b"/quit\n")[0] == 0
    assert not state.exists()


def test_a_history_that_cannot_be_kept_is_noted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with bundled_chat("-n", "2", XDG_STATE_HOME=str(tmp_path / "file")) as terminal:
        assert "the input history is not kept (Not a directory)" in terminal.until("> ")
        terminal.type(b"hello\n")
        terminal.until("tokens/s")
        assert terminal.end(b"/quit\n")[0] == 0


@pytest.mark.full  # tests/docs/test_chat_screens.py has the widths of the guide
def test_answers_are_wrapped_at_the_width_of_the_terminal() -> None:
    with bundled_chat("-n", "120", "--seed", "3", COLUMNS="40") as terminal:
        terminal.until("> ")
        terminal.type(b"Tell me a long story.\n")
        terminal.until("story.\r\r\n")
        answer = terminal.until("\n[").removesuffix("[")
        terminal.until("> ")
        assert terminal.end(b"/quit\n")[0] == 0
    lines = answer.splitlines()
    assert len(lines) > 5
    assert max(map(cell_len, lines)) in range(30, 41)


@pytest.mark.parametrize(
    ("env", "escapes", "colours"),
    [
        pytest.param({"TERM": "dumb"}, False, False, id="dumb", marks=pytest.mark.full),
        pytest.param(XTERM, True, True, id="colours"),
        pytest.param({**XTERM, "NO_COLOR": "1"}, True, False, id="NO_COLOR"),
    ],
)
def test_colours_are_for_terminals_that_have_them(env: dict[str, str], escapes: bool, colours: bool) -> None:
    with bundled_chat("-n", "4", **env) as terminal:
        shown = terminal.until("> ")
        terminal.type(b"hello\r")
        shown += terminal.until("tokens/s")
        shown += terminal.until("> ")
        terminal.type(b"/unknown\r")
        shown += terminal.until("/help lists")
        code, rest = terminal.end(b"/quit\r")
    assert code == 0
    shown += rest
    assert ("\x1b" in shown) == escapes
    assert bool(COLOUR.search(shown)) == colours
