"""Protocols of the layers below with the members that generators use. exl_core's classes and test doubles implement
them.

A model takes only caches, adapters and embeddings of its own kind, a tokenizer only embeddings: `ModelOf` and
`TokenizerOf` have these kinds as parameters. Code that passes none of them takes a `Model` or `Tokenizer` of any kind.
The code that does (`OwnModel`, `OwnTokenizer`) relies on the caller of a generator, whose parts belong together; at run
time the model and the tokenizer check what they get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Never, Protocol, Self, TypeAlias, TypeVar

import torch

from exl_core import ExLlamaV2MMEmbedding
from exl_core.axes import GridRows
from exl_core.contracts import first_missing
from exl_core.embeddings import EmbeddingConfig

if TYPE_CHECKING:
    from exl_core import PagedParams
    from exl_core.contracts import ForwardResult
    from exl_core.language_model import LoadedModel
    from exl_core.layers import Module
    from exl_kernels.sampling import TokenTarget

__all__ = [
    "Cache",
    "CacheView",
    "Config",
    "Embedding",
    "ExLlamaV2MMEmbedding",
    "Model",
    "ModelOf",
    "OwnModel",
    "OwnTokenizer",
    "PrelaunchableStep",
    "RequestAdapter",
    "Tokenizer",
    "TokenizerOf",
    "first_missing",
]


class Config(EmbeddingConfig, Protocol):
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
    def model(self) -> LoadedModel:
        """The model that the cache was made for."""

    @property
    def kind(self) -> str:
        """The format of the stored keys and values."""

    def copy_states(
        self,
        target: Self,
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
    """A cache object over the memory of another cache, which a model may read through `underlying`."""

    @property
    def underlying(self) -> Cache:
        """The cache that owns the memory."""
        raise NotImplementedError


class RequestAdapter(Protocol):
    """The part of a LoRA adapter that generators use; layers use `exl_core.contracts.Adapter`."""

    lora_scaling: float
    mixable: bool
    """Whether rows of one pass may have it while others do not."""

    @property
    def content_digest(self) -> bytes:
        """Bytes that differ, in any process, from those of every adapter with another effect."""

    def check_usable(self, model: LoadedModel) -> None:
        """Raise `ModelStateError` unless the adapter was loaded for `model` as it is loaded now."""


class Embedding(GridRows, Protocol):
    """Rows that replace hidden states, with token ids from `first_index` on."""

    first_index: int
    embeddings: torch.Tensor
    """float [length, hidden]"""
    thw_grid: tuple[int, int, int] | None
    """Patches of an image in time, height and width."""
    pre_tokens: int
    """Number of framing rows before the others."""
    post_tokens: int
    """Number of framing rows after the others."""
    time_step: float
    """Positions from one patch of time to the next."""


class PrelaunchableStep(Protocol):
    """A step of a model for given rows and pages that can be launched before the host knows its ids, such as
    `exl_core.execution.captured_step.StepReplay`.

    Run it before any other step of its model, or not at all.
    """

    @property
    def is_current(self) -> bool:
        """Whether the logits returned last are still valid: the model may reuse their memory in its next step."""

    def inputs(self) -> TokenTarget | None:
        """Return the memory for the sampler's tokens, one for each sequence; None if the step cannot run."""

    def launch(self) -> torch.Tensor:
        """Queue the step after the work that fills in `inputs`; returns logits [B, q, Vp] in the model's memory."""

    def run(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Queue the step for int64 `ids` [B, q]; returns its logits, or None, with nothing queued, if it cannot run."""


CacheT = TypeVar("CacheT", contravariant=True)
AdapterT = TypeVar("AdapterT", contravariant=True)
EmbeddingT = TypeVar("EmbeddingT", contravariant=True)


class ModelOf(Protocol[CacheT, AdapterT, EmbeddingT]):
    """A loaded model, by what it takes.

    `exl_generate.testing.ModelBase` implements most of it for test doubles on the CPU.
    """

    @property
    def config(self) -> Config:
        """The model's configuration."""

    @property
    def device(self) -> torch.device | None:
        """The device of the logits; None is the CPU."""

    @property
    def arrangement(self) -> Sequence[Module]:
        """The modules as one object that is replaced when one of them is: earlier results are then stale."""

    @property
    def content_digest(self) -> bytes:
        """Bytes that identify everything that decides K/V apart from tokens, adapters, cache format and device.

        No model that computes other K/V has the same bytes, in any process. They change when a caller replaces a
        module.
        """

    @property
    def hooked(self) -> bool:
        """Whether hooks of the caller read hidden states: each prompt then needs a pass of its own."""

    @property
    def in_lockstep(self) -> bool:
        """Whether other processes must run the same passes, so that no choice may depend on time."""

    def invariant_tokens(self) -> int | None:
        """Return the most tokens of a pass whose results are batch-invariant; None means any number."""

    def check_peers(self) -> None:
        """Raise an error if logits are NaN because devices of the model lost one another."""

    def prelaunchable_step(
        self,
        q_len: int,
        cache: CacheT,
        attn_params: PagedParams,
        *,
        row_loras: Sequence[Sequence[AdapterT]] | None = None,
    ) -> PrelaunchableStep | None:
        """Prepare a step of `q_len` tokens a row whose ids are not known yet, or return None.

        `row_loras` are the adapters of each row.
        """

    def forward_chunk(
        self,
        input_ids: torch.Tensor,
        cache: CacheT | None = None,
        *,
        attn_params: PagedParams | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Sequence[AdapterT] | None = None,
        indexed_embeddings: Sequence[EmbeddingT] | None = None,
        return_last_state: bool = False,
        row_loras: Sequence[Sequence[AdapterT]] | None = None,
    ) -> ForwardResult:
        """Run one pass over int64 [B, q] ids with `PagedParams`.

        All rows use the adapters `loras`, or each row those of its entry in `row_loras`. The result holds "logits",
        float [B, q, Vp], unless `preprocess_only`; with `last_id_only` those of the last token of each row, [B, 1, Vp],
        or [1, rows, Vp] for the rows of `attn_params.q_lens`; and "last_state", [B, q, hidden], with
        `return_last_state`.
        """


Model: TypeAlias = ModelOf[Never, Never, Never]
"""A model of any kind, which is given no cache, adapter or embedding."""

OwnModel: TypeAlias = ModelOf[Cache, RequestAdapter, Embedding]
"""A model that is given its own caches, adapters and embeddings alone."""


class TokenizerOf(Protocol[EmbeddingT]):
    """Conversion of text to ids, and of ids to text and bytes; by the embeddings that it takes."""

    @property
    def config(self) -> Config:
        """The model's configuration."""

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, or None."""
        ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Every id that ends a text."""
        ...

    @property
    def pad_token_id(self) -> int:
        """The id that fills rows up to equal lengths; -1 for none."""

    @property
    def extended_id_to_piece(self) -> Mapping[int, str]:
        """Texts of special and added ids."""

    def encode(
        self,
        text: str,
        add_bos: bool | None = False,
        *,
        encode_special_tokens: bool = False,
        embeddings: Sequence[EmbeddingT] | None = None,
    ) -> torch.Tensor:
        """Return int64 [1, n]; the `text_alias` of an embedding becomes the ids of its rows."""

    def decode(self, ids: torch.Tensor, decode_special_tokens: bool = False) -> str:
        """Return the text of a 1-D tensor of ids."""

    def get_vocab_size(self) -> int:
        """Return 1 + the highest known id."""

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Return the text of each id."""

    def get_id_to_bytes_list(self, include_special_tokens: bool = False) -> list[bytes]:
        """Return the bytes of each id."""

    def single_id(self, piece: str) -> int | None:
        """Return the id of a whole piece, or None."""


Tokenizer: TypeAlias = TokenizerOf[Never]
"""A tokenizer of any kind, which is given no embeddings."""

OwnTokenizer: TypeAlias = TokenizerOf[Embedding]
"""A tokenizer that is given embeddings of its own kind alone."""
