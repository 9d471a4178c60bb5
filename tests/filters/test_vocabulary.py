"""Vocabulary: tables against brute force, and the same bytes from every kind of tokenizer."""

import gc
import json
import weakref
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_filters import FilterUsageError, Vocabulary, bits, vocabulary_of
from exl_filters.readers import from_tokenizer_json
from exl_filters.trie import ByteTrie

MODEL = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-fp16" / "tokenizer.json"


@given(st.lists(st.binary(max_size=4)), st.binary(max_size=4))
def test_trie_is_the_sorted_list_of_tokens(tokens, probe):
    trie = ByteTrie(tokens)
    node = trie.find(probe)
    under = [i for i, t in enumerate(tokens) if t and t.startswith(probe)]
    exact = [i for i, t in enumerate(tokens) if t and t == probe]
    assert (node >= 0) == (bool(under) or not probe)
    if node >= 0:
        assert sorted(trie.under(node).tolist()) == under
        assert sorted(trie.exact(node)) == exact
        children = dict(trie.children(node))
        assert children == {b: trie.child(node, b) for b in range(256) if trie.child(node, b) >= 0}
    fits = [t for t in tokens if t and probe.startswith(t)]
    length, token = trie.longest(probe)
    assert length == max(map(len, fits), default=0)
    assert token == -1 if not length else tokens[token] == probe[:length]


@pytest.mark.covers("filters: packed-masks")
@given(st.sets(st.integers(0, 299)), st.integers(1, 300))
def test_packed_masks_against_sets(ids, size):
    kept = {i for i in ids if i < size}
    words = bits.from_ids(ids, size)
    assert bits.to_ids(words) == sorted(kept)
    assert bits.count(words) == len(kept)
    assert [bits.test(words, i) for i in range(-1, 400)] == [i in kept for i in range(-1, 400)]
    assert bits.is_empty(words) == (not kept)
    assert bits.to_ids(bits.full(size)) == list(range(size))
    wide = bits.full(400)
    bits.and_into(words, wide)
    assert bits.to_ids(wide) == sorted(kept)
    bits.copy_into(bits.full(400), words)
    bits.clear_from(words, size)
    assert bits.to_ids(words) == list(range(size))


@pytest.mark.covers("filters: packed-masks")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("width", [70, 71, 96, 160])
def test_apply_excludes_and_keeps(dtype, width):
    words = bits.from_ids([0, 31, 32, 69], 70)
    logits = np.arange(2 * width, dtype=dtype).reshape(2, width)
    out = bits.apply(words, logits.copy())
    assert out.dtype == dtype
    finite = np.isfinite(out)
    assert np.flatnonzero(finite[0]).tolist() == np.flatnonzero(finite[1]).tolist() == [0, 31, 32, 69]
    assert (out[finite] == logits[finite]).all()


def test_roles_and_pieces():
    v = Vocabulary(["a", b"\xf0\x9f", None, "", "<s>", "</s>"], eos_token_id=5, bos_token_id=4, special_ids=[4, 5])
    assert v.stop_ids == {5}
    assert v.defined.tolist() == [0, 1, 3, 4, 5]
    assert bits.to_ids(v.text_words) == [0, 1]
    assert v.piece(1) == "�"
    assert v.piece(5) == "</s>"
    assert v.bytes_of(5) == v.bytes_of(2) == v.bytes_of(99) == b""
    assert v.get_id_to_piece_list()[4:] == ["", ""]
    assert v.get_id_to_piece_list(True)[4:] == ["<s>", "</s>"]
    assert v.encode("aa", add_bos=True).tolist() == [[4, 0, 0]]
    assert v.decode([[4, 0, 5]]) == "a"
    with pytest.raises(FilterUsageError):
        v.encode("b")
    wrong: list[dict[str, Any]] = [
        {"tokens": []},
        {"tokens": ["a"], "eos_token_id": 1},
        {"tokens": ["a"], "special_ids": [-1]},
    ]
    for bad in wrong:
        with pytest.raises(FilterUsageError):
            Vocabulary(**bad)


class Exl:
    """A tokenizer with exllamav2's names: pieces lose the bytes of split characters, raw pieces keep them."""

    eos_token_id, bos_token_id, pad_token_id, unk_token_id = 5, None, -1, 0
    extended_id_to_piece = MappingProxyType({5: "</s>", 6: "<tool>"})

    class tokenizer_model:
        @staticmethod
        def id_to_piece(i):
            return ["<unk>", "a", "<0xF0>", "ðŁ", "▁x", "</s>", "<tool>"][i]

    def get_id_to_piece_list(self):
        return ["<unk>", "a", "�", "�", " x", "</s>", "<tool>", "�_undefined_token_7_�"]


def test_exllama_tokenizer():
    v = vocabulary_of(Exl())
    assert [v.bytes_of(i) for i in range(8)] == [b"", b"a", b"\xf0", b"\xf0\x9f", b" x", b"", b"", b""]
    assert v.special_ids == {0, 5, 6}
    assert v.stop_ids == {5}
    assert v.size == 8
    assert not v.is_defined(7)


def test_one_vocabulary_per_tokenizer_and_none_after_it():
    tokenizer = Exl()
    assert vocabulary_of(tokenizer) is vocabulary_of(tokenizer)
    assert vocabulary_of(Exl()) is not vocabulary_of(tokenizer)
    kept = weakref.ref(vocabulary_of(tokenizer))
    del tokenizer
    gc.collect()
    assert kept() is None


def test_plain_lists_and_strangers():
    v = vocabulary_of(["a", b"b", None])
    assert [v.bytes_of(i) for i in range(3)] == [b"a", b"b", b""]
    for bad in (None, 3, object()):
        with pytest.raises(FilterUsageError):
            vocabulary_of(bad)


@pytest.mark.parametrize(
    ("tokens", "roles", "words"),
    [
        (["a", 5], {}, "token 1 is 5"),
        (["a", "\ud800"], {}, "token 1 .* surrogate"),
        (["a"], {"eos_token_id": "</s>"}, "stop ids hold '</s>'"),
        (["a"], {"special_ids": [None]}, "stop ids hold None"),
        (["a"], {"stop_ids": [0.0]}, "must be token ids"),
    ],
)
def test_tokens_and_ids_of_other_types_are_refused(tokens, roles, words):
    with pytest.raises(FilterUsageError, match=words):
        Vocabulary(tokens, **roles)


def test_bytes_of_other_kinds_are_bytes():
    given = Vocabulary([bytearray(b"a"), memoryview(b"b"), "c"])  # type: ignore[list-item]
    assert [given.bytes_of(i) for i in range(3)] == [b"a", b"b", b"c"]


SAMPLES = ["The cat sat.", "naïve café — 😀 done", '{"a": [1, 2]}', "tab\tnew\nline  two"]


def train(kind):
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<unk>", "<s>", "</s>"]
    text = [*SAMPLES, "some more text of the same kind, the cat and the mat"] * 20
    if kind == "byte-level":
        t = tokenizers.Tokenizer(models.BPE())
        t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        t = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        t.normalizer = normalizers.Replace(" ", "▁")
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        extra = [f"<0x{i:02X}>" for i in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=special + extra, show_progress=False, limit_alphabet=40
        )
    t.train_from_iterator(text, trainer)
    if kind != "byte-level":
        data = json.loads(t.to_str())
        data["added_tokens"] = [a for a in data["added_tokens"] if not a["content"].startswith("<0x")]
        t = tokenizers.Tokenizer.from_str(json.dumps(data))
    t.add_tokens(["<tool>"])
    return t


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_bytes_of_real_tokenizers_concatenate_to_the_text(kind, tmp_path):
    t = train(kind)
    path = tmp_path / "tokenizer.json"
    t.save(str(path))
    views = [vocabulary_of(t), from_tokenizer_json(str(path))]
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=t, eos_token="</s>", bos_token="<s>")
    views.append(vocabulary_of(fast))
    for v in views:
        for text in SAMPLES:
            assert b"".join(v.bytes_of(i) for i in t.encode(text).ids) == text.encode()
        assert v.bytes_of(t.token_to_id("<tool>")) == b"<tool>"
        for name in ("<s>", "</s>"):
            assert t.token_to_id(name) in v.special_ids
            assert v.bytes_of(t.token_to_id(name)) == b""
    assert views[1].eos_token_id == views[2].eos_token_id == t.token_to_id("</s>")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no tokenizer.json"),
        ("[1, 2]", "no tokenizer.json"),
        ('{"model": {"vocab": {"a": "x"}}}', "no tokenizer.json"),
        ('{"model": {"vocab": [1]}}', "no tokenizer.json"),
        ('{"added_tokens": [{}]}', "no tokenizer.json"),
        ('{"model": {"vocab": {"a": -5}}}', "has the id -5"),
        ('{"model": {"vocab": {"a": 4000000000}}}', "has the id 4000000000"),
        ('{"decoder": ' + '{"decoders": [' * 3000 + "]}" * 3000 + "}", "recursion"),
    ],
)
def test_a_file_that_is_none_is_refused(text, said, tmp_path):
    """With one error, and before a table of four billion tokens is made."""
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FilterUsageError, match=said):
        from_tokenizer_json(str(path))


def test_an_id_that_no_vocabulary_has_is_refused():
    """config.json says which id ends a text, and may say anything: no table of four billion tokens is made for it."""

    class Tokenizer:
        eos_token_id = 4_000_000_000

        def get_id_to_piece_list(self):
            return ["a", "b"]

    with pytest.raises(FilterUsageError, match="has the id 4000000000"):
        vocabulary_of(Tokenizer())


def test_a_model_tokenizer_file():
    v = from_tokenizer_json(str(MODEL))
    assert v.size >= 1000
    singles = {v.bytes_of(i) for i in range(v.size) if len(v.bytes_of(i)) == 1}
    assert len(singles) == 256
    assert v.decode(v.encode("def f(x):\n    return 'é😀'")) == "def f(x):\n    return 'é😀'"
