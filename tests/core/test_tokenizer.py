"""The tokenizer: encoding, decoding, special tokens, tables, chat templates, and files that are no tokenizers."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Tokenizer, errors

pytestmark = pytest.mark.covers("core: tokenizer")

FIXTURE = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-fp16"
NASTY = [
    "",
    " ",
    "\n\n\t ",
    "def f(x):\n    return x",
    "日本語のテキスト",
    "👨‍👩‍👧‍👦 family 👍🏽",
    "e\u0301 combining \u202eRTL \u05e9\u05dc\u05d5\u05dd",
    "\x00\x01\x7f",
    "</s><s><unk>",
    "a" * 500,
]


def tokenizer_in(folder: Path, lab: Any, **config: Any) -> ExLlamaV2Tokenizer:
    """A tokenizer of the files in `folder`, with a config.json of its own."""
    (folder / "config.json").write_text(json.dumps({**lab.config, "vocab_size": 2048, **config}))
    settings_ = ExLlamaV2Config()
    settings_.model_dir = str(folder)
    settings_.prepare(no_tensors=True)
    return ExLlamaV2Tokenizer(settings_)


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A folder with the fixture's byte-level tokenizer, to be edited."""
    shutil.copy(FIXTURE / "tokenizer.json", tmp_path)
    shutil.copy(FIXTURE / "tokenizer_config.json", tmp_path)
    return tmp_path


@pytest.fixture
def metaspace(tmp_path: Path) -> Path:
    """A folder with a Llama-2-like tokenizer: U+2581 for spaces, byte fallback, a stripped first space."""
    words = ["▁", "▁hello", "▁world", "hello", "world", "h", "e", "l", "o", "w", "r", "d", "é", "▁h", "▁w"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for word in words:
        vocab[word] = len(vocab)
    merges = [("▁", "h"), ("▁", "w")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture(scope="module")
def fixture_tokenizer() -> ExLlamaV2Tokenizer:
    return ExLlamaV2Tokenizer(ExLlamaV2Config(FIXTURE))


# ---------------------------------------------------------------------------------------------------- text and ids


@pytest.mark.parametrize("text", NASTY)
def test_round_trip(fixture_tokenizer: ExLlamaV2Tokenizer, text: str) -> None:
    ids = fixture_tokenizer.encode(text)
    assert ids.dtype == torch.int64
    assert ids.shape == (1, fixture_tokenizer.num_tokens(text))
    assert fixture_tokenizer.decode(ids[0]) == text
    assert fixture_tokenizer.decode(ids) == [text]
    assert fixture_tokenizer.encode_unspecial(text) == ids[0].tolist()


@pytest.mark.covers("core: token-text")
@examples(200, 20)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_bytes_of_the_ids_are_the_text(fixture_tokenizer: ExLlamaV2Tokenizer, text: str) -> None:
    table = fixture_tokenizer.get_id_to_bytes_list()
    ids = fixture_tokenizer.encode_unspecial(text)
    assert b"".join(table[i] for i in ids) == text.encode()


@pytest.mark.covers("core: token-text")
def test_a_long_text_is_encoded_as_a_short_one_and_lets_others_run(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    """A server's event loop goes on while a thread encodes a long prompt: the library must release the GIL."""
    backend: Any = fixture_tokenizer.tokenizer_model
    piece = "All the words of a long prompt, naïve ones. "
    text = piece * 10_000
    assert backend.encode(piece * 100) == backend.tokenizer.encode(piece * 100, add_special_tokens=False).ids
    begun, ended = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        backend.encode(text)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    turns = 0
    while not ended.is_set():
        time.sleep(0.0001)
        turns += 1
    thread.join()
    assert turns >= 10, "a held GIL gives one or two"


def test_special_tokens_are_text_unless_asked(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    t = fixture_tokenizer
    assert (t.bos_token_id, t.eos_token_id, t.unk_token_id) == (1, 2, 0)
    assert (t.bos_token, t.eos_token, t.unk_token, t.pad_token) == ("<s>", "</s>", "<unk>", "")
    plain = t.encode("<s>hi</s>")
    assert not {0, 1, 2} & set(plain[0].tolist())
    assert t.decode(plain[0]) == "<s>hi</s>"
    special = t.encode("<s>hi</s>", encode_special_tokens=True)
    assert special[0, 0] == 1
    assert special[0, -1] == 2
    assert special[0, 1:-1].tolist() == t.encode_unspecial("hi")
    assert t.encode_special("<s>") == [1]
    assert t.decode(special[0]) == "hi"
    assert t.decode(special[0], decode_special_tokens=True) == "<s>hi</s>"


@pytest.mark.covers("core: token-ids")
def test_control_ids_around_the_text(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    t = fixture_tokenizer
    bare = t.encode("abc")[0].tolist()
    assert t.encode("abc", add_bos=True, add_eos=True)[0].tolist() == [1, *bare, 2]
    assert t.encode("<s>", add_bos=True, encode_special_tokens=True)[0].tolist() == [1, 1]
    assert t.num_tokens("abc", add_bos=True) == len(bare) + 1
    assert t.encode("", add_bos=True).tolist() == [[1]]
    t2 = t.encode("abc", add_bos=None)  # tokenizer_config.json says nothing
    assert t2[0].tolist() == bare


@pytest.mark.covers("core: token-ids")
def test_lists_are_padded(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    t = fixture_tokenizer
    texts = ["one two three four", "", "five"]
    ids, offsets = t.encode(texts, return_offsets=True)
    assert ids.shape[0] == 3
    assert offsets.dtype == torch.int32
    longest = ids.shape[1]
    for row, text, offset in zip(ids, texts, offsets.tolist(), strict=True):
        bare = t.encode_unspecial(text)
        assert offset == len(bare) - longest
        assert row.tolist() == [t.pad_token_id] * -offset + bare
    mask = t.offsets_mask(ids, offsets)
    assert mask.dtype == torch.half
    assert torch.equal(mask, t.padding_mask(ids))
    assert mask[1].isinf().all()
    right = t.encode(texts, padding_side="right")
    assert right[2, : len(t.encode_unspecial("five"))].tolist() == t.encode_unspecial("five")
    assert t.encode([]).shape == (0, 0)
    assert t.encode(["", ""]).shape == (2, 0)
    assert t.encode("").dtype == torch.int64
    assert t.encode("x", return_offsets=True)[1].tolist() == [0]


def test_decode_takes_tensors_and_lists_of_them(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    t = fixture_tokenizer
    a, b = t.encode("one")[0], t.encode("two three")[0]
    assert t.decode([a, b]) == ["one", "two three"]
    assert t.decode(torch.tensor([2048, 5000, -1, *a.tolist()])) == "one"
    for bad in ("text", 3, [[1, 2]], torch.tensor([1.5]), torch.zeros(1, 1, 1, dtype=torch.int64)):
        with pytest.raises(errors.InputError):
            t.decode(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [None, 3, b"text", ["a", 3], ["a", None], "\ud800", ["a", "b \udfff"]])
def test_inputs_that_are_no_text(fixture_tokenizer: ExLlamaV2Tokenizer, bad: Any) -> None:
    with pytest.raises(errors.InputError):
        fixture_tokenizer.encode(bad)
    with pytest.raises(errors.InputError, match="padding_side"):
        fixture_tokenizer.encode("x", padding_side="middle")  # type: ignore[arg-type]
    if not isinstance(bad, list):
        for call in (fixture_tokenizer.num_tokens, fixture_tokenizer.encode_special):
            with pytest.raises(errors.InputError):
                call(bad)


def test_cached_encode_is_bounded(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    t = fixture_tokenizer
    first = t.cached_encode_str("text 0")
    assert t.cached_encode_str("text 0") is first
    for i in range(150):
        t.cached_encode_str(f"text {i}")
    last = t.cached_encode_str("text 149")
    assert t.cached_encode_str("text 149") is last
    again = t.cached_encode_str("text 0")
    assert again is not first, "all of them are kept"
    assert torch.equal(again, first)


def test_other_objects_are_no_embeddings(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    with pytest.raises(errors.InputError, match="ExLlamaV2MMEmbedding"):
        fixture_tokenizer.encode("x", embeddings=[object()])  # type: ignore[list-item]
    assert fixture_tokenizer.encode("x", embeddings=[]).shape[0] == 1


# --------------------------------------------------------------------------------------------------- control ids, pad


def test_pad_rules(byte_level: Path, lab: Any) -> None:
    def pad(**config: Any) -> int:
        return tokenizer_in(byte_level, lab, **config).pad_token_id

    assert pad() == 2  # eos, as nothing says pad
    assert pad(pad_token_id=0) == 0
    assert pad(pad_token_id=7) == 7
    assert pad(eos_token_id=1, bos_token_id=1) == -1
    (byte_level / "tokenizer_config.json").write_text('{"pad_token": {"content": "<unk>"}}')
    assert pad() == 0


@pytest.mark.covers("core: token-ids")
def test_pad_id_zero_pads_and_vanishes(byte_level: Path, lab: Any) -> None:
    t = tokenizer_in(byte_level, lab, pad_token_id=0)
    ids, offsets = t.encode(["one two", "x"], return_offsets=True)
    assert ids[1].tolist()[: -int(offsets[1])] == [0] * -int(offsets[1])
    assert t.decode(ids) == ["one two", "x"]
    assert t.decode(ids, decode_special_tokens=True) == ["one two", "x"]


@pytest.mark.covers("core: token-ids")
def test_all_eos_ids(byte_level: Path, lab: Any) -> None:
    (byte_level / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    t = tokenizer_in(byte_level, lab, eos_token_id=[2, 5])
    assert t.eos_token_id == 2
    assert t.eos_token_ids == [2, 5, 9]
    assert t.decode(torch.tensor([40, 5, 41, 9, 2])) == t.decode(torch.tensor([40, 41]))


@pytest.mark.covers("core: token-ids")
def test_decoding_up_to_the_first_eos(byte_level: Path, lab: Any) -> None:
    t = tokenizer_in(byte_level, lab, eos_token_id=[2, 5], pad_token_id=2)
    whole, front = t.decode(torch.tensor([40, 41, 42, 43])), t.decode(torch.tensor([40, 41]))
    row = torch.tensor([2, 2, 40, 41, 5, 42, 43, 2])  # padded with EOS on the left
    assert t.decode(row) == whole
    assert t.decode(row, truncate_at_eos=True) == front
    assert t.decode(row[None].repeat(2, 1), truncate_at_eos=True) == [front] * 2
    assert t.decode([row, row[5:]], truncate_at_eos=True) == [front, t.decode(torch.tensor([42, 43]))]
    assert t.decode(row, decode_special_tokens=True, truncate_at_eos=True) == front
    assert t.decode(torch.tensor([2, 2]), truncate_at_eos=True) == ""
    assert t.decode(torch.tensor([40, 41]), truncate_at_eos=True) == front


def test_control_ids_from_tokenizer_config(byte_level: Path, lab: Any) -> None:
    (byte_level / "tokenizer_config.json").write_text(
        '{"bos_token": null, "eos_token": {"content": "<s>"}, "add_bos_token": true, "add_eos_token": true}'
    )
    t = tokenizer_in(byte_level, lab, bos_token_id=None, eos_token_id=None)
    assert (t.bos_token_id, t.eos_token_id, t.bos_token) == (None, 1, "")
    assert t.encode("a", add_bos=None, add_eos=None)[0].tolist() == [*t.encode_unspecial("a"), 1]


@pytest.mark.parametrize("token_id", [2**31, 2**40])
def test_control_ids_far_beyond_the_vocabulary_have_no_text(byte_level: Path, lab: Any, token_id: int) -> None:
    t = tokenizer_in(byte_level, lab, bos_token_id=token_id)
    assert (t.bos_token_id, t.bos_token) == (token_id, "")


@pytest.mark.parametrize("kind", [ExLlamaV2, ExLlamaV2Tokenizer])
@pytest.mark.parametrize("bad", ["a/folder", None, 5])
def test_a_folder_in_the_place_of_its_config(kind: Any, bad: Any) -> None:
    with pytest.raises(errors.InputError, match=r"ExLlamaV2Config\(folder\)"):
        kind(bad)


def test_added_tokens_beyond_the_vocabulary(byte_level: Path, lab: Any) -> None:
    (byte_level / "added_tokens.json").write_text('{"<|extra|>": 2048, "<|far|>": 2060}')
    t = tokenizer_in(byte_level, lab)
    assert t.get_vocab_size() == t.actual_vocab_size == 2061
    assert t.single_id("<|far|>") == 2060
    assert t.encode("a<|extra|>", encode_special_tokens=True)[0, -1] == 2048
    pieces = t.get_id_to_piece_list()
    assert len(pieces) == 2061
    assert pieces[2060] == "<|far|>"
    assert "_undefined_token_" in pieces[2050]
    assert pieces[2050][0] == pieces[2050][-1] == "\ufffd"


def test_ordinary_added_tokens(byte_level: Path, lab: Any) -> None:
    data = json.loads((byte_level / "tokenizer.json").read_text())
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    data["added_tokens"].append({"id": 2048, "content": "<tool 日>", **added})
    (byte_level / "tokenizer.json").write_text(json.dumps(data))
    t = tokenizer_in(byte_level, lab)
    ids = t.encode("a<tool 日>b")
    assert 2048 in ids[0].tolist()
    assert t.decode(ids[0]) == "a<tool 日>b"
    assert b"".join(t.get_id_to_bytes_list()[i] for i in ids[0].tolist()).decode() == "a<tool 日>b"


def test_bytes_of_added_tokens_outside_the_alphabet(byte_level: Path, lab: Any) -> None:
    """Each character whose code is that of a byte, in the alphabet of byte-level pieces or not, and others."""
    data = json.loads((byte_level / "tokenizer.json").read_text())
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    # The soft hyphen of each is outside the alphabet: such a token is its own text.
    texts = [f"\u00ad{chr(code)}<{number}>" for number, code in enumerate([*range(1, 256), 0x3000, 0x1F600])]
    data["added_tokens"] += [{"id": 2048 + n, "content": text, **added} for n, text in enumerate(texts)]
    (byte_level / "tokenizer.json").write_text(json.dumps(data))
    t = tokenizer_in(byte_level, lab)
    assert t.get_id_to_bytes_list()[2048:] == [text.encode() for text in texts]


# --------------------------------------------------------------------------------------------------------------- tables


def test_piece_list_is_each_id_on_its_own(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    t = fixture_tokenizer
    pieces, special = t.get_id_to_piece_list(), t.get_id_to_piece_list(include_special_tokens=True)
    assert len(pieces) == len(special) == 2048
    assert pieces[:3] == ["", "", ""]
    assert special[:3] == ["<unk>", "<s>", "</s>"]
    for token_id in range(3, 2048):
        assert pieces[token_id] == t.tokenizer.decode([token_id])
    assert any("\ufffd" in p for p in pieces)


def test_prefix_tables_against_the_definition(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    t = fixture_tokenizer
    pieces, prefixes, by_id = t.get_id_to_piece_list(), t.get_prefix_to_ids_dict(), t.get_prefix_id_to_ids_dict()
    assert set(prefixes) == {p for p in pieces if p}
    for piece in [" ", "i", "im", "import", "\n", *pieces[500:520]]:
        expected = [i for i, p in enumerate(pieces) if p.startswith(piece)]
        assert prefixes[piece] == expected
        assert by_id[t.get_piece_to_id_dict()[piece]] == expected
    assert by_id[1] == [1]
    assert set(by_id) == set(range(2048))
    assert t.get_prefix_to_ids_dict() is prefixes


def test_tries(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    pieces = fixture_tokenizer.get_id_to_piece_list()

    def leaf(root: Any, text: str) -> list[int]:
        for character in text:
            root = root.children[character]
        found: list[int] = root.leaf
        return found

    for text in ("import", " def", "\n"):
        assert leaf(fixture_tokenizer.get_char_trie(), text) == [i for i, p in enumerate(pieces) if p == text]
    folded = [i for i, p in enumerate(pieces) if p.lower() == "error"]
    assert leaf(fixture_tokenizer.get_char_trie_ci(), "error") == folded
    assert fixture_tokenizer.get_char_trie().leaf == []


def test_ords_and_single_ids(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    t = fixture_tokenizer
    ords = t.get_id_to_ord_list()
    assert ords[t.single_id("a") or -1] == ord("a")
    assert t.single_id("</s>") == 2
    assert t.single_id("no such piece") is None
    assert t.single_token(7).tolist() == [[7]]
    assert t.decode(torch.tensor([t.newline_token_id])) == "\n"
    assert t.decode(torch.tensor([t.space_token_id])) == " "


@pytest.mark.covers("core: token-text")
def test_tables_are_built_once_by_many_threads() -> None:
    t = ExLlamaV2Tokenizer(ExLlamaV2Config(FIXTURE))
    found: list[Any] = []
    workers = [threading.Thread(target=lambda: found.append(t.get_prefix_id_to_ids_dict())) for _ in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len({id(x) for x in found}) == 1


# ------------------------------------------------------------------------------------------------ another kind of tok


def test_metaspace_and_byte_fallback(metaspace: Path, lab: Any) -> None:
    t = tokenizer_in(metaspace, lab)
    ids = t.encode_unspecial("hello wéd 日")
    assert t.decode(torch.tensor(ids)) == "hello wéd 日"
    table = t.get_id_to_bytes_list()
    assert b"".join(table[i] for i in ids).decode() == " hello wéd 日"  # the decoder strips the first space of a text
    pieces = t.get_id_to_piece_list()
    assert pieces[t.tokenizer.piece_to_id("▁h") or 0] == " h"
    assert pieces[3 + 0xE6] == "\ufffd"
    assert t.get_id_to_ord_list()[3 + 0xE6] == 0xE6
    assert t.get_id_to_ord_list()[3 + 65] == 65
    assert t.tokenizer.space_char() == "▁"


# ---------------------------------------------------------------------------------------------------------------- chat

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [{"role": "user", "content": " Hi "}]


def test_chat_template_of_tokenizer_config(byte_level: Path, lab: Any) -> None:
    (byte_level / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    t = tokenizer_in(byte_level, lab)
    prompt = "<s><|im_start|>user\nHi<|im_end|>\n"
    assert t.apply_chat_template(TALK) == prompt + "<|im_start|>assistant\n"
    assert t.apply_chat_template(TALK, add_generation_prompt=False) == prompt
    assert t.apply_chat_template(TALK, chat_template="{{ messages | tojson }}{{ x }}", x=3) == (
        '[{"role": "user", "content": " Hi "}]3'
    )


@pytest.mark.covers("core: token-text")
def test_chat_template_file_and_named_templates(byte_level: Path, lab: Any) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    (byte_level / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    t = tokenizer_in(byte_level, lab)
    assert t.apply_chat_template(TALK) == "D"
    assert t.apply_chat_template(TALK, tools=[{}, {}]) == "T2"
    assert t.apply_chat_template(TALK, chat_template="tool_use", tools=[]) == "T0"
    with pytest.raises(errors.ChatTemplateError, match="tool_use"):
        t.apply_chat_template(TALK, chat_template="other")
    (byte_level / "chat_template.jinja").write_text(
        "F{% generation %}x{% endgeneration %}{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}"
    )
    assert tokenizer_in(byte_level, lab).apply_chat_template(TALK) == "Fx1"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% if %}",
        "{{ 1 // 0 }}",
        "{{ undefined_name.attribute }}",
    ],
)
def test_templates_that_misbehave(fixture_tokenizer: ExLlamaV2Tokenizer, template: str) -> None:
    talk = [dict(TALK[0])]
    with pytest.raises(errors.ChatTemplateError):
        fixture_tokenizer.apply_chat_template(talk, chat_template=template)
    assert talk == TALK


def test_no_template(fixture_tokenizer: ExLlamaV2Tokenizer) -> None:
    with pytest.raises(errors.ChatTemplateError, match="no chat template"):
        fixture_tokenizer.apply_chat_template(TALK)


# ----------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b"{}", b'{"model": {}}', b'{"model": {"type": "BPE", "vocab": 3}}', b"[" * 50_000],
)
def test_unreadable_tokenizer(tmp_path: Path, lab: Any, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(errors.TokenizerError, match=r"tokenizer\.json"):
        tokenizer_in(tmp_path, lab)


def test_missing_tokenizer_and_sentencepiece(tmp_path: Path, byte_level: Path, lab: Any) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="No supported tokenizer found"):
        tokenizer_in(folder, lab)
    t = tokenizer_in(byte_level, lab)
    with pytest.raises(errors.TokenizerFileError, match=r"no tokenizer\.model"):
        ExLlamaV2Tokenizer(t.config, force_spm=True)


def test_broken_side_files(byte_level: Path, lab: Any) -> None:
    (byte_level / "tokenizer_config.json").write_text("{")
    with pytest.raises(errors.ConfigError, match=r"tokenizer_config\.json"):
        tokenizer_in(byte_level, lab)
    (byte_level / "tokenizer_config.json").unlink()
    (byte_level / "added_tokens.json").write_text('{"x": "y"}')
    with pytest.raises(errors.ConfigTypeError, match=r"added_tokens\.json"):
        tokenizer_in(byte_level, lab)
