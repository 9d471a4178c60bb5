"""Text to ids and back on plain lists, for processes without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.model_folder import check_model_folder
from ..control_ids import MAX_VOCAB, read_control_ids
from ..errors import InputError, TokenizerError, TokenizerFileError
from ..json_reader import JsonReader, read_json_file
from .backend import TokenizerBackend
from .chat import (
    ChatTemplates,
    cut_after_mark,
    mark_final_message,
    prepare_messages,
    refuse_keywords,
    token_texts,
)
from .sentencepiece_backend import SentencePieceBackend
from .special import ConfigIds, read_special_tokens
from .tables import CharTrieNode, VocabularyTables
from .vocabulary import byte_decoder

__all__ = ["TextTokenizer"]


class TextTokenizer:
    """The tokenizer of a model folder, with ids as lists.

    It reads tokenizer.json or tokenizer.model, and tokenizer_config.json and added_tokens.json. The object may be used
    from
    several threads: it does not change after construction, and its tables are built once under a lock.
    `ExLlamaV2Tokenizer` is the same with ids in tensors.

    Args:
        folder: the model folder.
        ids: control ids of config.json.
        model_vocab_size: number of logits.
        lazy_init: build tables on first use; False builds all now.
        force_spm: use tokenizer.model even if there is a tokenizer.json.

    Raises:
        TokenizerError: a file is invalid.
        TokenizerFileError: there is no tokenizer file.
    """

    def __init__(
        self,
        folder: Path,
        ids: ConfigIds,
        model_vocab_size: int = 0,
        lazy_init: bool = True,
        force_spm: bool = False,
    ) -> None:
        self.tokenizer_model = _backend(folder, force_spm)
        self.tokenizer_config_dict = _optional_json(folder / "tokenizer_config.json")
        self.chat_templates = ChatTemplates(folder, self.tokenizer_config_dict)
        special = read_special_tokens(ids, folder, self.tokenizer_model, self.tokenizer_config_dict)
        self.extended_piece_to_id = special.extended_piece_to_id
        self.unspecial_piece_to_id = special.unspecial_piece_to_id
        self.extended_id_to_piece = {i: p for p, i in self.extended_piece_to_id.items()}
        self.unspecial_id_to_piece = {i: p for p, i in self.unspecial_piece_to_id.items()}
        self.tokenizer_model.use_special_tokens(self.extended_piece_to_id)
        self.bos_token_id = special.bos_token_id
        self.eos_token_id = special.eos_token_id
        self.eos_token_ids = special.eos_token_ids  # every id that ends a text, eos_token_id first
        self.unk_token_id = special.unk_token_id
        self.pad_token_id = special.pad_token_id
        self._drop_when_special = {self.pad_token_id} if special.pad_is_own_token else {-1}
        self.bos_token = self._control_text(self.bos_token_id)
        self.eos_token = self._control_text(self.eos_token_id)
        self.unk_token = "" if self.unk_token_id == self.pad_token_id else self._control_text(self.unk_token_id)
        self.pad_token = ""
        # Whether control tokens belong before and after a prompt; None where the file does not say.
        self.add_bos_token: bool | None = self.tokenizer_config_dict.get("add_bos_token")
        self.add_eos_token: bool | None = self.tokenizer_config_dict.get("add_eos_token")
        self.backend_vocab_size = self.tokenizer_model.vocab_size()
        highest = max((*self.extended_id_to_piece, *self.unspecial_id_to_piece, self.backend_vocab_size - 1))
        self.actual_vocab_size = 1 + highest
        if self.actual_vocab_size > MAX_VOCAB:
            raise TokenizerError(f"{folder}: a token has the id {highest}; at most {MAX_VOCAB - 1} is possible")
        self.newline_token_id = self._last_id("\n")
        self.space_token_id = self._last_id(" ")
        self._model_vocab_size = model_vocab_size
        self._tables = self._make_tables()
        if not lazy_init:
            self._tables.build_all()

    @classmethod
    def from_folder(cls, folder: str | Path) -> TextTokenizer:
        """Return the tokenizer of a model folder. Raises TokenizerError, ConfigError."""
        place = check_model_folder(folder)
        read = JsonReader(read_json_file(place / "config.json"), place / "config.json")
        vocab_size = read.integer("vocab_size", default=0, text=True, minimum=0, maximum=MAX_VOCAB)
        return TextTokenizer(place, read_control_ids(read, place), vocab_size)

    @property
    def tokenizer(self) -> TokenizerBackend | SentencePieceBackend:
        """Alias of `tokenizer_model`."""
        return self.tokenizer_model

    def get_vocab_size(self) -> int:
        """Return 1 + the highest id in use."""
        return self.actual_vocab_size

    def encode_ids(self, text: str, special: bool = False, add_bos: bool | None = False) -> list[int]:
        """Return the ids of `text`.

        Args:
            text: the text.
            special: convert the text of special tokens to their ids; otherwise it is ordinary text.
            add_bos: put the begin id first, if the model has one; None does as tokenizer_config.json says.
        """
        return self._with_control_ids(self.tokenizer_model.encode(text, special), add_bos, False)

    def encode_parts(self, parts: Sequence[tuple[str, bool] | int]) -> list[int]:
        """Return the ids of a text in parts, each with whether the text of special tokens in it becomes their ids.

        A part that is an int is an id. Any other part is encoded separately: nothing merges across a border, and later
        parts get no leading space.
        """
        ids: list[int] = []
        begun = False
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                begun = True
                continue
            text, special = part
            if text:
                ids += self._encode_inside(text, special) if begun else self.encode_ids(text, special)
                begun = True
        return ids

    def _encode_inside(self, text: str, special: bool) -> list[int]:
        """Return the ids of `text` after other text: some tokenizers put a space before their input."""
        before = self.tokenizer_model.encode("\n", special)
        ids = self.tokenizer_model.encode("\n" + text, special)
        return ids[len(before) :] if ids[: len(before)] == before else self.tokenizer_model.encode(text, special)

    def decode_ids(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of ids.

        Padding and ids beyond the vocabulary are omitted; so are special tokens and every EOS id, unless `special`,
        which writes them as their text.
        """
        return self._decode_row(list(ids), special)

    def encode_unspecial(self, text: str) -> list[int]:
        """Return the ids of `text`, with the text of special tokens read as ordinary text."""
        return self.tokenizer_model.encode(text)

    def encode_special(self, text: str) -> list[int]:
        """Return the ids of `text`, with the text of special tokens converted to their ids."""
        return self.tokenizer_model.encode(text, special=True)

    def num_tokens(
        self,
        text: str,
        add_bos: bool | None = False,
        add_eos: bool | None = False,
        encode_special_tokens: bool = False,
    ) -> int:
        """Return the number of ids that `encode` returns with the same options.

        Args:
            text: the text.
            add_bos: as for `ExLlamaV2Tokenizer.encode`.
            add_eos: as for `ExLlamaV2Tokenizer.encode`.
            encode_special_tokens: as for `ExLlamaV2Tokenizer.encode`.
        """
        ids = self.tokenizer_model.encode(text, encode_special_tokens)
        return len(self._with_control_ids(ids, add_bos, add_eos))

    def single_id(self, piece: str) -> int | None:
        """Return the id whose text is exactly `piece`, special tokens first, or None."""
        found = self.extended_piece_to_id.get(piece)
        return self._tables.piece_to_id().get(piece) if found is None else found

    # --------------------------------------------------------------------------------------------------------- tables

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Return the text of each id. Incomplete UTF-8 is U+FFFD; special tokens are "" unless
        `include_special_tokens`.
        """
        return self._tables.id_to_piece(include_special_tokens)

    def get_id_to_bytes_list(self, include_special_tokens: bool = False) -> list[bytes]:
        """Return the bytes that each id adds to a text; special tokens add none unless `include_special_tokens`.

        Joined over a sequence they are its exact UTF-8, except for the space that some tokenizers strip at the very
        start. So a stream can be cut anywhere and decoded incrementally.
        """
        return self._tables.id_to_bytes(include_special_tokens)

    def get_id_to_ord_list(self) -> list[int]:
        """Return the byte value of `<0xNN>` tokens and of single characters up to 255, else -1."""
        return self._tables.id_to_ord()

    def get_piece_to_id_dict(self) -> dict[str, int]:
        """Return text -> id; the last of several ids with the same text."""
        return self._tables.piece_to_id()

    def get_prefix_to_ids_dict(self) -> dict[str, list[int]]:
        """Return the text of each token -> sorted ids of all tokens whose text starts with it."""
        return self._tables.prefix_to_ids()

    def get_prefix_id_to_ids_dict(self) -> dict[int, list[int]]:
        """Return id -> sorted ids of all tokens whose text starts with its text, at least the id itself."""
        return self._tables.prefix_id_to_ids()

    def get_char_trie(self) -> CharTrieNode:
        """Return the character trie over the texts of all tokens."""
        return self._tables.char_trie()

    def get_char_trie_ci(self) -> CharTrieNode:
        """Return the character trie over the lower-cased texts of all tokens."""
        return self._tables.char_trie(case_insensitive=True)

    # ----------------------------------------------------------------------------------------------------------- chat

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        *,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        """Render a conversation as a prompt. Encode the result with encode_special_tokens=True and add_bos=False.

        Templates run in a sandbox.

        Args:
            messages: [{"role": ..., "content": ...}, ...]. Null values are removed, and reasoning is present under each
                of its names, as in transformers.
            add_generation_prompt: end with the begin of an answer; None means yes, unless continue_final_message is
                set.
            chat_template: name of one of the model's templates, or Jinja source. Default: `tool_use`, if the model has
                it and tools is not None, else the default template.
            tools: variable of the template.
            documents: variable of the template.
            continue_final_message: end the prompt where the last message ends, so that the model continues it; a str
                names another field than "content".
            **variables: variables of the template. Keywords of transformers that ask for ids are rejected.

        Returns:
            The prompt as text.

        Raises:
            ChatTemplateError: there is no template, or it fails.
            InputError: arguments exclude each other.
        """
        variables = refuse_keywords(variables)
        if continue_final_message and add_generation_prompt:
            raise InputError("continue_final_message and add_generation_prompt exclude each other")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if chat_template is not None and ("{%" in chat_template or "{{" in chat_template):
            source = chat_template
        else:
            source = self.chat_templates.select(chat_template, tools is not None)
        own = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self._control_text(self.pad_token_id),
        }
        values = {
            **token_texts(self.tokenizer_config_dict, own),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": documents,
            **variables,
        }
        said = prepare_messages(messages)
        if not continue_final_message:
            return self.chat_templates.render(source, said, values)
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        said, text = mark_final_message(said, field)
        return cut_after_mark(self.chat_templates.render(source, said, values), text)

    # ------------------------------------------------------------------------------------------------------- internals

    def _with_control_ids(self, ids: list[int], add_bos: bool | None, add_eos: bool | None) -> list[int]:
        bos = self.add_bos_token if add_bos is None else add_bos
        eos = self.add_eos_token if add_eos is None else add_eos
        front = [self.bos_token_id] if bos and self.bos_token_id is not None else []
        back = [self.eos_token_id] if eos and self.eos_token_id is not None else []
        return front + ids + back

    def _until_eos(self, ids: list[int]) -> list[int]:
        front = next((i for i, token in enumerate(ids) if token != self.pad_token_id), len(ids))
        end = next((i for i in range(front, len(ids)) if ids[i] in self.eos_token_ids), len(ids))
        return ids[front:end]

    def _decode_row(self, ids: list[int], special: bool) -> str:
        drop = self._drop_when_special if special else {self.pad_token_id, *self.eos_token_ids}
        kept = [i for i in ids if 0 <= i < self.backend_vocab_size and i not in drop]
        return self.tokenizer_model.decode(kept, special)

    def _control_text(self, token_id: int | None) -> str:
        if token_id is None or token_id < 0:
            return ""
        return self.extended_id_to_piece.get(token_id) or self.tokenizer_model.id_to_piece(token_id) or ""

    def _last_id(self, text: str) -> int | None:
        ids = self.tokenizer_model.encode(text)
        return ids[-1] if ids else None

    def _make_tables(self) -> VocabularyTables:
        free = self.tokenizer_model.unused_ids().union(range(self.backend_vocab_size, self.actual_vocab_size))
        undefined = free.difference(self.extended_id_to_piece, self.unspecial_id_to_piece)
        return VocabularyTables(
            self._describe_ids, undefined, self.tokenizer_model.enumerate_tokens, self._model_vocab_size
        )

    def _describe_ids(self, include_special: bool) -> list[bytes]:
        """Return the bytes of every id below actual_vocab_size; b"" for unused ids."""
        backend = self.tokenizer_model
        table = [b""] * self.actual_vocab_size
        to_bytes = byte_decoder(backend.data)
        for token_id, piece in backend.enumerate_tokens():
            table[token_id] = self._decode_alone(token_id).encode() if to_bytes is None else to_bytes(piece)
        for token_id, text in self.unspecial_id_to_piece.items():
            table[token_id] = text.encode()
        for token_id, text in self.extended_id_to_piece.items():
            shown = include_special or token_id >= self.backend_vocab_size
            table[token_id] = text.encode() if shown else b""
        return table

    def _decode_alone(self, token_id: int) -> str:
        """Return the text of one token inside a text: decoded after a space, which is then removed."""
        backend = self.tokenizer_model
        if self.space_token_id is None:
            return backend.decode([token_id], special=True)
        prefix = backend.decode([self.space_token_id], special=True)
        text = backend.decode([self.space_token_id, token_id], special=True)
        return text[len(prefix) :] if text.startswith(prefix) else backend.decode([token_id], special=True)


def _backend(folder: Path, force_spm: bool) -> TokenizerBackend | SentencePieceBackend:
    if (folder / "tokenizer.json").exists() and not force_spm:
        return TokenizerBackend(folder / "tokenizer.json")
    if (folder / "tokenizer.model").exists():
        return SentencePieceBackend(folder / "tokenizer.model")
    wanted = "tokenizer.model" if force_spm else "tokenizer.json, and no tokenizer.model"
    raise TokenizerFileError(f"No supported tokenizer found: {folder} has no {wanted}")


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json_file(file) if file.exists() else {}
