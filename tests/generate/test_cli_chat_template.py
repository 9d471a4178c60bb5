"""`exl chat` with models that have no chat template: said at the start, and what --chat-template takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exl_core import ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate.cli.chat_templates import find_template

MODEL = str(Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5")
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Two?"},
]


def refusal(exl, *args: str) -> str:
    code, out, err = exl("chat", "-m", MODEL, *args, stdin="hello\n")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    return str(err)


@pytest.mark.usefixtures("no_weights")
def test_a_model_without_a_template_is_refused_at_the_start(exl) -> None:
    told = refusal(exl)
    assert "has no chat template: give --chat-template" in told
    assert "alpaca, chatml, llama3, plain" in told


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("chatlm", "chatlm: there is no such file"),
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_does_not_work_is_refused_at_the_start(exl, given: str, message: str) -> None:
    assert message in refusal(exl, "--chat-template", given)


@pytest.mark.usefixtures("no_weights")
def test_a_system_message_that_the_template_refuses(exl) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ bos_token }}"
    assert "no system" in refusal(exl, "--chat-template", strict, "--system", "Be brief.")


@pytest.mark.usefixtures("no_weights")
def test_files_that_are_no_templates(exl, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("hello")
    assert "the file holds no Jinja template" in refusal(exl, "--chat-template", str(file))
    file.write_bytes(b"\xff{{ x }}")
    assert "cannot read it" in refusal(exl, "--chat-template", str(file))
    file.write_text("{{ x }}" * 200_000)
    assert "larger than" in refusal(exl, "--chat-template", str(file))


@pytest.mark.parametrize("how", ["file", "text", "plain", "alpaca", "chatml", "llama3"])
def test_a_talk_by_a_template_that_was_given(exl, tmp_path: Path, how: str) -> None:
    text = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
    (tmp_path / "mine.jinja").write_text(text)
    given = {"file": str(tmp_path / "mine.jinja"), "text": text}.get(how, how)
    code, out, err = exl(
        "chat", "-m", MODEL, "--chat-template", given, "-n", "4", "--greedy", "--json", stdin="one\ntwo\n"
    )
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["message"] for line in lines] == ["one", "two"]
    assert lines[1]["prompt_tokens"] > lines[0]["prompt_tokens"] > 2


def test_the_option_goes_before_the_template_of_the_model(exl, chat_model: str) -> None:
    common = ("chat", "-m", chat_model, "-n", "2", "--json")
    longer = json.loads(exl(*common, "--chat-template", "{{ 'word ' * 50 }}", stdin="one\n")[1])["prompt_tokens"]
    assert longer >= 50 > json.loads(exl(*common, stdin="one\n")[1])["prompt_tokens"]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
            "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "BOS<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "alpaca",
            "BOSBe brief.\n\n### Instruction:\nOne?\n\n### Response:\nYes.\n\n"
            "### Instruction:\nTwo?\n\n### Response:\n",
        ),
        ("plain", "BOSBe brief.\nUser: One?\nAssistant: Yes.\nUser: Two?\nAssistant:"),
    ],
)
def test_prompts_of_the_named_templates(name: str, prompt: str) -> None:
    tokenizer = ExLlamaV2Tokenizer(ExLlamaV2Config(MODEL))
    template = find_template(name)
    said = tokenizer.apply_chat_template(TALK, chat_template=template.source, bos_token="BOS")
    assert said == prompt
    assert template.stops
