"""Chat templates: what transformers renders, from every place where a folder may keep them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from exl_core import ExLlamaV2Config, ExLlamaV2Tokenizer, errors

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
from vision_models import write_tokenizer  # noqa: E402

pytestmark = pytest.mark.covers("core.md: tokenizer", "core.md: better-11.6-text")

CALL = {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": [1, 2.5, None, True], "é": "ü<"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": 'You are <b>"né"</b> & co'},
    {"role": "user", "content": "hi ✓\n there"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "42"}]},
]
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "Get 'x' <y>", "parameters": PARAMETERS}}]
VARIABLES = {"documents": [{"title": "t", "text": "x"}], "enable_thinking": False, "custom": {"a": [1]}}

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
def test_what_transformers_cannot_render_is_an_error(folder: Path, theirs: Any, name: str) -> None:
    with pytest.raises(Exception, match=r".+"):
        theirs.apply_chat_template(TALK, tokenize=False, chat_template=FAIL[name])
    with pytest.raises(errors.ChatTemplateError):
        ExLlamaV2Tokenizer(ExLlamaV2Config(folder)).apply_chat_template(TALK, chat_template=FAIL[name])


def test_places_of_templates(tmp_path: Path, lab: Any) -> None:
    """As transformers 5 saves them, in tokenizer_config.json, and as processors kept them once; the first counts."""
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
