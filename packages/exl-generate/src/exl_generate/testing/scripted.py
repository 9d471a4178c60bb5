"""A model made of a hash function.

Next-token logits are a function of the whole token context. Each slot of the cache stores the token and a running hash
of its prefix. Every forward pass recomputes the hash chain over the block table and fails where K/V of another context
would have been used. Generators cannot tell it from a model. With it, a wrong page, a lost copy or a stale rewind is an
error instead of slightly different text.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from exl_core.config.vocabulary import padded_vocabulary
from exl_core.contracts import ForwardResult
from exl_generate.contracts import CacheView

if TYPE_CHECKING:
    from exl_core.language_model import LoadedModel
    from exl_core.layers import Module

__all__ = [
    "ModelBase",
    "ScriptedCache",
    "ScriptedConfig",
    "ScriptedEmbedding",
    "ScriptedLora",
    "ScriptedModel",
    "ScriptedTokenizer",
]

Script = Callable[[list[int]], int | None]

_EMBEDDING_INDEX = 1_000_000_000
_embedding_ids = itertools.count(_EMBEDDING_INDEX)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_PAD_LOGIT = -65504.0
_HASHES = 64
"""Contexts whose logits are computed together: more would take memory of eight bytes for each id and context."""


@dataclass(frozen=True)
class ScriptedArchitecture:
    """The part of an architecture that embeddings read."""

    pictures_see_themselves: bool = False


@dataclass
class ScriptedConfig:
    """The config fields that generators read."""

    vocab_size: int = 64
    max_seq_len: int = 512
    max_input_len: int = 64
    max_batch_size: int = 8
    pad_token_id: int = 0
    hidden_size: int = 8
    mrope_section: list[int] | None = None
    vision_spatial_merge_size: int = 1
    arch: ScriptedArchitecture = ScriptedArchitecture()


class ScriptedCache:
    """Slots of (token, prefix hash), with the copy operation of a K/V cache."""

    kind = "scripted"

    def __init__(self, model: ScriptedModel, batch_size: int = 1, max_seq_len: int = 256) -> None:
        self.model = model
        self.batch_size = batch_size
        self.max_seq_len = max_seq_len
        self.current_seq_len = 0
        self.tokens = np.full(max_seq_len, -1, dtype=np.int64)
        self.chain = np.zeros(max_seq_len, dtype=np.uint64)

    def all_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the cache."""
        return [torch.from_numpy(self.tokens)]

    def copy_states(self, target: ScriptedCache, from_column: int, from_columns: int, to_column: int, *_: int) -> None:
        """Copy slots, as `ExLlamaV2Cache.copy_states` does for one row."""
        source, destination = slice(from_column, from_column + from_columns), slice(to_column, to_column + from_columns)
        target.tokens[destination] = self.tokens[source]
        target.chain[destination] = self.chain[source]


class ScriptedLora:
    """An adapter that changes every hash, and so all K/V and logits computed with it."""

    mixable = True

    def __init__(self, seed: int, lora_scaling: float = 1.0) -> None:
        self.seed = seed
        self.lora_scaling = lora_scaling

    @property
    def content_digest(self) -> bytes:
        """Bytes made of the seed, which decides the adapter's effect."""
        return f"scripted {self.seed}".encode()

    def check_usable(self, model: LoadedModel) -> None:
        """Accept any model."""


class ScriptedEmbedding:
    """Rows with ids of their own, like `ExLlamaV2MMEmbedding`; `values` (below 1000) replace hidden states."""

    thw_grid: tuple[int, int, int] | None = None
    grid: tuple[int, int, int] | None = None
    axes: NDArray[np.int64] | None = None
    sees_itself = False
    pre_tokens = post_tokens = 0
    time_step = 1.0

    def __init__(self, values: Sequence[int], text_alias: str | None = None) -> None:
        ids = [next(_embedding_ids) for _ in values]
        self.first_index, self.length = ids[0], len(ids)
        self.positions_taken = self.length
        self.embeddings = torch.tensor([[float(value)] for value in values])
        self.text_alias = f"<$EMB_{self.first_index}$>" if text_alias is None else text_alias

    def get_ids(self) -> list[int]:
        """Return the ids of all rows."""
        return list(range(self.first_index, self.first_index + self.length))

    def get_vision_token_range(self) -> tuple[int, int]:
        """Return (first, last + 1) of the ids."""
        return self.first_index, self.first_index + self.length


class ModelBase:
    """Everything of `exl_generate.contracts.Model` but `config` and `forward_chunk`, for a model on the CPU."""

    device: torch.device | None = None
    arrangement: Sequence[Module] = ()
    hooked: bool = False
    in_lockstep: bool = False
    _digest = b""

    @property
    def content_digest(self) -> bytes:
        """Bytes of this object alone: its computation is unknown."""
        self._digest = self._digest or secrets.token_bytes(16)
        return self._digest

    def invariant_tokens(self) -> int | None:
        """Return None: tokens of a pass never depend on each other."""
        return None

    def check_peers(self) -> None:
        """Do nothing: there is one device."""

    def prelaunchable_step(self, q_len: int, cache: Any, attn_params: Any, *, row_loras: Any = None) -> Any:
        """Return None: a step is computed when its ids are known."""
        return None


class ScriptedModel(ModelBase):
    """A model whose `script(context)` names the next token, or returns None where the hash decides.

    `faults` are raised by the forward passes whose context ends in that token. In a context, a row of an embedding is
    10000 + its value. `calls` lists (batch, tokens of a row, whether they are prompts: without logits, or with those of
    the last tokens alone) of every forward pass, unless `records` is False: a server would keep the list for ever.
    """

    def __init__(
        self,
        config: ScriptedConfig | None = None,
        script: Script | None = None,
        scale: float = 4.0,
        *,
        records: bool = True,
    ) -> None:
        self.config = config or ScriptedConfig()
        self.script = script
        self.scale = scale
        self.faults: dict[int, Exception] = {}
        self.calls: list[tuple[int, int, bool]] = []
        self._records = records
        width = self.config.max_seq_len + self.config.max_input_len + 1
        with np.errstate(over="ignore"):
            self._powers = np.cumprod(np.full(width, _BASE, dtype=np.uint64))
            ids = np.arange(1, self.config.vocab_size + 1, dtype=np.uint64)
            self._of_ids = ids * np.uint64(0xD1342543DE82EF95)

    @property
    def content_digest(self) -> bytes:
        """Bytes of the config. The script decides logits only: the stored K/V are the same for all scripts."""
        return hashlib.blake2b(f"{type(self).__qualname__} {self.config}".encode(), digest_size=16).digest()

    def forward_chunk(
        self,
        input_ids: torch.Tensor,
        cache: Any = None,
        attn_params: Any = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Sequence[ScriptedLora] | None = None,
        indexed_embeddings: Sequence[ScriptedEmbedding] | None = None,
        return_last_state: bool = False,
        row_loras: Sequence[Sequence[ScriptedLora]] | None = None,
    ) -> ForwardResult:
        """Do what `ExLlamaV2.forward_chunk` does in paged mode, and check provenance: logits are float32 [B, q, Vp]."""
        ids = self._values(input_ids.numpy(), indexed_embeddings or ())
        if not indexed_embeddings and (ids >= self.config.vocab_size).any():
            raise AssertionError(f"id {ids.max()} is beyond the vocabulary of {self.config.vocab_size}")
        cache = cache.underlying if isinstance(cache, CacheView) else cache
        batch, q_len = ids.shape
        if self._records:
            self.calls.append((batch, q_len, preprocess_only or last_id_only))
        table, past = attn_params.block_index.numpy(), attn_params.cache_seqlens.numpy()
        joined = attn_params.q_lens
        rows = list(ids) if joined is None else np.split(ids[0], np.cumsum(joined.numpy())[:-1])
        slots = [self._slots(table[b], int(past[b]) + len(row), attn_params.page_size) for b, row in enumerate(rows)]
        written = np.concatenate([mine[len(mine) - len(row) :] for mine, row in zip(slots, rows, strict=True)])
        if len(np.unique(written)) != len(written):
            raise AssertionError("two rows of a batch write the same slots")
        state = np.zeros((ids.size, self.config.hidden_size), dtype=np.float32)
        hashes = np.empty(ids.size, dtype=np.uint64)
        wanted: list[int | None] = []
        numbers: list[int] = []  # of the tokens whose logits are wanted
        at = 0
        of_rows = [tuple(loras or ())] * len(rows) if row_loras is None else [tuple(found) for found in row_loras]
        for mine, row, adapters in zip(slots, rows, of_rows, strict=True):
            past_len = len(mine) - len(row)
            chain = self._store(cache, mine, row, adapters)[past_len:]
            state[at : at + len(row)] = (chain[:, None] % np.uint64(1009)).astype(np.float32)
            for token in row.tolist() if self.faults else ():
                if token in self.faults:
                    raise self.faults[token]
            hashes[at : at + len(row)] = chain
            if not preprocess_only:
                places = range(len(row) - 1 if last_id_only else 0, len(row))
                numbers += [at + i for i in places]
                if self.script is not None:
                    tokens = cache.tokens[mine].tolist()
                    wanted += [self.script(tokens[: past_len + i + 1]) for i in places]
            at += len(row)
        result: ForwardResult = {}
        if not preprocess_only:
            logits = self.logits_of(hashes[numbers], wanted)
            result["logits"] = torch.from_numpy(logits).view(batch, -1, logits.shape[1])
        if return_last_state:
            result["last_state"] = torch.from_numpy(state).view(batch, q_len, -1)
        return result

    def logits(self, context: NDArray[np.int64], loras: Sequence[ScriptedLora] = ()) -> NDArray[np.float32]:
        """Return float32 [Vp] for the token after `context`: a correct generator samples from them."""
        wanted = [] if self.script is None else [self.script(context.tolist())]
        row: NDArray[np.float32] = self.logits_of(self._hash(context, loras)[-1:], wanted)[0]
        return row

    def logits_of(self, hashes: NDArray[np.uint64], wanted: Sequence[int | None]) -> NDArray[np.float32]:
        """Return float32 [n, Vp] for contexts of these hashes; `wanted` names the script's token of each, if any."""
        vocab = self.config.vocab_size
        rows = np.full((len(hashes), padded_vocabulary(vocab)), _PAD_LOGIT, dtype=np.float32)
        for begin in range(0, len(hashes), _HASHES):
            part = slice(begin, begin + _HASHES)
            mixed = hashes[part, None] ^ self._of_ids
            mixed *= _BASE
            mixed ^= mixed >> np.uint64(31)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            rows[part, :vocab] = mixed >> np.uint64(40)
        rows[:, :vocab] /= np.float32(1 << 24)
        rows[:, :vocab] *= self.scale
        for i, token in enumerate(wanted):
            if token is not None:
                rows[i, token] = self.scale + 20.0
        return rows

    def _slots(self, pages: NDArray[np.int32], length: int, page_size: int) -> NDArray[np.int64]:
        positions = np.arange(length)
        return pages.astype(np.int64)[positions // page_size] * page_size + positions % page_size

    def _values(self, ids: NDArray[np.int64], embeddings: Sequence[ScriptedEmbedding]) -> NDArray[np.int64]:
        values = ids.copy()
        for one in embeddings:
            mine = (ids >= one.first_index) & (ids < one.first_index + one.length)
            values[mine] = 10_000 + one.embeddings[ids[mine] - one.first_index, 0].numpy().astype(np.int64)
        if (values >= _EMBEDDING_INDEX).any():
            raise AssertionError("an id of an embedding that was not passed")
        return values

    def _store(
        self, cache: ScriptedCache, slots: NDArray[np.int64], ids: NDArray[np.int64], loras: Sequence[ScriptedLora]
    ) -> NDArray[np.uint64]:
        past = len(slots) - len(ids)
        tokens = np.concatenate([cache.tokens[slots[:past]], ids])
        chain = self._hash(tokens, loras)
        if not np.array_equal(chain[:past], cache.chain[slots[:past]]) or (tokens[:past] < 0).any():
            raise AssertionError("K/V of another context were used")
        cache.tokens[slots[past:]] = ids
        cache.chain[slots[past:]] = chain[past:]
        return chain

    def _hash(self, tokens: NDArray[np.int64], loras: Sequence[ScriptedLora] = ()) -> NDArray[np.uint64]:
        """Return the prefix hash of every position, under these adapters in their order."""
        with np.errstate(over="ignore"):
            start = np.uint64(0)
            for lora in loras:
                start = (start + np.uint64(lora.seed + 1)) * _BASE
            return start + np.cumsum(
                (tokens.astype(np.uint64) + np.uint64(7)) * self._powers[: len(tokens)], dtype=np.uint64
            )


class ScriptedTokenizer:
    """A vocabulary of byte strings after three special ids: 0 pad, 1 BOS, 2 EOS.

    It encodes by longest match and drops characters that it cannot spell.
    """

    def __init__(self, pieces: Sequence[str | bytes], config: ScriptedConfig | None = None) -> None:
        special = [b"<pad>", b"<s>", b"</s>"]
        self.pieces = special + [p.encode() if isinstance(p, str) else p for p in pieces]
        self.config = config or ScriptedConfig(vocab_size=len(self.pieces))
        self.pad_token_id, self.bos_token_id, self.eos_token_id = 0, 1, 2
        self.eos_token_ids = [self.eos_token_id]
        self.extended_id_to_piece = {i: piece.decode() for i, piece in enumerate(special)}
        self._longest = max(len(piece) for piece in self.pieces)
        self._ids = {piece: i for i, piece in reversed(list(enumerate(self.pieces))) if i > 2}

    def get_vocab_size(self) -> int:
        """Return the number of ids."""
        return len(self.pieces)

    def get_id_to_bytes_list(self, include_special_tokens: bool = False) -> list[bytes]:
        """Return the bytes of each id; special ids are b"" unless included."""
        return [p if i > 2 or include_special_tokens else b"" for i, p in enumerate(self.pieces)]

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Return the text of each id; special ids are "" unless included."""
        return [p.decode(errors="replace") for p in self.get_id_to_bytes_list(include_special_tokens)]

    def single_id(self, piece: str) -> int | None:
        """Return the id of a whole piece, or None."""
        return self._ids.get(piece.encode())

    def encode(
        self,
        text: str,
        add_bos: bool | None = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        *,
        embeddings: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """Return int64 [1, n]. Special tokens are never read from text."""
        for one in embeddings or ():
            if one.text_alias in text:
                before, after = text.split(one.text_alias, 1)
                parts = [
                    self.encode(before, add_bos, embeddings=embeddings),
                    torch.tensor([one.get_ids()]),
                    self.encode(after, False, add_eos, embeddings=embeddings),
                ]
                return torch.cat(parts, dim=1)
        data, at, ids = text.encode(), 0, [self.bos_token_id] if add_bos else []
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self._ids), 0)
            ids.extend([self._ids[data[at : at + size]]] if size else [])
            at += size or 1
        return torch.tensor([ids + [self.eos_token_id] * add_eos], dtype=torch.int64)

    def decode(self, ids: torch.Tensor, decode_special_tokens: bool = False) -> Any:
        """Return the text of a 1-D tensor of ids, or a list of texts for a 2-D one."""
        if ids.dim() == 2:
            return [self.decode(row, decode_special_tokens) for row in ids]
        table = self.get_id_to_bytes_list(decode_special_tokens)
        return b"".join(table[int(i)] for i in ids).decode(errors="replace")
