"""Special tokens and control ids of a tokenizer, gathered from the files of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..json_reader import JsonReader, read_json_file
from .backend import TokenizerBackend
from .sentencepiece_backend import SentencePieceBackend

__all__ = ["ConfigIds", "SpecialTokens", "read_special_tokens"]


class ConfigIds(Protocol):
    """The control ids of config.json: an `ExLlamaV2Config` or `ControlIds`."""

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, or None."""

    @property
    def eos_token_id(self) -> int | None:
        """First id that ends a text, or None."""

    @property
    def pad_token_id(self) -> int | None:
        """Id of padding, or None."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """All ids that end a text."""


DEFAULT_BOS, DEFAULT_EOS = 1, 2  # if neither config.json nor tokenizer_config.json has them


@dataclass
class SpecialTokens:
    """Maps of added tokens and the control ids."""

    extended_piece_to_id: dict[str, int] = field(default_factory=dict)
    unspecial_piece_to_id: dict[str, int] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    unk_token_id: int | None = None
    pad_token_id: int = -1
    pad_is_own_token: bool = False  # not an alias of eos


def read_special_tokens(
    config: ConfigIds,
    folder: Path,
    backend: TokenizerBackend | SentencePieceBackend,
    tokenizer_config: dict[str, Any],
) -> SpecialTokens:
    """Gather the special tokens of tokenizer.json, added_tokens.json, tokenizer_config.json and config.json."""
    special = SpecialTokens()
    for added_id, token in backend.added_tokens().items():
        if token.special:
            special.extended_piece_to_id[token.content] = added_id
        elif backend.decode([added_id]) != token.content:
            special.unspecial_piece_to_id[token.content] = added_id
    _read_added_tokens_file(folder, special)
    _read_added_tokens_decoder(tokenizer_config, special)
    _find_control_ids(config, backend, tokenizer_config, special)
    for token_id in (special.unk_token_id, special.bos_token_id, special.eos_token_id):
        text = None if token_id is None else backend.id_to_piece(token_id)
        if text and token_id is not None:
            special.extended_piece_to_id.setdefault(text, token_id)
    return special


def _read_added_tokens_file(folder: Path, special: SpecialTokens) -> None:
    file = folder / "added_tokens.json"
    if file.exists():
        read = JsonReader(read_json_file(file), file)
        for text in read.data:
            special.extended_piece_to_id[text] = read.integer(text, minimum=0)


def _read_added_tokens_decoder(tokenizer_config: dict[str, Any], special: SpecialTokens) -> None:
    entries = tokenizer_config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return
    for key, entry in entries.items():
        if (
            key.isdecimal()
            and isinstance(entry, dict)
            and entry.get("special")
            and isinstance(entry.get("content"), str)
        ):
            special.extended_piece_to_id[entry["content"]] = int(key)


def _find_control_ids(
    config: ConfigIds,
    backend: TokenizerBackend | SentencePieceBackend,
    tokenizer_config: dict[str, Any],
    special: SpecialTokens,
) -> None:
    def find(kind: str, from_config: int | None, default: int | None) -> int | None:
        """config.json's id, else tokenizer_config.json's token (an explicit null: none), else `default`."""
        if from_config is not None:
            return from_config
        if f"{kind}_token" not in tokenizer_config:
            return default
        token = tokenizer_config[f"{kind}_token"]
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            return None
        known = special.extended_piece_to_id.get(text)
        return backend.piece_to_id(text) if known is None else known

    special.bos_token_id = find("bos", config.bos_token_id, DEFAULT_BOS)
    special.eos_token_id = find("eos", config.eos_token_id, DEFAULT_EOS)
    eos = [] if special.eos_token_id is None else [special.eos_token_id]
    special.eos_token_ids = list(dict.fromkeys([*eos, *config.eos_token_ids]))
    unk = backend.unk_token()
    special.unk_token_id = backend.piece_to_id(unk) if unk else find("unk", None, None)
    pad = find("pad", config.pad_token_id, None)
    pad = backend.piece_to_id("<pad>") if pad is None else pad
    special.pad_is_own_token = pad is not None and pad not in (*special.eos_token_ids, special.bos_token_id)
    if pad is None:
        pad = special.eos_token_id if special.eos_token_id != special.bos_token_id else None
    special.pad_token_id = -1 if pad is None else pad
