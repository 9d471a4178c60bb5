"""Read the bytes of every id out of other libraries' tokenizers.

No library is imported: a tokenizer is recognized by its methods.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from exl_filters.errors import FilterUsageError
from exl_filters.vocabulary import Vocabulary

__all__ = ["from_tokenizer_json", "read_tokenizer"]

_EOS_NAMES = ("</s>", "<|endoftext|>", "<|eot_id|>", "<|im_end|>", "<|end_of_text|>", "<eos>")
_UNDEFINED = "_undefined_token_"
# Far above any real vocabulary. The tables take about 100 bytes an id, defined or not.
MOST_TOKENS = 1 << 24
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def read_tokenizer(tokenizer: Any) -> Vocabulary:
    """Build a `Vocabulary` from a tokenizer object or list of pieces; see `vocabulary_of`."""
    if isinstance(tokenizer, list | tuple):
        return Vocabulary(list(tokenizer))
    if callable(getattr(tokenizer, "get_id_to_bytes_list", None)):
        return _from_exllama(tokenizer, list(tokenizer.get_id_to_bytes_list()))
    if callable(getattr(tokenizer, "get_id_to_piece_list", None)):
        return _from_exllama(tokenizer, _bytes_from_pieces(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None) or tokenizer
    if callable(getattr(backend, "get_added_tokens_decoder", None)) and hasattr(backend, "decoder"):
        return _from_backend(backend, tokenizer)
    if callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        return _from_slow(tokenizer)
    raise FilterUsageError(
        f"{type(tokenizer).__name__} is no tokenizer this package can read: it has neither "
        "get_id_to_piece_list (exllamav2), backend_tokenizer (transformers) nor convert_ids_to_tokens; "
        "pass an exl_filters.Vocabulary"
    )


def from_tokenizer_json(path: str, eos_token: str | None = None) -> Vocabulary:
    """Build the vocabulary of a `tokenizer.json` file.

    Args:
        path: The file.
        eos_token: Spelling of the EOS token; default: the usual names among the added tokens.

    Raises:
        FilterUsageError: the file is not a tokenizer.json.
        OSError: the file cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return _from_json(json.load(file), eos_token)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, FilterUsageError):
                raise
            raise FilterUsageError(f"{path}: no tokenizer.json ({error!r:.200})") from error


def _from_json(data: dict[str, Any], eos_token: str | None) -> Vocabulary:
    model = data.get("model") or {}
    vocab = model.get("vocab") or {}
    pieces = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
    added = {t["id"]: (t["content"], bool(t.get("special"))) for t in data.get("added_tokens", [])}
    names = [eos_token] if eos_token else _EOS_NAMES
    ids = {content: token for token, (content, _) in added.items()} | pieces
    eos = next((ids[name] for name in names if name in ids), None)
    text = json.dumps(data)
    return _assemble(pieces, added, _decoder_kinds(data.get("decoder")), lambda: text, eos_token_id=eos)


def _from_backend(backend: Any, tokenizer: Any) -> Vocabulary:
    added = {i: (t.content, bool(t.special)) for i, t in backend.get_added_tokens_decoder().items()}
    decoder = backend.decoder
    kinds = _decoder_kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()
    for token in getattr(tokenizer, "all_special_ids", ()) or ():
        if token in added:
            added[token] = (added[token][0], True)
    return _assemble(
        backend.get_vocab(with_added_tokens=False),
        added,
        kinds,
        canonical_json=backend.to_str,
        **{name: getattr(tokenizer, name, None) for name in _ROLES},
    )


_ROLES = ("eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id")


def _assemble(
    pieces: dict[str, int],
    added: dict[int, tuple[str, bool]],
    kinds: set[str],
    canonical_json: Callable[[], str] | None = None,
    **roles: Any,
) -> Vocabulary:
    roles = {name: _one_id(value) for name, value in roles.items()}
    size = _size_of([*pieces.values(), *added, *(i for i in roles.values() if i is not None)])
    tokens: list[bytes | None] = [None] * size
    to_bytes = _piece_decoder(kinds)
    for piece, token in pieces.items():
        tokens[token] = to_bytes(piece)
    special = {i for i in roles.values() if i is not None}
    texts = {}
    for token, (content, is_special) in added.items():
        tokens[token] = content.encode("utf-8")
        if is_special:
            special.add(token)
            texts[token] = content
    return Vocabulary(tokens, special_ids=special, special_texts=texts, canonical_json=canonical_json, **roles)


def _size_of(ids: Iterable[int]) -> int:
    """Return the size of the vocabulary that has these ids."""
    highest = 0
    for token in ids:
        if not 0 <= token < MOST_TOKENS:
            raise FilterUsageError(f"a token has the id {token}; ids are from 0 to {MOST_TOKENS - 1}")
        highest = max(highest, token)
    return highest + 1


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Return the names of the decoders in a tokenizer.json decoder tree."""
    if not decoder:
        return set()
    kinds = {str(decoder.get("type"))}
    for inner in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(inner)
    return kinds


def _piece_decoder(kinds: set[str]) -> Any:
    if "ByteLevel" in kinds:
        return _from_byte_level
    return _from_sentencepiece


def _from_byte_level(piece: str) -> bytes:
    table = _byte_alphabet()
    try:
        return bytes([table[c] for c in piece])
    except KeyError:
        return piece.encode("utf-8")


def _from_sentencepiece(piece: str) -> bytes:
    if piece.startswith("<0x") and (match := _BYTE_PIECE.match(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode("utf-8")


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte-level BPE alphabet: printable Latin-1 as itself, the other bytes from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    others = (b for b in range(256) if b not in set(plain))
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table


def _from_exllama(tokenizer: Any, tokens: list[bytes | str | None]) -> Vocabulary:
    """Read a tokenizer with exllamav2's names: control ids are those of its extended map and its four roles."""
    roles: dict[str, Any] = {name: _one_id(getattr(tokenizer, name, None)) for name in _ROLES}
    extended = getattr(tokenizer, "extended_id_to_piece", None) or {}
    plain = getattr(tokenizer, "unspecial_id_to_piece", None) or {}
    special = {int(i) for i in extended if int(i) not in plain} | {i for i in roles.values() if i is not None}
    size = max(len(tokens), _size_of(special) if special else 0)
    tokens = [*tokens, *([None] * (size - len(tokens)))]
    texts = {int(i): str(text) for i, text in extended.items()}
    for token, text in enumerate(tokens):
        if isinstance(text, str) and _UNDEFINED in text:
            tokens[token] = None
    stops = [i for i in (_one_id(i) for i in getattr(tokenizer, "eos_token_ids", None) or ()) if i is not None]
    backend = getattr(getattr(tokenizer, "tokenizer_model", None), "tokenizer", None)
    return Vocabulary(
        tokens,
        stop_ids=stops,
        special_ids=special | set(stops),
        special_texts=texts,
        canonical_json=getattr(backend, "to_str", None),
        **roles,
    )


def _bytes_from_pieces(tokenizer: Any) -> list[bytes | str | None]:
    """Return the pieces as text; incomplete characters are read as bytes from the raw pieces."""
    pieces: list[bytes | str | None] = list(tokenizer.get_id_to_piece_list())
    broken = [
        i for i, piece in enumerate(pieces) if isinstance(piece, str) and "�" in piece and _UNDEFINED not in piece
    ]
    model = getattr(tokenizer, "tokenizer_model", None)
    raw = getattr(model, "id_to_piece", None)
    if not broken:
        return pieces
    if not callable(raw):
        for token in broken:
            pieces[token] = None
        return pieces
    table = _byte_alphabet()
    for token in broken:
        text = str(raw(token))
        if match := _BYTE_PIECE.match(text):
            pieces[token] = bytes([int(match[1], 16)])
        elif text and all(c in table for c in text):
            pieces[token] = bytes(table[c] for c in text)
        else:
            pieces[token] = text.replace("▁", " ")
    return pieces


def _from_slow(tokenizer: Any) -> Vocabulary:
    names: Iterable[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    pieces = [name or "" for name in names]
    table = _byte_alphabet()
    byte_level = sum(p.startswith("Ġ") for p in pieces) > len(pieces) // 20 and "▁" not in "".join(pieces[:2000])
    decode = _from_byte_level if byte_level and table else _from_sentencepiece
    roles: dict[str, Any] = {name: _one_id(getattr(tokenizer, name, None)) for name in _ROLES}
    special = {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
    return Vocabulary([decode(p) for p in pieces], special_ids=special, **roles)


def _one_id(value: Any) -> int | None:
    """Return an id in [0, ...), or None: some tokenizers return -1 or a list."""
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return int(value) if isinstance(value, int) and value >= 0 else None
