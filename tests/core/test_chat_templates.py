"""Chat templates: what transformers renders, from every place where a folder may keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exl_core import ExLlamaV2Config, ExLlamaV2Tokenizer, errors

transformers = pytest.importorskip("transformers")
from vision_models import write_tokenizer  # noqa: E402

pytestmark = pytest.mark.covers("core: tokenizer", "core: token-text")

CALL = {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": [1, 2.5, None, True], "é": "ü<"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": 'You are <b>"né"</b> & co'},
    {"role": "user", "content": "hi ✓\n there"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "42"}]},
]
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "Get 'x' <y>", "parameters": PARAMETERS}}]
VARIABLES: dict[str, Any] = {"documents": [{"title": "t", "text": "x"}], "enable_thinking": False, "custom": {"a": [1]}}

TEMPLATES = {
    "loop": "{% for m in messages %}{{ m.role }}|{{ m['content'] }}{% if not loop.last %},{% endif %}\n{% endfor %}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(ensure_ascii=true) }}",
    "sorted json": "{{ custom | tojson(sort_keys=true, separators=(',', ':')) }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% elif m.content %}{% continue %}"
    "{% endif %}{{ m.role }}{% endfor %}",
    "namespace": "{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
    "white space": "  {% for m in messages %}\n  {{ m.role }}\n  {%- endfor -%}\nend\n",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "date": "{{ strftime_now('%Y-%m') }}",
    "macros": "{% macro f(x, y='d') %}[{{ x }}:{{ y }}:{{ caller() if caller else '' }}]{% endmacro %}{{ f(1) }}"
    "{% call f(2, y=3) %}x{% endcall %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t.function.parameters.properties.keys() | list }}{% endfor %}"
    "{% endif %}",
    "items": "{% for k, v in messages[2].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
    "tests": "{{ messages[2].content is none }}{{ messages[2].content is defined }}{{ messages[0].content is string }}"
    "{{ messages[3].content is iterable }}{{ messages[0] is mapping }}{{ messages[2]['content'] or 'nothing' }}",
    "filters": "{{ messages[0].content | trim | upper | replace('B', 'x') }}"
    "{{ messages | map(attribute='role') | join }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [3, 1, 2] | sort | first }}",
    "slices": "{{ messages[1:] | length }}{{ messages[-1].role }}{{ messages[::-1][0].role }}",
    "methods": "{{ messages[0].content.split(' ')[0].lstrip('Y').startswith('ou') }}{{ 'a-b'.rsplit('-', 1)[-1] }}",
    "undefined": "{{ nothing }}{{ messages[0].foo }}{% if foo is defined %}x{% endif %}",
    "prompt": "{% if add_generation_prompt %}GO{% endif %}{{ bos_token }}{{ eos_token }}",
    "variables": "{{ enable_thinking }}{{ documents }}{{ custom }}",
    "dictionaries": "{{ {'b': 1, 'a': 2} | dictsort }}{{ dict(a=1) }}{{ 'a' if messages else 'b' }}{{ 1 if false }}",
    "blocks": "{% set x %}hi {{ 1 + 1 }}{% endset %}{{ x | trim }}{% for i in range(3) %}{{ i }}{% endfor %}",
}
FAIL = {
    "refusal": "{{ raise_exception('no such role') }}",
    "change": "{% set _ = messages.append(1) %}x",
    "missing": "{{ nothing.deep }}",
    "syntax": "{% for %}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, lab: Any) -> Path:
    made: Path = lab.write(bos_token_id=259, eos_token_id=260)
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_renders_the_same(folder: Path, theirs: Any, name: str, tools: Any) -> None:
    ours = ExLlamaV2Tokenizer(ExLlamaV2Config(folder))
    options: dict[str, Any] = {"chat_template": TEMPLATES[name], "tools": tools, "add_generation_prompt": True}
    expected = theirs.apply_chat_template(TALK, tokenize=False, **options, **VARIABLES)
    assert ours.apply_chat_template(TALK, **options, **VARIABLES) == expected


@pytest.mark.parametrize("name", FAIL)
def test_templates_that_transformers_cannot_render_are_errors(folder: Path, theirs: Any, name: str) -> None:
    with pytest.raises(Exception, match=r".+"):
        theirs.apply_chat_template(TALK, tokenize=False, chat_template=FAIL[name])
    with pytest.raises(errors.ChatTemplateError):
        ExLlamaV2Tokenizer(ExLlamaV2Config(folder)).apply_chat_template(TALK, chat_template=FAIL[name])


def test_places_of_templates(tmp_path: Path, lab: Any) -> None:
    """Transformers 5 saves templates in tokenizer_config.json, processors had files of their own; the first counts."""
    folder = lab.write()
    write_tokenizer(folder)

    def rendered(**options: Any) -> str:
        return ExLlamaV2Tokenizer(ExLlamaV2Config(folder)).apply_chat_template(TALK, **options)

    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    (folder / "tokenizer_config.json").write_text("{}")
    assert rendered() == "J"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "C"}))
    assert rendered() == "C"
    (folder / "chat_template.jinja").write_text("F")
    assert rendered() == "F"
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(f"{name}!")
    assert rendered() == "F"
    assert rendered(tools=TOOLS) == "tool_use!"
    assert rendered(chat_template="rag") == "rag!"
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(errors.ChatTemplateError, match="cannot be read"):
        rendered()
    (folder / "chat_template.jinja").write_text("x" * (1 << 20) + "x")
    with pytest.raises(errors.ChatTemplateError, match="larger than"):
        rendered()


GENERATION = {"tokenize": False, "add_generation_prompt": True}
ENDED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
)
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}<end>{% endfor %}"
THOUGHT = (
    "{% for m in messages %}{{ m.role }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<end>{% endfor %}"
)
OPEN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure: "}]
IN_PARTS = [{"role": "assistant", "content": [{"text": "a"}, {"text": "b"}, {"image": "c"}]}]
THINKS = [{"role": "assistant", "content": "x", "thinking": "so "}]


@pytest.mark.parametrize(
    ("template", "talk", "field"),
    [
        (ENDED, OPEN, True),
        (TRIMMED, OPEN, True),
        (TRIMMED, [{"role": "assistant", "content": ""}], True),
        (PARTS.replace("[{{ p.text }}]", "{% if p.text %}[{{ p.text }}]{% endif %}"), IN_PARTS, True),
        (THOUGHT, THINKS, "reasoning_content"),
        (THOUGHT, THINKS, "thinking"),
        (THOUGHT.replace("m.reasoning_content", "m.thinking"), THINKS, "reasoning_content"),
    ],
)
def test_final_message_is_continued(folder: Path, theirs: Any, template: str, talk: Any, field: bool | str) -> None:
    ours = ExLlamaV2Tokenizer(ExLlamaV2Config(folder))
    options: dict[str, Any] = {"chat_template": template, "continue_final_message": field}
    expected = theirs.apply_chat_template(talk, tokenize=False, **options)
    before = json.dumps(talk)
    assert ours.apply_chat_template(talk, **options) == expected
    assert ours.apply_chat_template(talk, False, **options) == expected
    assert json.dumps(talk) == before
    assert "<end>" not in expected.rsplit("<", 1)[-1]


@pytest.mark.parametrize(
    ("template", "talk", "field"),
    [
        (ENDED, [], True),
        (ENDED, [{"role": "assistant"}], True),
        (ENDED, OPEN, "reasoning_content"),
        (PARTS, [{"role": "assistant", "content": [{"image": "c"}]}], True),
        ("{% for m in messages %}{{ m.role }}{% endfor %}content", OPEN, True),
        ("{% for m in messages %}{{ m.content[:2] }}{% endfor %}", OPEN, True),
    ],
)
def test_final_message_that_cannot_be_continued(
    folder: Path, theirs: Any, template: str, talk: Any, field: bool | str
) -> None:
    ours = ExLlamaV2Tokenizer(ExLlamaV2Config(folder))
    options: dict[str, Any] = {"chat_template": template, "continue_final_message": field}
    with pytest.raises(ValueError, match=r".+"):
        theirs.apply_chat_template(talk, tokenize=False, **options)
    with pytest.raises(errors.ChatTemplateError, match="continue_final_message"):
        ours.apply_chat_template(talk, **options)


def test_keywords_of_transformers_are_not_variables(folder: Path) -> None:
    ours = ExLlamaV2Tokenizer(ExLlamaV2Config(folder))
    refused: dict[str, Any] = {
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt",
        "return_assistant_tokens_mask": True,
        "sanitize_control_tokens": True,
        "padding": True,
        "truncation": True,
        "max_length": 8,
        "tokenizer_kwargs": {"a": 1},
        "conversation": OPEN,
    }
    for name, value in refused.items():
        with pytest.raises(errors.InputError, match=name):
            ours.apply_chat_template(OPEN, chat_template=ENDED, **{name: value})
    with pytest.raises(errors.InputError, match="add_generation_prompt"):
        ours.apply_chat_template(OPEN, True, chat_template=ENDED, continue_final_message=True)
    found = ours.apply_chat_template(OPEN, chat_template="{{ tokenize is defined }}", tokenize=False, return_dict=None)
    assert found == "False"
    assert ours.apply_chat_template(OPEN, chat_template=ENDED).endswith("<go>")


@pytest.mark.parametrize("template", [THOUGHT, "{{ messages | tojson }}"])
@pytest.mark.parametrize(
    "names",
    [["reasoning"], ["thinking"], ["reasoning_content"], ["reasoning", "thinking"], ["thinking", "reasoning_content"]],
)
def test_reasoning_has_the_names_that_templates_read(
    folder: Path, theirs: Any, names: list[str], template: str
) -> None:
    talk = [{"role": "assistant", "content": "x", "reasoning_content": None, **{n: f"<{n}>" for n in names}}]
    expected = theirs.apply_chat_template(talk, chat_template=template, **GENERATION)
    assert names[0] in expected or "<think>" in expected
    ours = ExLlamaV2Tokenizer(ExLlamaV2Config(folder))
    assert ours.apply_chat_template(talk, chat_template=template) == expected


NAMES = ["bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token", "image_token"]
START = {"content": "<|im_start|>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


@pytest.mark.parametrize(
    "said",
    [
        dict.fromkeys(NAMES),
        {**dict.fromkeys(NAMES), "cls_token": "<|im_end|>", "sep_token": "<|im_end|>", "image_token": "<img>"},
        {**dict.fromkeys(NAMES), "bos_token": {"__type": "AddedToken", **START, "special": True}},
        {**dict.fromkeys(NAMES[:-1]), "eos_token": "<|im_start|>", "extra_special_tokens": {"image_token": "<img>"}},
        {**dict.fromkeys(NAMES), "extra_special_tokens": ["<img>"]},
    ],
)
def test_special_tokens_are_those_of_tokenizer_config(lab: Any, said: dict[str, Any]) -> None:
    """config.json's ids (259 and 260) do not count where tokenizer_config.json says something, null included."""
    folder = lab.write(bos_token_id=259, eos_token_id=260, pad_token_id=260)
    write_tokenizer(folder)
    template = "".join(f"[{n}: {{{{ {n} }}}} {{{{ {n} is defined }}}}]" for n in NAMES)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **said}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    expected = transformers.PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(TALK, **GENERATION)
    ours = ExLlamaV2Tokenizer(ExLlamaV2Config(folder))
    assert ours.apply_chat_template(TALK) == expected
    assert ours.apply_chat_template(TALK, bos_token="mine").startswith("[bos_token: mine True]")


def test_no_tools_are_tools(lab: Any) -> None:
    """transformers takes `tool_use` for an empty list of tools; None is none."""
    folder = lab.write()
    write_tokenizer(folder)
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ExLlamaV2Tokenizer(ExLlamaV2Config(folder))
    for tools, expected in ((None, "D"), ([], "T0"), (TOOLS, "T1")):
        assert ours.apply_chat_template(TALK, tools=tools) == expected
        assert theirs.apply_chat_template(TALK, tools=tools, **GENERATION) == expected
