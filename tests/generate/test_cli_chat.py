"""`exl chat`: settings, statistics, constraints, drafts and images of a conversation, in a pipe."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2Tokenizer, ExLlamaV2VisionTower
from exl_core.errors import DeviceError
from exl_generate.bundled import default_model_dir
from exl_generate.cli.chat_commands import COMMANDS, completions
from exl_generate.cli.sampling import setting_names

BUNDLED = str(default_model_dir())
CHAT = ("chat", "-m", BUNDLED, "--seed", "1")
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "chat.md"


def answers(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


# ---- /set ----


def test_settings_change_the_next_answers(exl) -> None:
    talk = "/set max_tokens 3\nhello\n/set max_tokens 30\n/set seed 5\n/retry\n/retry\n"
    talk += "/set seed none\n/set temperature 0\n/retry\n/retry\n"
    code, out, err = exl(*CHAT, "--json", stdin=talk)
    assert (code, err.count("\n")) == (0, 0), err
    first, *rest = answers(out)
    assert first["new_tokens"] == 3
    seeded, again, greedy, greedy_again = (answer["answer"] for answer in rest)
    assert seeded == again
    assert greedy == greedy_again != seeded


def test_set_alone_lists_every_setting(exl) -> None:
    _, _, err = exl(*CHAT, stdin="/set temperature 0.25\n/set top_k 7\n/set top_k default\n/set\n/set temperature\n")
    *listed, alone = err.splitlines()
    assert [line.split()[0] for line in listed] == ["max_tokens", "seed", "stats", *setting_names()]
    assert {"max_tokens 400", "seed 1", "stats off", "temperature 0.25", "top_k 50"} < set(listed)
    assert alone == "temperature 0.25"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set heat 1", "there is no setting 'heat'"),
        ("/set temperature warm", "temperature: 'warm' is not a number"),
        ("/set temperature -1", "temperature: -1 is out of range; it must be at least 0"),
        ("/set temperature 'warm'", "temperature"),
        ("/set top_k 2.5", "top_k"),
        ("/set max_tokens 0", "max_tokens is 0; it must be at least 1"),
        ("/set max_tokens many", "max_tokens is 'many'; it must be a whole number"),
        ("/set max_tokens 1024", "max_tokens is 1024; model and cache have 1024 tokens"),
        ("/set seed -1", "seed is -1; it must be at least 0"),
        ("/set stats yes", "stats is 'yes'; it is on or off"),
        ("/set mirostat_tau 3", "mirostat_tau does nothing without mirostat"),
        ("/set dry_sequence_breakers 3", "dry_sequence_breakers"),
        ("/set dry_sequence_breakers [[1]]", "dry_sequence_breakers: '[[1]]' is not a set of token ids or texts"),
        ("/set temperature {[1]}", "temperature: '{[1]}' is not a number"),
        pytest.param(f"/set temperature 1{'0' * 400}", "beyond the limit of 1e308", id="too large"),
        pytest.param(f"/set temperature -1{'0' * 400}", "beyond the limit", id="too small"),
        pytest.param(f"/set temperature 1{'0' * 5000}", "is not a number", id="5001 digits"),
        pytest.param(f"/set top_k 0x{'f' * 4000}", "beyond the limit", id="hexadecimal"),
        pytest.param(f"/set temperature {'-' * 5000}1", "temperature: '---", id="signs"),
        pytest.param(f"/set temperature {'[' * 5000}", "temperature: '[[[", id="brackets"),
        pytest.param(
            f"/set xtc_ignore_tokens {{1{'0' * 400}}}",
            "beyond the limit",
            id="large id",
        ),
        ("/nothing", "unknown command /nothing"),
        ("/save", "/save needs FILE"),
    ],
)
def test_a_wrong_command_is_one_line_and_the_talk_goes_on(exl, line: str, message: str) -> None:
    code, out, err = exl(*CHAT, "-n", "2", "--json", stdin=f"{line}\nhello\n")
    assert code == 0
    assert message in err
    assert len(err.splitlines()) == 1
    assert len(answers(out)) == 1


def test_a_setting_that_greedy_sampling_ignores_is_noted(exl) -> None:
    _, _, err = exl(*CHAT, "--greedy", stdin="/set temperature 0.5\n/set top_k 20\n/set temperature 0.5\n")
    assert err == "[temperature does nothing while top_k is 1]\n"


def test_two_slashes_begin_a_message_with_one(exl) -> None:
    code, out, err = exl(*CHAT, "-n", "2", "--json", stdin="//help me\n/retry\n/help\n")
    assert code == 0
    assert [answer["message"] for answer in answers(out)] == ["/help me", "/help me"]
    assert "//TEXT sends /TEXT" in err


def test_each_command_is_one_line_of_the_list_at_80_columns(exl) -> None:
    listed = exl(*CHAT, stdin="/help\n")[2].splitlines()
    commands = [line for line in listed if line.startswith("/")]
    assert len(commands) > 8
    assert max(map(len, commands)) < 80


def test_default_resets_every_setting(exl) -> None:
    fresh = exl(*CHAT, stdin="/set seed none\n/set\n")[2]
    changes = "/set max_tokens 3\n/set stats on\n/set seed 7\n/set temperature 0.5\n"
    resets = "".join(f"/set {name} default\n" for name in ("max_tokens", "stats", "seed", *setting_names()))
    assert exl(*CHAT, "-n", "5", "--stats", stdin=f"{changes}{resets}/set\n")[2] == fresh


def test_a_setting_that_does_not_fit_the_model_leaves_the_chat_going(exl) -> None:
    talk = "one\n/set xtc_probability 0.5\n/set xtc_ignore_tokens {999999}\ntwo\n/retry\n"
    talk += "/set xtc_ignore_tokens default\n/retry\n"
    code, out, err = exl(*CHAT, "-n", "2", "--json", stdin=talk)
    assert (code, err) == (0, "")
    one, *failed, again = answers(out)
    assert [("token id 999999" in answer["error"], answer["message"]) for answer in failed] == [
        (True, "two"),
        (True, "one"),
    ]
    assert again["message"] == one["message"] == "one"


# ---- statistics ----

LINE = re.compile(r"\[(\d+) prompt tokens, (\d+) cached; (\d+) tokens, \d+\.\d tokens/s(; ended by max_tokens)?\]\n")


def test_statistics_are_counts_of_each_answer(exl) -> None:
    code, out, err = exl(*CHAT, "-n", "4", "--stats", "--json", stdin="hello\nagain\n/set stats off\nthird\n")
    assert code == 0
    found = [tuple(map(int, match.groups()[:3])) for match in LINE.finditer(err)]
    told = [(a["prompt_tokens"], a["cached_tokens"], a["new_tokens"]) for a in answers(out)]
    assert found == told[:2]
    assert found[1][1] > 0
    assert exl(*CHAT, "-n", "4", stdin="hello\n")[2] == ""


# ---- Ctrl-C ----


def test_ctrl_c_before_the_first_token_leaves_the_chat_going(exl, monkeypatch: pytest.MonkeyPatch) -> None:
    render = ExLlamaV2Tokenizer.apply_chat_template

    def interrupted(self: ExLlamaV2Tokenizer, messages: list[dict[str, str]], *args: Any, **options: Any) -> str:
        if messages[-1]["content"] == "one":
            signal.raise_signal(signal.SIGINT)
        return render(self, messages, *args, **options)

    monkeypatch.setattr(ExLlamaV2Tokenizer, "apply_chat_template", interrupted)
    code, out, _ = exl(*CHAT, "-n", "4", "--json", stdin="one\ntwo\n")
    assert code == 0
    assert [(a["eos_reason"], a["new_tokens"]) for a in answers(out)] == [("cancelled", 0), ("max_new_tokens", 4)]


# ---- constraints ----


@pytest.fixture
def grammars() -> None:
    pytest.importorskip("llguidance", reason="the grammar extra of exl-filters is optional")


@pytest.mark.usefixtures("grammars")
def test_every_answer_obeys_the_schema(exl, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["age"],
        "additionalProperties": False,
    }
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    for source in (str(file), json.dumps(schema)):
        code, out, err = exl(*CHAT, "--json", "--json-schema", source, stdin="hello\nand now?\n")
        assert (code, err) == (0, "")
        assert [set(json.loads(answer["answer"])) for answer in answers(out)] == [{"age"}, {"age"}]


@pytest.mark.usefixtures("grammars")
def test_every_answer_obeys_the_pattern_or_says_what_is_missing(exl) -> None:
    code, out, err = exl(*CHAT, "--json", "--regex", "(yes|no), [a-z]{3}!", "--draft", "bundled", stdin="a\nb\n")
    assert (code, err) == (0, "")
    assert all(re.fullmatch("(yes|no), [a-z]{3}!", answer["answer"]) for answer in answers(out))
    code, _, err = exl(*CHAT, "-n", "2", "--regex", "[a-z]{50}", stdin="a\n")
    assert code == 0
    assert (
        err == "[the answer ends before the text that --regex asks for is complete: /set max_tokens raises its limit]\n"
    )


@pytest.mark.parametrize("command", [("chat",), ("generate", "x")])
@pytest.mark.usefixtures("grammars", "no_weights")
@pytest.mark.parametrize(
    "extra", [("--json-schema", '{"type": "strin"}'), ("--json-schema", "no.json"), ("--regex", "((")]
)
def test_a_wrong_constraint_is_refused_before_the_weights_are_read(
    exl, command: tuple[str, ...], extra: tuple[str, str]
) -> None:
    code, out, err = exl(*command, "-m", BUNDLED, *extra, stdin="hello\n")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", [("chat",), ("generate", "x")])
@pytest.mark.parametrize("extra", [("--json-schema", '{"type": "object"}'), ("--regex", "a+")])
def test_a_constraint_without_its_library_names_what_to_install(
    exl, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], extra: tuple[str, str]
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    code, out, err = exl(*command, "-m", BUNDLED, *extra, stdin="hello\n")
    assert (code, out) == (1, "")
    assert 'pip install "./packages/exl-filters[grammar]"' in err
    assert len(err.splitlines()) == 1


# ---- drafts ----


def test_a_draft_changes_nothing_but_the_speed(exl) -> None:
    talk = "Tell me a story about a fox.\nAnd then?\n"
    plain = exl(*CHAT, "-n", "30", stdin=talk)
    drafted = exl(*CHAT, "-n", "30", "--draft", "bundled", "--stats", stdin=talk)
    assert drafted[1] == plain[1]
    assert re.search(r"[1-9]\d* of \d+ drafted tokens accepted", drafted[2])
    from_text = exl(*CHAT, "-n", "30", "--ngram", "--stats", stdin=talk)
    assert from_text[1] == plain[1]
    assert re.search(r"\d+ of [1-9]\d* drafted tokens accepted", from_text[2])


def test_one_source_of_drafts_at_a_time(exl) -> None:
    code, _, err = exl(*CHAT, "--ngram", "--draft", "bundled", stdin="Hello\n")
    assert code != 0
    assert "exclude each other" in err


def test_a_draft_with_another_tokenizer_is_rejected(exl) -> None:
    other = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
    code, out, err = exl(*CHAT, "--draft", str(other), stdin="Hello!\n")
    assert (code, out) == (1, "")
    assert "take a draft model that shares the tokenizer [request]" in err.splitlines()[-1]


# ---- images ----


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2-VL with a picture in its folder."""
    pytest.importorskip("transformers")
    from vision_models import QWEN_TEXT, picture, write_model, write_tokenizer

    folder = tmp_path_factory.mktemp("vision")
    text = {**QWEN_TEXT, "vocab_size": 288, "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 260}
    write_model("Qwen2VL", folder, text_config=text)
    write_tokenizer(folder)
    picture(120, 70).save(folder / "photo.png")
    picture(60, 70).save(folder / "other.png")
    return folder


def test_images_are_part_of_their_message(exl, vision_model: Path, tmp_path: Path) -> None:
    photo, saved = vision_model / "photo.png", tmp_path / "talk.json"
    common = ("chat", "-m", str(vision_model), "-n", "4", "--greedy", "--json", "--cache-tokens", "2048")
    talk = f"What is it?\nAnd now?\n/image {vision_model / 'other.png'}\nAnd this?\n/save {saved}\n"
    code, out, err = exl(*common, "--image", str(photo), stdin=talk)
    assert code == 0, err
    notes = re.findall(r"\[(\w+\.png): (\d+ x \d+) pixels, (\d+) tokens; goes with the next message\]", err)
    assert [note[:2] for note in notes] == [("photo.png", "120 x 70"), ("other.png", "60 x 70")]
    found = answers(out)
    assert found[0]["message"] == f"[image {photo}]What is it?"
    assert found[0]["prompt_tokens"] > int(notes[0][2])
    assert found[1]["cached_tokens"] >= int(notes[0][2])
    assert found[2]["prompt_tokens"] - found[1]["prompt_tokens"] > int(notes[1][2])
    assert json.loads(saved.read_text())[0]["content"] == f"[image {photo}]What is it?"
    text_only = answers(exl(*common, stdin="What is it?\n")[1])[0]
    assert text_only["prompt_tokens"] < found[0]["prompt_tokens"]


def test_images_that_cannot_be_used_are_refused(exl, vision_model: Path) -> None:
    common = ("chat", "-m", str(vision_model), "-n", "2", "--cache-tokens", "512")
    code, _, err = exl(*common, "--image", str(vision_model / "config.json"), stdin="hello\n")
    assert code == 1
    assert "not an image" in err
    code, _, err = exl(*common, stdin="/image nothing.png\nhello\n")
    assert code == 0
    assert "nothing.png" in err
    for extra, code in (("--image", 1), (None, 0)):
        arguments = (extra, str(vision_model / "photo.png")) if extra else ()
        found = exl(*CHAT, "-n", "2", *arguments, stdin=f"/image {vision_model / 'photo.png'}\n")
        assert found[0] == code
        assert "has no vision tower" in found[2]


def test_images_wait_for_a_message_that_fits(exl, vision_model: Path) -> None:
    photo = vision_model / "photo.png"
    common = ("chat", "-m", str(vision_model), "-n", "2", "--greedy", "--json", "--cache-tokens", "512")
    talk = f"first\n/image {photo}\n{'too long ' * 500}\n/retry\nWhat is it?\nAnd now?\n"
    code, out, err = exl(*common, stdin=talk)
    assert code == 0, err
    _, failed, again, shown, plain = answers(out)
    assert "shorten it" in failed["error"]
    assert failed["message"].startswith(f"[image {photo}]too long")
    assert again["message"] == "first"
    assert shown["message"] == f"[image {photo}]What is it?"
    assert plain["message"] == "And now?"


@pytest.mark.parametrize("command", ["/reset", "/system Be brief.", "/load {saved}"])
def test_images_are_forgotten_with_the_conversation(exl, vision_model: Path, tmp_path: Path, command: str) -> None:
    saved = tmp_path / "talk.json"
    saved.write_text("[]")
    common = ("chat", "-m", str(vision_model), "-n", "2", "--json", "--cache-tokens", "512")
    talk = f"/image {vision_model / 'photo.png'}\n{command.format(saved=saved)}\nhello\n"
    code, out, _ = exl(*common, stdin=talk)
    assert code == 0
    assert answers(out)[0]["message"] == "hello"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("2 GiB"), "not enough GPU memory to encode"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory to encode"),
        (MemoryError(), "not enough memory to encode"),
        (DeviceError("no device"), "no device"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_an_image_that_fails_leaves_the_chat_going(
    exl, vision_model: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, message: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ExLlamaV2VisionTower, "get_image_embeddings", fail)
    common = ("chat", "-m", str(vision_model), "-n", "2", "--json", "--cache-tokens", "512")
    code, out, err = exl(*common, stdin=f"/image {vision_model / 'photo.png'}\nhello\n")
    assert code == 0
    assert message in err
    assert len(err.splitlines()) == 1
    assert answers(out)[0]["message"] == "hello"


# ---- completion and guide ----


def test_lines_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    (tmp_path / "talks").mkdir()
    assert "/history" in completions("/h")
    assert "/set max_tokens " in completions("/set m")
    assert completions(f"/load {tmp_path}/ta") == [f"/load {tmp_path}/talk.json", f"/load {tmp_path}/talks/"]
    assert completions("") == completions("hello") == completions("hello /set") == []


def test_a_home_folder_stays_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talk.json").touch()
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "~one").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "talks")
    assert completions("/load ~/ta") == ["/load ~/talk.json", "/load ~/talks/"]
    assert completions("/load ~/talks/") == ["/load ~/talks/~one"]
    assert completions("/load ~") == ["/load ~one"]
    assert completions("/load ~nobody-has-this-name/") == []


def test_the_guide_names_every_command() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert [name for name, command in COMMANDS.items() if command.help and f"`{name}" not in text] == []
