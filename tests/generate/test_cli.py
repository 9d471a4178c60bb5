"""The `exl` command, as a user calls it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from preloaded import Program

from exl_generate.bundled import default_model_dir
from exl_generate.cli.conversation import Conversation

MODEL = str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5")
BUNDLED = str(default_model_dir())


def test_generate_streams_prompt_and_continuation(exl) -> None:
    code, out, err = exl("generate", "def read(", "-m", MODEL, "-n", "12", "--seed", "3")
    assert code == 0
    assert out.startswith("def read(")
    assert "12 new tokens" in err
    assert "seed 3" in err
    assert exl("generate", "def read(", "-m", MODEL, "-n", "12", "--seed", "3")[1] == out


def test_generate_json_and_cache_kinds(exl) -> None:
    for cache in ("fp16", "fp8", "q8", "q6", "q4"):
        args: tuple[str, ...] = ("-m", MODEL, "-n", "8", "--greedy", "--json", "--cache", cache, "--stop", "zzz")
        args = (*args, "--set", "token_frequency_penalty=0.1")
        code, out, _ = exl("generate", "-", *args, stdin="import os")
        report = json.loads(out)
        assert code == 0
        assert (report["prompt"], report["new_tokens"], report["eos_reason"]) == ("import os", 8, "max_new_tokens")
        assert report["settings"]["token_frequency_penalty"] == "0.1"


def test_generate_honours_stops_and_bans(exl) -> None:
    common = ("generate", "import os\n", "-m", MODEL, "--greedy", "--json", "-n", "30")
    plain = json.loads(exl(*common)[1])["completion"]
    stopped = json.loads(exl(*common, "--stop", plain[5:8])[1])
    assert (stopped["completion"], stopped["eos_reason"]) == (plain[: plain.index(plain[5:8])], "stop_string")
    banned = json.loads(exl(*common, "--ban", "IMPORT")[1])["completion"]
    assert "import" in plain
    assert "import" not in banned


def test_generate_with_drafts_gives_the_same_text(exl) -> None:
    common = ("generate", "One rainy day,", "-n", "40", "--seed", "3", "--json")
    plain, draft, ngram = (json.loads(exl(*common, *extra)[1]) for extra in ((), ("--draft", "bundled"), ("--ngram",)))
    assert plain["completion"] == draft["completion"] == ngram["completion"]
    assert draft["accepted_draft_tokens"] > 5


def test_generate_obeys_schema_and_regex(exl, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="the grammar extra of exl-filters is optional")
    schema: dict[str, Any] = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    schema["additionalProperties"] = False
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    for source in (str(file), json.dumps(schema)):
        code, out, err = exl("generate", "A record:\n", "-n", "60", "--seed", "1", "--json", "--json-schema", source)
        assert code == 0, err
        assert isinstance(json.loads(json.loads(out)["completion"])["age"], int)
    extra = ("--regex", "(yes|no), [a-z]{3}!", "--draft", "bundled")
    completion = json.loads(exl("generate", "Is it?", "--seed", "2", "--json", *extra)[1])["completion"]
    assert re.fullmatch("(yes|no), [a-z]{3}!", completion)
    assert exl("generate", "x", "--regex", "(unclosed")[0] == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "x", "-m", "nowhere"), "nowhere"),
        (("generate", "x", "-m", MODEL, "--set", "heat=1"), "temperature"),
        (("generate", "x", "-m", MODEL, "--set", "top_k=many"), "many"),
        (("generate", "x", "-m", MODEL, "--cache-tokens", "256", "-n", "400"), "2 pages"),
        (
            ("generate", "x", "-m", MODEL, "-n", "4", "--min-tokens", "5"),
            "--min-tokens is 5, more than --max-tokens (-n) 4",
        ),
        (("generate", "x", "-m", MODEL, "--min-tokens", "5000"), "ask for at most"),
        (("info", MODEL, "--device", "cpu"), "--plan"),
        (("generate", "x", "-m", MODEL, "--cfg-scale", "2"), "--negative-prompt"),
        (("generate", "x", "-m", MODEL, "--greedy", "--top-k", "5"), "top_k would do nothing"),
        (("generate", "x", "-m", MODEL, "--top-k", "5", "--set", "top_k=6"), "given twice"),
        (("generate", "x", "-m", MODEL, "--mirostat-tau", "5"), "without mirostat"),
        (("generate", "x", "-m", MODEL, "--dry-breaker", "x"), "without dry_multiplier"),
        (("generate", "x", "-m", MODEL, "--repetition-decay", "5"), "token_repetition_range is -1"),
        (("info", MODEL, "--cache", "q4"), "--plan"),
        (("info", MODEL, "--cache-tokens", "512"), "--plan"),
        (("chat", "-m", MODEL), "chat template"),
        (("generate", "x", "-m", MODEL, "--draft", "bundled"), "ids are other text in the draft model's vocabulary"),
        (("bench", "-m", MODEL, "--prompt-tokens", "5000"), "limit is 2048"),
    ],
)
def test_errors_are_one_line_with_a_code(exl, args: tuple[str, ...], message: str) -> None:
    code, _, err = exl(*args, stdin="hello\n")
    assert code == 1
    assert message in err
    assert err.strip().endswith("]")
    assert len(err.strip().splitlines()) == 1


def test_info(exl) -> None:
    facts = json.loads(exl("info", MODEL, "--json")[1])
    assert facts["model"]["bits_per_weight"] == pytest.approx(4.5, abs=0.05)
    assert facts["cache"][0]["fp16"] == 2048 * 2 * 4 * 2 * 64 * 2
    code, out, _ = exl("info", MODEL)
    assert code == 0
    assert "down_proj" in out


def test_info_takes_its_folder_as_other_commands_do(exl) -> None:
    assert exl("info", "-m", MODEL)[:2] == exl("info", MODEL)[:2]
    code, _, err = exl("info", MODEL, "--model", MODEL)
    assert code == 1
    assert "name one" in err


def test_info_plans_where_the_model_goes(exl) -> None:
    facts = json.loads(exl("info", MODEL, "--plan", "--cache", "q4", "--cache-tokens", "512", "--json")[1])["plan"]
    assert facts["fits"]
    assert facts["max_cache_tokens"] >= 512
    (device,) = facts["devices"]
    assert device["device"] == "cpu"
    assert device["weights"] > 0 < device["cache"]
    assert device["used"] <= device["budget"]
    code, out, _ = exl("info", MODEL, "--plan")
    assert code == 0
    assert "largest cache that fits" in out


def test_doctor(exl) -> None:
    code, out, _ = exl("doctor", "--json")
    facts = json.loads(out)
    assert (code, facts["ok"]) == (0, True)
    assert facts["cuda"]["usable"] or facts["cuda"]["reason"]
    assert facts["cpu"]["instruction_set"] in ("scalar", "avx2", "avx512")


def test_bench(exl) -> None:
    args = ("--prompt-tokens", "40", "--new-tokens", "6", "--batch", "1", "--batch", "3", "--json")
    rows = [json.loads(line) for line in exl("bench", "-m", MODEL, *args)[1].splitlines()]
    assert [row["batch"] for row in rows] == [1, 3]
    assert min(row["prefill_tps"] for row in rows) > 0
    assert min(row["decode_tps"] for row in rows) > 0


def test_chat_keeps_history_and_obeys_commands(exl, chat_model: str) -> None:
    talk = "hello\nagain\n/retry\n/system be brief\nhello\n/reset\n/retry\n/nonsense\n/quit\nnot reached\n"
    code, out, err = exl("chat", "-m", chat_model, "-n", "10", "--seed", "1", stdin=talk)
    assert code == 0
    assert len(out) > 20
    assert "nothing to answer again" in err
    assert "unknown command /nonsense" in err


def test_chat_reports_the_messages_that_it_leaves_out(exl, chat_model: str) -> None:
    talk = "".join(f"message number {i} about reading files\n" for i in range(12))
    code, _, err = exl("chat", "-m", chat_model, "-n", "20", "--cache-tokens", "256", "--seed", "1", stdin=talk)
    assert code == 0
    assert "left out" in err


def test_a_message_without_room_for_an_answer_does_not_end_the_talk(exl, chat_model: str) -> None:
    talk = "hello\n" + "word " * 2000 + "\n/history\nand now?\n"
    code, out, err = exl("chat", "-m", chat_model, "-n", "8", "--seed", "1", stdin=talk)
    assert code == 0
    assert "shorten it" in err
    assert out.count("user: ") == out.count("assistant: ") == 1
    code, out, _ = exl(
        "chat", "-m", chat_model, "-n", "8", "--seed", "1", "--json", stdin=talk.replace("/history\n", "")
    )
    lines = [json.loads(line) for line in out.splitlines()]
    assert [("answer" in line, "error" in line) for line in lines] == [(True, False), (False, True), (True, False)]


def test_the_command_line_answers_without_torch() -> None:
    script = "import sys; import exl_generate.cli.app, exl_generate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_version(exl) -> None:
    assert exl("--version")[:2] == (0, "exl 0.1.0\n")


# ---- every setting, adapters, history, interrupts ----


def test_every_sampler_setting_has_an_option() -> None:
    from exl_generate.cli.options import FIELDS
    from exl_generate.cli.sampling import NOT_SETTABLE
    from exl_generate.sampling import Settings

    fields = {field.name for field in dataclasses.fields(Settings)}
    assert set(FIELDS) == fields - NOT_SETTABLE
    flags = [flag for names, _, _ in FIELDS.values() for flag in names]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (("--temperature", "0.5", "--top-a", "0.1"), {"temperature": "0.5", "top_a": "0.1"}),
        (("--temperature-last", "--mirostat", "--mirostat-tau", "2"), {"mirostat": "True", "mirostat_tau": "2.0"}),
        (("--repetition-penalty", "1.2", "--repetition-range", "64"), {"token_repetition_range": "64"}),
        (
            ("--xtc-probability", "0.5", "--xtc-ignore", "5", "--xtc-ignore", "6"),
            {"xtc_ignore_tokens": "frozenset({5, 6})"},
        ),
        (("--dry-multiplier", "1", "--dry-breaker", ","), {"dry_sequence_breakers": "frozenset({','})"}),
    ],
)
def test_options_reach_the_sampler(exl, args: tuple[str, ...], shown: dict[str, str]) -> None:
    code, out, _ = exl("generate", "import os", "-m", MODEL, "-n", "4", "--json", *args)
    assert code == 0
    assert shown.items() <= json.loads(out)["settings"].items()


def test_a_negative_prompt_changes_the_text(exl) -> None:
    common = ("generate", "import os\n", "-m", MODEL, "--greedy", "--json", "-n", "20")
    plain = json.loads(exl(*common)[1])["completion"]
    away = json.loads(exl(*common, "--negative-prompt", "import sys\n", "--cfg-scale", "3")[1])["completion"]
    neutral = json.loads(exl(*common, "--negative-prompt", "import sys\n", "--cfg-scale", "1")[1])["completion"]
    assert neutral == plain != away


def test_an_adapter_that_is_none_is_refused(exl, tmp_path: Path) -> None:
    code, _, err = exl("generate", "import os", "-m", MODEL, "-n", "4", "--lora", str(tmp_path))
    assert code == 1
    assert "No LoRA found" in err


def test_chat_history_is_kept_in_a_file(exl, chat_model: str, tmp_path: Path) -> None:
    file, copy = tmp_path / "talk.json", tmp_path / "copy.json"
    common = ("chat", "-m", chat_model, "-n", "6", "--greedy", "--history", str(file))
    assert exl(*common, "--system", "Be brief.", stdin="one\n")[0] == 0
    told = json.loads(file.read_text())
    assert [m["role"] for m in told] == ["system", "user", "assistant"]
    code, out, err = exl(*common, stdin=f"two\n/history\n/save {copy}\n/load {tmp_path / 'none'}\n")
    assert code == 0
    assert "user: one" in out
    assert "cannot read a conversation" in err
    assert [m["content"] for m in json.loads(copy.read_text()) if m["role"] == "user"] == ["one", "two"]
    file.write_text('{"not": "a list"}')
    code, _, err = exl(*common, stdin="three\n")
    assert code == 1
    assert "a conversation is a list" in err


def test_chat_speaks_json_lines(exl, chat_model: str) -> None:
    code, out, _ = exl("chat", "-m", chat_model, "-n", "6", "--greedy", "--json", stdin="one\ntwo\n")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["message"] for line in lines] == ["one", "two"]
    assert all(line["new_tokens"] <= 6 for line in lines)
    assert lines[1]["cached_tokens"] > 0


@pytest.fixture
def errors(tmp_path: Path) -> Iterator[BinaryIO]:
    """A file for what a program writes to its standard error."""
    with (tmp_path / "errors").open("w+b") as file:
        yield file


def test_an_interrupt_ends_the_text_not_the_accounting(errors: BinaryIO) -> None:
    """Ctrl-C in the middle: what was written stays, statistics follow, exit code 130."""
    command = ["-m", "exl_generate", "generate", "Once upon a time", "-n", "1000", "--ban", "zzzz", "-m", BUNDLED]
    reader, writer = os.pipe()
    program = Program(command, (errors.fileno(), writer, errors.fileno()))
    os.close(writer)
    with open(reader) as output:
        head = output.read(30)
        program.send_signal(signal.SIGINT)
        output.read()
    code = program.wait()
    errors.seek(0)
    err = errors.read().decode()
    assert head.startswith("Once upon a time")
    if "max_new_tokens" not in err:  # quick machines may be done first
        assert code == 130, err
        assert "ended by cancelled" in err


@pytest.mark.full
def test_further_interrupts_do_not_spoil_the_end() -> None:
    """Ctrl-C does not interrupt the clean-up of libraries at exit: no traceback after the statistics."""
    command = [sys.executable, "-m", "exl_generate", "generate", "Once upon a time", "-n", "1000", "--ban", "zzzz"]
    command += ["-m", BUNDLED]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(30)
    process.send_signal(signal.SIGINT)
    told = process.stderr.readline()
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    assert "new tokens" in told
    assert "Traceback" not in process.stderr.read()
    assert process.returncode == 130 or "cancelled" not in told  # quick machines may be done first


# ---- what cannot be done is refused before it is begun ----


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "x", "-m", MODEL, "-n", "99999999"), "--max-tokens is 99999999"),
        (("generate", "x", "-m", MODEL, "--json-schema", "/"), "is a folder"),
        (("chat", "-m", MODEL, "--chat-template", "plain", "-n", "99999999"), "--max-tokens is 99999999"),
        (("chat", "-m", MODEL, "--history", "/nonexist/x.json"), "there is no folder /nonexist"),
        (("chat", "-m", MODEL, "--history", "/"), "is a folder"),
        (("bench", "-m", MODEL, "--batch", "100000"), "--batch 100000"),
        (("bench", "-m", MODEL, "--batch", "2", "--batch", "257"), "--batch 257"),
    ],
)
def test_impossible_commands_are_an_error_of_one_line(exl, args: tuple[str, ...], message: str) -> None:
    if "--json-schema" in args:
        pytest.importorskip("llguidance", reason="the grammar extra of exl-filters is optional")
    code, out, err = exl(*args, stdin="hello\n")
    assert (code, out) == (1, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_batch_beyond_the_memory_is_refused(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu:0=0.3")
    code, out, err = exl("bench", "-m", MODEL, "--batch", "200", "--prompt-tokens", "1900", "--json")
    assert (code, out) == (1, "")
    assert "--batch 200 needs a cache of 456800 tokens" in err
    assert "largest cache that fits" in err


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",), ("info", MODEL, "--plan")])
@pytest.mark.parametrize("tokens", ["0", "-300"])
def test_cache_tokens_are_at_least_one(exl, command: tuple[str, ...], tokens: str) -> None:
    code, out, err = exl(*command, "--cache-tokens", tokens)
    assert (code, out) == (1, "")
    assert f"--cache-tokens is {tokens};" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_a_plan_that_does_not_fit_is_exit_code_1(exl, extra: tuple[str, ...]) -> None:
    code, out, _ = exl("info", MODEL, "--plan", "--cache-tokens", "999999999999", *extra)
    assert code == 1
    assert out


def test_without_a_number_the_context_is_the_limit(exl) -> None:
    report = json.loads(exl("generate", "x = 1\n" * 500, "-m", MODEL, "--greedy", "--json")[1])
    assert report["prompt_tokens"] > 2048 - 200
    assert report["prompt_tokens"] + report["new_tokens"] <= 2048


def test_a_conversation_that_cannot_be_saved_is_reported(exl, chat_model: str) -> None:
    code, _, err = exl("chat", "-m", chat_model, "-n", "2", stdin="/save /nonexist/x.json\n/load /nonexist/x.json\n")
    assert code == 0
    assert "/nonexist/x.json: cannot write the conversation to it (No such file or directory)" in err
    assert "cannot read a conversation from it" in err
    assert "Errno" not in err.splitlines()[0]


def test_a_history_stays_whole_where_the_new_one_does_not_fit(exl, chat_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    file, link = folder / "talk.json", tmp_path / "link.json"
    link.symlink_to(file)
    common = ("chat", "-m", chat_model, "-n", "4", "--greedy", "--history", str(link))
    assert exl(*common, stdin="one\n")[0] == 0
    file.chmod(0o640)
    before, write = file.read_text(), Path.write_text

    def full(self: Path, text: str, **how: str) -> int:
        write(self, text[: len(text) // 2], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        code, _, err = exl(*common, stdin="two\n")
    assert code == 1
    assert "No space left on device" in err
    assert file.read_text() == before
    assert exl(*common, stdin="three\n")[0] == 0
    assert "three" in file.read_text()
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(folder.iterdir()) == [file]
    long = folder / ("x" * 250)
    assert exl(*common[:-1], str(long), stdin="four\n")[0] == 0
    assert "four" in long.read_text()


def test_a_file_that_is_not_to_be_written_is_not_replaced_either(exl, chat_model: str, tmp_path: Path) -> None:
    """The system decides, of the file itself; root, as whom tests may run, writes it."""
    file = tmp_path / "talk.json"
    file.write_text("[]")
    before, access = file.stat().st_ino, os.access
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda place, mode: Path(place) != file and access(place, mode))
        exl("chat", "-m", chat_model, "-n", "4", "--greedy", stdin=f"one\n/save {file}\n")
    assert "one" in file.read_text()
    assert file.stat().st_ino == before


def test_a_history_that_cannot_be_written_is_reported_and_shown(exl, chat_model: str, tmp_path: Path) -> None:
    """Even where it could be written at the start."""
    folder = tmp_path / "gone"
    folder.mkdir()
    common = ("chat", "-m", chat_model, "-n", "4", "--greedy", "--history", str(folder / "talk.json"))
    answer = Conversation.answer

    def lose(*args: Any) -> str:
        folder.rmdir()
        return answer(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Conversation, "answer", lose)
        code, _, err = exl(*common, stdin="remember me\n")
    assert code == 1
    assert "cannot write the conversation" in err
    assert '"content": "remember me"' in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "Once", "-n", "400", "-m", BUNDLED],
        pytest.param(["info", BUNDLED], marks=pytest.mark.full),
        ["--help"],
    ],
)
def test_a_reader_that_goes_away_is_exit_code_141(arguments: list[str], errors: BinaryIO) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = Program(["-m", "exl_generate", *arguments], (errors.fileno(), writer, errors.fileno()))
    os.close(writer)
    assert program.wait() == 141
    assert os.fstat(errors.fileno()).st_size == 0
