"""Protocols of the layers below, as far as generators use them: exl_core's classes satisfy them, and so do test
doubles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from exl_core import ExLlamaV2MMEmbedding

if TYPE_CHECKING:
    from exl_kernels.sampling import NextInputs

__all__ = ["Adapter", "Cache", "CacheView", "Config", "ExLlamaV2MMEmbedding", "Model", "PreparedStep", "Tokenizer"]


class Config(Protocol):
    """The config fields that generators read; lengths in tokens."""

    vocab_size: int
    max_seq_len: int
    max_input_len: int
    max_batch_size: int


class Cache(Protocol):
    """A K/V store of `batch_size` rows of `max_seq_len` tokens, which paged callers cut into pages."""

    batch_size: int
    max_seq_len: int

    @property
    def model(self) -> Any:
        """The model that it was made for."""

    @property
    def kind(self) -> str:
        """The format of what it stores."""

    def copy_states(
        self,
        target: Any,
        from_column: int,
        from_columns: int,
        to_column: int,
        to_columns: int,
        from_row: int,
        from_rows: int,
        to_row: int,
        to_rows: int,
    ) -> None:
        """Copy the K/V of a range of tokens."""


class CacheView:
    """A cache that shows the memory of another one."""

    @property
    def underlying(self) -> Any:
        """The cache that owns the memory."""
        raise NotImplementedError


class Adapter(Protocol):
    """A LoRA adapter, as far as generators look into it."""

    lora_scaling: float
    mixable: bool
    """Whether rows of one pass may have it while others do not."""

    @property
    def content_digest(self) -> bytes:
        """Bytes that no adapter with another effect has, in any process."""

    def check_usable(self, model: Any) -> None:
        """Raise `ModelStateError` unless the adapter was loaded for `model` as it is loaded now."""


class PreparedStep(Protocol):
    """A decode step whose ids are not known yet. Run it before anything else of its model, or not at all."""

    @property
    def is_current(self) -> bool:
        """Whether the logits returned last are still this step's: the model may reuse their memory in its next step."""

    def inputs(self) -> NextInputs | None:
        """Where the sampler writes the tokens, one a sequence; None if the step cannot run."""

    def launch(self) -> torch.Tensor:
        """Queue the step behind the work that fills in `inputs`; logits [B, q, Vp] in the model's memory."""

    def run(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Queue the step for int64 `ids` [B, q]; its logits, or None, with nothing queued, if it cannot run."""


class Model(Protocol):
    """A loaded model. `exl_generate.testing.ModelBase` has the answers of a model on the CPU, for test doubles."""

    @property
    def config(self) -> Any:
        """Its `Config`."""

    @property
    def device(self) -> torch.device | None:
        """Where logits are computed; None is the CPU."""

    @property
    def arrangement(self) -> object:
        """An object that is another one after a module of the model was replaced: earlier results are stale then."""

    @property
    def content_digest(self) -> bytes:
        """Bytes that stand for all that decides K/V beside tokens, adapters, cache format and device: no model that
        computes others has them, in any process. Another value after a module was replaced by one of the caller's."""

    @property
    def hooked(self) -> bool:
        """Whether hooks of the caller look at hidden states: each prompt must then be a pass of its own."""

    def invariant_tokens(self, loras: Any = ()) -> int | None:
        """Most tokens of a pass whose results are batch-invariant under these adapters; None means any number."""

    def prepare_step(self, q_len: int, cache: Any, attn_params: Any, *, row_loras: Any = None) -> PreparedStep | None:
        """A step of `q_len` tokens a row whose ids are not known yet (`ExLlamaV2.prepare_step`), or None.
        `row_loras`: the adapters of each row."""

    def forward_chunk(
        self,
        input_ids: torch.Tensor,
        cache: Any = None,
        *,
        attn_params: Any = None,
        preprocess_only: bool = False,
        loras: Any = None,
        indexed_embeddings: Any = None,
        return_last_state: bool = False,
        row_loras: Any = None,
    ) -> dict[str, Any]:
        """One pass over int64 [B, q] ids with `PagedParams`, all with the adapters `loras`, or each row with those that
        `row_loras` has for it; "logits" float [B, q, Vp] unless `preprocess_only`,
        "last_state" [B, q, hidden] if asked for."""


class Tokenizer(Protocol):
    """Text to ids, ids to bytes."""

    @property
    def config(self) -> Any:
        """The model's `Config`."""

    @property
    def extended_id_to_piece(self) -> Mapping[int, str]:
        """Special and added ids with their text."""

    def encode(
        self,
        text: Any,
        add_bos: bool | None = False,
        *,
        encode_special_tokens: bool = False,
        embeddings: Any = None,
    ) -> torch.Tensor:
        """int64 [1, n]; the `text_alias` of an embedding becomes the ids of its rows."""

    def decode(self, ids: Any, decode_special_tokens: bool = False) -> Any:
        """Text of a 1-D tensor of ids."""

    def get_vocab_size(self) -> int:
        """1 + the highest known id."""

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Text of each id."""

    def get_id_to_bytes_list(self, include_special_tokens: bool = False) -> list[bytes]:
        """Bytes of each id."""

    def single_id(self, piece: str) -> int | None:
        """Id of a whole piece."""
