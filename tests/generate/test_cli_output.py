"""Input and output of the `exl` command: pipes, full disks, cut output, numbers, the default model."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import Program

from exl_generate.bundled import default_model_dir

pytestmark = pytest.mark.sampled(2)

MODEL = str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5")
BUNDLED = str(default_model_dir())
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture
def schema() -> str:
    pytest.importorskip("llguidance", reason="the grammar extra of exl-filters is optional")
    return json.dumps(AGE)


# ---- standard input ----


@pytest.mark.parametrize(
    ("typed", "prompt"),
    [("a\n", "a"), ("a\r\n", "a"), ("a", "a"), ("a\n\n", "a\n"), ("\na\n", "\na"), ("a \n", "a "), ("a\r", "a\r")],
)
def test_a_piped_prompt_loses_its_last_line_break(exl, typed: str, prompt: str) -> None:
    code, out, _ = exl("generate", "-", "-m", MODEL, "-n", "2", "--json", stdin=typed)
    assert code == 0
    assert json.loads(out)["prompt"] == prompt


def test_a_prompt_of_the_command_line_is_taken_as_it_is(exl) -> None:
    assert json.loads(exl("generate", "a\n", "-m", MODEL, "-n", "2", "--json")[1])["prompt"] == "a\n"


# ---- standard output ----


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["generate", "Once", "-n", "4", "-m", BUNDLED], ["info", BUNDLED], ["--help"]])
def test_a_full_disk_is_one_line_for_a_fresh_interpreter(arguments: list[str], buffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "exl_generate", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": buffered},
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "exl: cannot write the output: No space left on device [output]\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("arguments", [["generate", "Once", "-n", "4", "-m", BUNDLED], ["info", BUNDLED]])
def test_a_full_disk_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, (tmp_path / "errors").open("wb") as errors:
        program = Program(["-m", "exl_generate", *arguments], (errors.fileno(), full.fileno(), errors.fileno()))
    assert program.wait() == 1
    told = (tmp_path / "errors").read_text()
    assert told == "exl: cannot write the output: No space left on device [output]\n"


def with_closed(streams: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with standard streams closed as a shell does it: "<&-", ">&-", "2>&-"."""
    command = shlex.join([sys.executable, "-m", "exl_generate", *arguments])
    return subprocess.run(["sh", "-c", f"{command} {streams}"], capture_output=True, text=True, check=False)


ONCE = ("Once", "-n", "4", "--seed", "1", "-m", BUNDLED)


@pytest.mark.parametrize("arguments", [("generate", *ONCE), ("generate", "--json", *ONCE), ("info", BUNDLED)])
def test_a_closed_output_is_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as errors:
        program = Program(["-m", "exl_generate", *arguments], (errors.fileno(), -1, errors.fileno()))
    assert program.wait() == 1
    told = (tmp_path / "errors").read_text()
    assert told.splitlines()[-1] == "exl: cannot write the output: Bad file descriptor [output]"
    assert "Traceback" not in told


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize("arguments", [("generate", *ONCE), ("generate", "--json", *ONCE), ("info", BUNDLED)])
def test_an_output_that_the_shell_closed_is_one_line(arguments: tuple[str, ...]) -> None:
    done = with_closed(">&-", *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "exl: cannot write the output: Bad file descriptor [output]"
    assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
def test_closed_errors_leave_the_output_as_it_is() -> None:
    done = with_closed("2>&-", "generate", *ONCE)
    whole = with_closed("", "generate", *ONCE)
    assert (done.returncode, done.stdout) == (0, whole.stdout)
    assert done.stdout.startswith("Once")


def test_a_closed_input_is_empty(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w+b") as output, (tmp_path / "errors").open("wb") as errors:
        program = Program(["-m", "exl_generate", "chat", "-m", BUNDLED], (-1, output.fileno(), errors.fileno()))
        assert (program.wait(), output.read()) == (0, b"")


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
def test_an_input_that_the_shell_closed_is_empty() -> None:
    done = with_closed("<&-", "chat", "-m", BUNDLED)
    assert (done.returncode, done.stdout) == (0, "")


def test_errors_about_files_keep_their_traceback(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not about the output, and nobody foresaw them."""
    from exl_generate.cli import generate as command

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "some file")

    monkeypatch.setattr(command, "run", fail)
    with pytest.raises(OSError, match="some file"):
        exl("generate", "x")


# ---- output that is cut ----


def test_json_that_the_limit_cuts_is_an_error(exl, schema: str) -> None:
    common = ("generate", "A record:", "--json-schema", schema, "--seed", "1", "-m", BUNDLED)
    code, out, err = exl(*common, "-n", "3")
    assert code == 1
    assert out.startswith("A record:{")
    assert err.splitlines()[-1].startswith(
        "exl: the output was cut after 3 tokens, before the JSON of --json-schema was complete: raise --max-tokens (-n)"
    )
    code, out, err = exl(*common, "-n", "3", "--json")
    assert code == 1
    assert json.loads(out)["eos_reason"] == "max_new_tokens"
    assert len(err.splitlines()) == 1
    code, out, err = exl(*common, "-n", "60", "--json")
    assert (code, err) == (0, "")
    json.loads(json.loads(out)["completion"])


@pytest.mark.parametrize("extra", [(), ("--draft", "bundled"), ("--ngram",)])
def test_a_limit_at_the_end_of_a_whole_text_is_no_error(exl, schema: str, extra: tuple[str, ...]) -> None:
    common = ("generate", "Once upon a time,", "-m", BUNDLED, "--seed", "1", "--json", *extra)
    code, out, err = exl(*common, "--regex", "[ -~]*", "-n", "3")
    assert (code, err) == (0, "")
    assert json.loads(out)["eos_reason"] == "max_new_tokens"
    code, _, err = exl(*common, "--regex", "[ -~]{200}", "-n", "3")
    assert code == 1
    assert "before the text that --regex asks for was complete" in err


def test_a_text_without_a_schema_may_be_cut(exl) -> None:
    assert exl("generate", "Once", "-m", BUNDLED, "-n", "3")[0] == 0


@pytest.mark.parametrize("name", ["nofile.json", "folder/nofile.json", "x" * 5000])
def test_a_schema_that_is_neither_file_nor_json_says_so(exl, name: str) -> None:
    code, out, err = exl("generate", "x", "-m", BUNDLED, "--json-schema", name)
    assert (code, out) == (1, "")
    assert "there is no such file" in err or "File name too long" in err
    assert len(err.splitlines()) == 1


# ---- messages ----


@pytest.mark.parametrize("command", [("generate", "Once", "-n", "2"), ("info",), ("bench", "--new-tokens", "2")])
def test_the_bundled_model_is_named_once(exl, command: tuple[str, ...]) -> None:
    _, out, err = exl(*command, "--json")
    assert json.loads(out.splitlines()[0])
    assert err == "exl: no model folder given (-m DIR): using the bundled model fable-10m\n"
    assert exl(command[0], *command[1:], "--json", "-m", BUNDLED)[2] == ""


NAMES = {"folder", "architecture", "kind", "format", "device"}


def texts(value: object, name: str = "") -> set[str]:
    """Names of the values in JSON data that are texts."""
    if isinstance(value, dict):
        return set().union(*(texts(inner, key) for key, inner in value.items()))
    if isinstance(value, list):
        return set().union(*(texts(inner, name) for inner in value))
    return {name} if isinstance(value, str) else set()


def test_the_facts_of_a_model_are_numbers(exl) -> None:
    facts = json.loads(exl("info", MODEL, "--plan", "--json")[1])
    assert texts(facts) == NAMES
    model, matrices = facts["model"], facts["matrices"]
    assert (model["query_heads"], model["key_value_heads"], model["parameters"]) == (4, 2, 4_196_608)
    assert model["bytes"] == sum(row["bytes"] for row in matrices)
    assert all(0 < row["bits_per_weight"] <= 32 for row in matrices)
    assert "4,196,608" in exl("info", MODEL)[1]


def test_the_bits_of_gptq_codes_are_a_number(exl, tmp_path: Path) -> None:
    source, folder = str(Path(MODEL).parent / "pylib-4m-fp16"), str(tmp_path / "gptq")
    assert exl("convert", source, folder, "--format", "gptq", "--bits", "4")[0] == 0
    rows = json.loads(exl("info", folder, "--json")[1])["matrices"]
    assert {(row["format"], row["code_bits"]) for row in rows} == {("gptq", 4), ("f16", None)}
    assert "gptq 4" in exl("info", folder)[1]


def test_every_key_of_info_is_documented(exl) -> None:
    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*(keys(inner) for inner in value.values()))
        return set().union(*(keys(inner) for inner in value)) if isinstance(value, list) else set()

    guide = (Path(__file__).parents[2] / "docs" / "guides" / "command-line.md").read_text(encoding="utf-8")
    missing = {key for key in keys(json.loads(exl("info", MODEL, "--plan", "--json")[1])) if f"`{key}`" not in guide}
    assert not missing
