"""ExLlamaV2Tokenizer: `TextTokenizer` with ids in tensors."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..config import ExLlamaV2Config
from ..embeddings import ExLlamaV2MMEmbedding
from ..errors import InputError, TokenizerError
from .text import TextTokenizer

__all__ = ["ExLlamaV2Tokenizer"]

MAX_CACHED_STRINGS = 100


class ExLlamaV2Tokenizer(TextTokenizer):
    """The tokenizer of `config.model_dir`, with ids as int64 CPU tensors.

    It reads tokenizer.json or tokenizer.model, and tokenizer_config.json and added_tokens.json. The object may be used
    from
    several threads: it does not change after construction, and its tables are built once under a lock.

    Args:
        config: a prepared configuration.
        lazy_init: build tables on first use; False builds all now.
        force_json: ignored; tokenizer.json has priority.
        force_spm: use tokenizer.model even if there is a tokenizer.json.

    Raises:
        TokenizerError: a file is invalid.
        TokenizerFileError: there is no tokenizer file.
        InputError: config is no ExLlamaV2Config.
    """

    def __init__(
        self, config: ExLlamaV2Config, lazy_init: bool = True, force_json: bool = False, force_spm: bool = False
    ) -> None:
        if not hasattr(config, "model_dir"):
            raise InputError(
                f"a tokenizer is made of an ExLlamaV2Config, not {config!r:.80}; pass ExLlamaV2Config(folder)"
            )
        if config.model_dir is None:
            raise TokenizerError("the config has no model_dir")
        self.config = config
        super().__init__(Path(config.model_dir), config, config.vocab_size, lazy_init, force_spm)
        self._encode_cache: dict[str, Tensor] = {}
        self._encode_lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------------ encoding

    def encode(
        self,
        text: str | list[str],
        add_bos: bool | None = False,
        add_eos: bool | None = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings: Sequence[ExLlamaV2MMEmbedding] | None = None,
        *,
        padding_side: Literal["left", "right"] = "left",
    ) -> Any:
        """Encode a text, or a batch of texts padded with pad_token_id.

        Args:
            text: a str or a list of str.
            add_bos: put the begin id first, if the model has one; None does as tokenizer_config.json says.
            add_eos: put the end id last, likewise.
            encode_special_tokens: convert the text of special tokens to their ids; otherwise it is ordinary text.
            return_offsets: also return int32 [batch], minus the length of the left padding of each row.
            embeddings: each `text_alias` in a text becomes the ids of its rows; the texts between them are encoded one
                by one.
            padding_side: side of the padding, "left" or "right".

        Returns:
            int64 [1, n] for a str (n is 0 for an empty text); int64 [batch, longest] for a list.

        Raises:
            InputError: an argument is malformed.
        """
        if padding_side not in ("left", "right"):
            raise InputError(f"padding_side is {padding_side!r}, must be 'left' or 'right'")
        texts = list(text) if isinstance(text, (list, tuple)) else [text]
        if embeddings:
            rows = [self._encode_with_aliases(t, encode_special_tokens, embeddings) for t in texts]
        else:
            rows = self.tokenizer_model.encode_batch(texts, encode_special_tokens)
        rows = [self._with_control_ids(r, add_bos, add_eos) for r in rows]
        longest = max((len(r) for r in rows), default=0)
        ids = torch.full((len(rows), longest), self.pad_token_id, dtype=torch.int64)
        for row, tokens in zip(ids, rows, strict=True):
            begin = longest - len(tokens) if padding_side == "left" else 0
            row[begin : begin + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        if not return_offsets:
            return ids
        padding = [len(r) - longest if padding_side == "left" else 0 for r in rows]
        return ids, torch.tensor(padding, dtype=torch.int32)

    def cached_encode_str(self, text: str) -> Tensor:
        """Return encode(text) through a cache of the last 100 strings. Do not modify the result."""
        with self._encode_lock:
            if text in self._encode_cache:
                return self._encode_cache[text]
        with torch.inference_mode(False):  # kept for callers of every mode
            ids = cast(Tensor, self.encode(text))
        with self._encode_lock:
            while len(self._encode_cache) >= MAX_CACHED_STRINGS:
                del self._encode_cache[next(iter(self._encode_cache))]
            self._encode_cache[text] = ids
        return ids

    def single_token(self, token_id: int) -> Tensor:
        """Return int64 [[token_id]]."""
        return torch.tensor([[token_id]], dtype=torch.int64)

    # ------------------------------------------------------------------------------------------------------ decoding

    def decode(
        self, ids: Tensor | list[Tensor], decode_special_tokens: bool = False, *, truncate_at_eos: bool = False
    ) -> Any:
        """Decode ids to text.

        Padding and ids beyond the vocabulary are omitted.

        Args:
            ids: 1-D ids, 2-D ids, or a list of tensors.
            decode_special_tokens: write special tokens and EOS ids as their text instead of omitting them.
            truncate_at_eos: cut each row before its first EOS id (of any of them; leading padding is skipped).

        Returns:
            A str for 1-D ids, else a list of str.

        Raises:
            InputError: ids have another shape.
        """
        if isinstance(ids, list):
            return [self.decode(row, decode_special_tokens, truncate_at_eos=truncate_at_eos) for row in ids]
        if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point():
            raise InputError("decode takes a tensor of ids with one or two dimensions, or a list of such tensors")
        rows = ids.tolist() if ids.dim() == 2 else [ids.tolist()]
        if truncate_at_eos:
            rows = [self._until_eos(row) for row in rows]
        texts = [self._decode_row(row, decode_special_tokens) for row in rows]
        return texts if ids.dim() == 2 else texts[0]

    def padding_mask(self, ids: Tensor) -> Tensor:
        """Return a half tensor like `ids`: -inf where the id is pad_token_id, else 0.

        The test is by value. Where the pad id can also occur in a text, use `offsets_mask` instead.
        """
        return torch.zeros(ids.shape, dtype=torch.half).masked_fill_(ids == self.pad_token_id, float("-inf"))

    def offsets_mask(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return `padding_mask` from the offsets of encode(return_offsets=True): exact for every pad id."""
        columns = torch.arange(ids.shape[1])[None, :]
        return torch.zeros(ids.shape, dtype=torch.half).masked_fill_(columns < -offsets[:, None], float("-inf"))

    # ------------------------------------------------------------------------------------------------------- internals

    def _encode_with_aliases(self, text: str, special: bool, embeddings: Sequence[ExLlamaV2MMEmbedding]) -> list[int]:
        if not all(isinstance(e, ExLlamaV2MMEmbedding) for e in embeddings):
            raise InputError("embeddings must be a list of ExLlamaV2MMEmbedding")
        if not isinstance(text, str):
            raise InputError(f"encode takes a str or a list of str, not {type(text).__name__}")
        by_alias = {e.text_alias: e for e in embeddings}
        if len(by_alias) < len(embeddings):
            raise InputError("two embeddings have the same text_alias: their places in the text cannot be told apart")
        ids: list[int] = []
        for part in re.split(f"({'|'.join(re.escape(a) for a in sorted(by_alias, key=len, reverse=True))})", text):
            if part in by_alias:
                ids += by_alias[part].get_ids()
            elif part:
                ids += self.tokenizer_model.encode(part, special)
        return ids
