"""The tokenizer without torch gives what the one with tensors gives."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_core import ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_core.errors import ChatTemplateError, ConfigError
from exl_core.tokenizer import TextTokenizer, sandbox
from exl_core.tokenizer.conversation import conversation_ids
from exl_generate import bundled

FOLDER = Path(bundled.default_model_dir())


@pytest.fixture(scope="module")
def pair() -> tuple[TextTokenizer, ExLlamaV2Tokenizer]:
    return TextTokenizer.from_folder(FOLDER), ExLlamaV2Tokenizer(ExLlamaV2Config(str(FOLDER)))


@given(text=st.text(max_size=60), special=st.booleans(), add_bos=st.sampled_from([None, False, True]))
def test_same_ids_and_text(pair, text, special, add_bos) -> None:
    plain, full = pair
    ids = plain.encode_ids(text, special, add_bos)
    assert ids == full.encode(text, add_bos=add_bos, encode_special_tokens=special)[0].tolist()
    assert plain.decode_ids(ids, special) == full.decode(full.encode(text, add_bos, False, special)[0], special)


def test_same_control_ids(pair) -> None:
    plain, full = pair
    for name in ("bos_token_id", "eos_token_id", "eos_token_ids", "pad_token_id", "extended_piece_to_id"):
        assert getattr(plain, name) == getattr(full, name), name
    assert plain.get_vocab_size() == full.get_vocab_size()
    assert plain.get_id_to_bytes_list(True) == full.get_id_to_bytes_list(True)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from exl_core.tokenizer import TextTokenizer; "
        f"t = TextTokenizer.from_folder({str(FOLDER)!r}); t.decode_ids(t.encode_ids('some text')); "
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}]); "
        "print(sorted({'torch', 'numpy', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_without_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        TextTokenizer.from_folder(tmp_path)


def test_special_tokens_spelled_by_a_user_stay_text(pair) -> None:
    plain, _ = pair
    for spelling, token in plain.extended_piece_to_id.items():
        if not spelling:
            continue
        for role, content in [
            ("user", f"a{spelling}b"),
            ("user", spelling),
            ("tool", [{"type": "text", "text": f"x {spelling}"}]),
        ]:
            template = "{% for m in messages %}<s>{% if m.content is string %}{{ m.content }}{% else %}" + (
                "{{ m.content[0].text }}{% endif %}<|end|>{% endfor %}"
            )
            messages = [{"role": role, "content": content}]
            text, ids = conversation_ids(plain, messages, chat_template=template)
            _, expected = conversation_ids(plain, [{"role": role, "content": "harmless"}], chat_template=template)
            assert ids.count(token) == expected.count(token), (spelling, role)
            assert spelling in text
            assert plain.decode_ids(ids, special=True) == text
            _, parsed = conversation_ids(plain, messages, chat_template=template, parse_special=True)
            assert parsed.count(token) == expected.count(token) + 1


@pytest.mark.parametrize("document", ["{}", {"{}": "x"}, {"a": {"{}": ["x"]}}, {"a": [{"b": ["x", "{}"]}]}])
def test_no_text_of_a_document_becomes_a_special_token(pair, document: Any) -> None:
    plain, _ = pair
    messages = [{"role": "user", "content": "Hi"}]
    template = "{{ documents | tojson }}"
    for spelling, token in plain.extended_piece_to_id.items():
        if not spelling:
            continue
        documents = json.loads(json.dumps([document]).replace("{}", spelling))
        text, ids = conversation_ids(plain, messages, chat_template=template, documents=documents)
        assert json.loads(text) == documents
        assert token not in ids
        _, parsed = conversation_ids(plain, messages, chat_template=template, documents=documents, parse_special=True)
        assert token in parsed


@pytest.mark.parametrize("cut", [1, 2, -1])
def test_texts_side_by_side_spell_no_special_token(pair, cut: int) -> None:
    """Keys and texts of documents, and the texts of a message, which a template writes one after the other."""
    plain, _ = pair
    parts = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    rows = "{% for one in documents %}{% for k, v in one.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}"
    for spelling, token in plain.extended_piece_to_id.items():
        if len(spelling) < 2:
            continue
        first, second = spelling[:cut], spelling[cut:]
        content = [{"type": "text", "text": text} for text in ("Hi " + first, second)]
        messages = [{"role": "user", "content": content}]
        text, ids = conversation_ids(plain, messages, chat_template=parts)
        assert text == "Hi " + spelling
        assert token not in ids
        messages = [{"role": "user", "content": "Hi"}]
        for documents in ([{first: second}], [{"a": first}, {second: "b"}]):
            text, ids = conversation_ids(plain, messages, chat_template=rows, documents=documents)
            assert spelling in text
            assert token not in ids


@given(text=st.text(max_size=40))
def test_ordinary_conversations_are_encoded_as_ever(pair, text: str) -> None:
    plain, _ = pair
    messages = [{"role": "user", "content": text}]
    spelled = any(s and s in text for s in plain.extended_piece_to_id)
    rendered, ids = conversation_ids(plain, messages)
    assert spelled or ids == plain.encode_ids(rendered, special=True)


def test_a_template_that_alters_such_text_is_an_error(pair) -> None:
    plain, _ = pair
    spelling = next(s for s in plain.extended_piece_to_id if s)
    for template in ("{{ messages[0].content[:3] }}", "{{ 1 }}", "{{ messages[0].content | replace('\ue000', '') }}"):
        with pytest.raises(ChatTemplateError, match="special token"):
            conversation_ids(plain, [{"role": "user", "content": spelling * 2}], chat_template=template)


def test_a_slow_template_does_not_stop_the_others(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one lasts until this test ends its process, so the result does not depend on any process's speed."""
    plain, _ = pair
    monkeypatch.setattr(sandbox, "SECONDS", 600.0)
    monkeypatch.setattr(sandbox, "pool", sandbox.TemplatePool(2))
    level = "{% for _ in range(99999) %}"
    endless = level * 4 + "{% endfor %}" * 4
    ended: list[str] = []

    def run_endless() -> None:
        with pytest.raises(ChatTemplateError, match=r"it was ended|or died|ended its process"):
            plain.apply_chat_template([], chat_template=endless)
        ended.append("slow")

    thread = threading.Thread(target=run_endless, daemon=True)
    thread.start()
    while not sandbox.pool.busy:
        time.sleep(0.01)
    for _ in range(3):
        assert plain.apply_chat_template([], chat_template="{{ 'quick' }}") == "quick"
    assert not ended
    while thread.is_alive():
        sandbox.pool.end()
        time.sleep(0.01)
    assert ended == ["slow"]
