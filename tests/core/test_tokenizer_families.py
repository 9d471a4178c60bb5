"""Tokenizers of every family against transformers on nasty strings, SentencePiece files, templates that are bombs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from exl_core import ExLlamaV2Config, ExLlamaV2Tokenizer, errors
from exl_core.tokenizer import sandbox

sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.covers("core: tokenizer"), pytest.mark.sampled(4)]

FIXTURE = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-fp16"
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def f(x, y):\n    return x + y  # sum",
    "日本語のテキストと中文文本",
    "Привет, мир! Ça va très bien, naïve café.",
    "שלום עולם مرحبا بالعالم",
    "1234567890 3.14159 1,000,000",
] * 4
# fmt: off
NASTY = [
    "", " ", "   leading", "trailing   ", "\n\n\t ", "\r\n", "a\u00a0b", "\u3000全角",
    "日本語のテキスト", "👨‍👩‍👧‍👦 family 👍🏽", "e\u0301 combining \u0300\u0301\u0302",
    "\u202eRTL \u05e9\u05dc\u05d5\u05dd\u202c", "مرحبا", "\x00\x01\x7f", "\ufeffbom",
    "\U0001f1e9\U0001f1ea\U00010348\U000e0001", "ﬁ ligature Ⅳ ½", "a" * 300, "</s><s><unk>", "<0x41>", "▁▁",
    "x\u200by",
]
# fmt: on


def folder_of(kind: str, folder: Path) -> Path:
    """A folder with a trained tokenizer.json of one family's shape."""
    if kind == "fixture":
        shutil.copy(FIXTURE / "tokenizer.json", folder)
        return folder
    unk = None if kind == "byte-level" else "<unk>"
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer: Any = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token=unk)
    elif kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = [f"<0x{b:02X}>" for b in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *alphabet])
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<keep>", special=False, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|im|>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ours(folder: Path, lab: Any, **options: Any) -> ExLlamaV2Tokenizer:
    (folder / "config.json").write_text(json.dumps({**lab.config, "vocab_size": 2048}))
    config = ExLlamaV2Config()
    config.model_dir = str(folder)
    config.prepare(no_tensors=True)
    return ExLlamaV2Tokenizer(config, **options)


@pytest.fixture(scope="module", params=["fixture", "byte-level", "metaspace", "unigram"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, lab: Any) -> tuple[Any, Any]:
    folder = folder_of(request.param, tmp_path_factory.mktemp(request.param))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return ours(folder, lab), theirs


def assert_same(mine: ExLlamaV2Tokenizer, theirs: Any, text: str) -> None:
    expected = theirs.encode(text, add_special_tokens=False)
    assert mine.encode(text, encode_special_tokens=True)[0].tolist() == expected
    assert mine.num_tokens(text, encode_special_tokens=True) == len(expected)
    ids = torch.tensor(expected, dtype=torch.int64)
    kept = [i for i in expected if i != mine.pad_token_id or mine.pad_token_id in mine.eos_token_ids]
    decoded = mine.decode(ids, decode_special_tokens=True)
    assert decoded == theirs.decode(kept, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", [*NASTY, *CORPUS[:6], "x<keep>y <keep>", "<|im|>hello <|im|>\n"])
def test_transformers_agrees(pair: tuple[Any, Any], text: str) -> None:
    assert_same(*pair, text)


PIECE = st.sampled_from(["<keep>", "<|im|>", "<s>", "</s>", "<unk>", "<0x41>", "▁", "  ", "\n", "\u200d"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@examples(250, 25)
@given(st.lists(st.tuples(TEXT, PIECE, TEXT).map("".join) | TEXT, min_size=10, max_size=10))
def test_transformers_agrees_on_random_unicode(pair: tuple[Any, Any], texts: list[str]) -> None:
    """Ten strings a time: ten thousand over the four families."""
    for text in texts:
        assert_same(*pair, text)


# ------------------------------------------------------------------------------------------------------ SentencePiece


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, lab: Any) -> tuple[Any, Any, Path]:
    """A folder with a tokenizer.model as Llama 2 has it: byte fallback, no normalisation of spaces."""
    folder = tmp_path_factory.mktemp(f"spm-{request.param}")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 10),
        model_prefix=str(folder / "tokenizer"),
        model_type=request.param,
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.98,
        user_defined_symbols=["<user>"],
        minloglevel=2,
    )
    (folder / "added_tokens.json").write_text('{"<|im|>": 340, "<|im|>x": 341}')
    plain = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return ours(folder, lab, lazy_init=False), plain, folder


@pytest.mark.covers("core: token-text")
@pytest.mark.parametrize("text", [*NASTY, *CORPUS[:6], "a<user>b"])
def test_sentencepiece_s_own_ids_and_text(spm: tuple[Any, Any, Path], text: str) -> None:
    tokenizer, plain, _ = spm
    ids = plain.encode(text)
    assert tokenizer.encode(text)[0].tolist() == ids
    assert tokenizer.decode(torch.tensor(ids, dtype=torch.int64)) == plain.decode(ids)
    assert plain.decode(ids) == text.removeprefix("") or "\x00" in text or "▁" in text


@examples(150, 15)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_bytes_of_pieces_are_the_text(spm: tuple[Any, Any, Path], text: str) -> None:
    tokenizer, plain, _ = spm
    table = tokenizer.get_id_to_bytes_list()
    ids = tokenizer.encode(text)[0].tolist()
    joined = b"".join(table[i] for i in ids).decode("utf-8", "replace")
    assert joined in (plain.decode(ids), " " + plain.decode(ids))


def test_special_tokens_of_a_sentencepiece_model(spm: tuple[Any, Any, Path]) -> None:
    tokenizer, plain, _ = spm
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.actual_vocab_size == 342
    assert tokenizer.single_id("<|im|>") == 340
    ids = tokenizer.encode("hello<|im|>xthe<|im|> fox</s>", encode_special_tokens=True, add_bos=True)
    assert ids[0, 0] == 1
    assert ids[0, -1] == 2
    assert ids[0].tolist().count(341) == 1
    assert ids[0].tolist().count(340) == 1
    assert tokenizer.decode(ids[0], decode_special_tokens=True) == "<s> hello<|im|>xthe<|im|> fox</s>"
    assert tokenizer.decode(ids[0]) == "hellothe fox"
    text = "<s>plain</s>"
    assert tokenizer.encode(text)[0].tolist() == plain.encode(text)
    padded, offsets = tokenizer.encode(["the fox", "x"], return_offsets=True)
    assert padded.shape[0] == 2
    assert offsets.tolist() == [0, -(padded.shape[1] - len(plain.encode("x")))]


def test_tables_of_a_sentencepiece_model(spm: tuple[Any, Any, Path]) -> None:
    tokenizer, plain, _ = spm
    pieces = tokenizer.get_id_to_piece_list()
    ords = tokenizer.get_id_to_ord_list()
    assert len(pieces) == 342
    newline = plain.piece_to_id("<0x0A>")
    assert (ords[newline], pieces[newline]) == (10, "\n")
    assert pieces[plain.piece_to_id("▁")] == " "
    assert tokenizer.newline_token_id == plain.encode("\n")[-1]
    prefixes = tokenizer.get_prefix_to_ids_dict()
    assert all(pieces[i].startswith(p) for p, ids in list(prefixes.items())[:50] for i in ids)


def test_the_file_that_is_read_first(spm: tuple[Any, Any, Path], lab: Any, tmp_path: Path) -> None:
    shutil.copy(spm[2] / "tokenizer.model", tmp_path)
    shutil.copy(FIXTURE / "tokenizer.json", tmp_path)
    assert ours(tmp_path, lab).tokenizer_model.file.name == "tokenizer.json"
    assert ours(tmp_path, lab, force_spm=True).tokenizer_model.file.name == "tokenizer.model"


@pytest.mark.parametrize("raw", [b"", b"\x00" * 50, b"not a model", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_files_that_are_no_sentencepiece_models(tmp_path: Path, lab: Any, raw: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(errors.TokenizerError, match=r"tokenizer\.model"):
        ours(tmp_path, lab)


# ------------------------------------------------------------------------------------------------------ template bombs


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, lab: Any) -> ExLlamaV2Tokenizer:
    return ours(folder_of("fixture", tmp_path_factory.mktemp("plain")), lab)


BOMBS = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "product": "{{ 'x' * 10000000000 }}",
    "power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "replacing": "{% set n = namespace(s='xx') %}"
    "{% for i in range(9) %}{% set n.s = n.s|replace('x', n.s) %}{% endfor %}",
    "padding": "{{ 'x'|center(100000000000) }}",
    "format": "{{ '%100000000000d' % 1 }}",
    "long output": "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.covers("core: token-text")
@pytest.mark.parametrize("name", BOMBS)
def test_template_bombs_end_with_an_error(
    plain: ExLlamaV2Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sandbox, "SECONDS", 1.5)
        with pytest.raises(errors.ChatTemplateError):
            plain.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=BOMBS[name])
    prompt = plain.apply_chat_template([{"role": "user", "content": "é😀"}], chat_template="{{ messages[0].content }}")
    assert prompt == "é😀"


def test_the_time_of_a_template_begins_when_its_process_is_there(
    plain: ExLlamaV2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine Python alone may take longer to start than a template may take."""
    seen: list[tuple[str, float]] = []

    class Timer:
        def __init__(self, seconds: float, _: object) -> None:
            self.seconds = seconds

        def start(self) -> None:
            seen.append(("begins", self.seconds))

        def cancel(self) -> None:
            seen.append(("is over", self.seconds))

    monkeypatch.setattr(sandbox, "pool", sandbox.TemplatePool(1))
    monkeypatch.setattr(sandbox.threading, "Timer", Timer)
    for _ in range(2):
        assert plain.apply_chat_template([{"content": "é"}], chat_template="{{ messages[0].content }}") == "é"
    coming_up, rendering = [
        [("begins", seconds), ("is over", seconds)] for seconds in (sandbox.START_SECONDS, sandbox.SECONDS)
    ]
    assert seen == coming_up + rendering + rendering


def test_templates_take_plain_data_only(plain: ExLlamaV2Tokenizer) -> None:
    with pytest.raises(errors.ChatTemplateError, match="plain data"):
        plain.apply_chat_template([{"role": "user", "content": object()}], chat_template="{{ messages }}")
    found = plain.apply_chat_template(({"a": (1, 2)},), chat_template="{{ messages[0].a }}{{ x|sort }}", x={3})
    assert found == "[1, 2][3]"
