"""A forward pass as data: tokens, their places in the cache, and the results that the caller wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..embeddings import ExLlamaV2MMEmbedding
from ..errors import SequenceTooLongError, UnsupportedError
from ..lora import ExLlamaV2Lora
from ..lora.rows import of_all_rows
from .arguments import (
    check_context,
    check_ids,
    check_indices,
    check_last_state,
    check_row_loras,
    contiguous_params,
    paged_params,
)
from .attn_params import AttentionParams, PagedParams

if TYPE_CHECKING:
    from ..contracts import Adapter, Cache
    from ..language_model import LanguageModel

__all__ = ["NO_IDS", "CheckedPass", "ForwardPass", "check_results", "checked", "needs_modules"]

NO_IDS = torch.empty((0, 0), dtype=torch.int64)
"""The ids of a pass that are not known yet."""


@dataclass(slots=True)  # not frozen: that costs microseconds of host time in every step
class ForwardPass:
    """One chunk of tokens for a model, as its caller asks for it. `ExLlamaV2.forward_chunk` describes the values.

    They may be invalid: `checked` finds out, and captured steps have separate, faster checks. Nobody changes them.
    """

    ids: Tensor
    """[batch, q_len]. `NO_IDS` in a prelaunched step."""
    cache: Cache | None
    params: AttentionParams | PagedParams | None = None
    input_mask: Tensor | None = None
    position_offsets: Tensor | None = None
    preprocess_only: bool = False
    last_id_only: bool = False
    return_last_state: bool | Literal["normed"] = False
    extract: Sequence[int] | None = None
    """Numbers of modules whose input is a result."""
    abort_event: Event | None = None
    loras: Sequence[ExLlamaV2Lora] | None = None
    embeddings: Sequence[ExLlamaV2MMEmbedding] | None = None
    row_loras: Sequence[Sequence[ExLlamaV2Lora]] | None = None

    @property
    def capturable(self) -> bool:
        """Whether the pass may be a captured step, unless it `needs_modules`: all logits of tokens in pages."""
        plain = not (self.preprocess_only or self.last_id_only) and self.position_offsets is None
        return plain and isinstance(self.params, PagedParams)

    @property
    def is_plain_prompt(self) -> bool:
        """Whether a captured step may run the pass: tokens in pages, for their keys and values, or the last logits."""
        plain = self.position_offsets is None and not (self.loras or self.row_loras)
        return (self.preprocess_only or self.last_id_only) and plain and isinstance(self.params, PagedParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPass:
    """One chunk of tokens for a model, whose values are valid and in their final form."""

    ids: Tensor
    """int64 [batch, q_len] on the CPU."""
    cache: Cache | None
    params: AttentionParams | PagedParams
    input_mask: Tensor | None = None
    preprocess_only: bool = False
    last_id_only: bool = False
    return_last_state: bool | Literal["normed"] = False
    extract: frozenset[int] = frozenset()
    """Numbers of modules whose input is a result."""
    abort_event: Event | None = None
    adapters: tuple[Adapter, ...] = ()
    """The adapters of all rows, or `RowAdapters`."""
    embeddings: tuple[ExLlamaV2MMEmbedding, ...] = ()

    def end(self) -> int:
        """Return the number of tokens of the longest sequence after the pass."""
        q_len, params = self.ids.shape[1], self.params
        if isinstance(params, PagedParams):
            return int((params.cache_seqlens + (q_len if params.q_lens is None else params.q_lens)).max())
        return q_len + (0 if params.past_len is None else params.past_len)


def needs_modules(asked: ForwardPass | CheckedPass) -> str | None:
    """Return the reason why only the modules' own passes can run a pass, or None."""
    if asked.embeddings:
        return "embeddings are inserted by the modules' own passes"
    if asked.return_last_state or asked.extract:
        return "states between modules are results of the modules' own passes"
    if asked.abort_event is not None:
        return "an abort event is checked between modules"
    if asked.input_mask is not None or (
        isinstance(asked.params, AttentionParams) and asked.params.input_mask is not None
    ):
        return "a mask is applied by the modules' own passes"
    return None


def checked(model: LanguageModel, asked: ForwardPass) -> CheckedPass:
    """Return a pass with checked values in their final form, before anything is computed.

    Raises:
        ModelStateError: the model is not loaded.
        InputError: an argument is malformed.
        TokenIdError: an id is outside the vocabulary.
        UnsupportedError: arguments exclude each other.
        SequenceTooLongError: too many positions.
    """
    ids, embeddings = check_ids(model, asked.ids, asked.embeddings)
    batch, q_len = ids.shape
    sets = check_row_loras(model, asked.loras, asked.row_loras, batch)
    if len(set(sets)) > 1 and isinstance(asked.params, PagedParams) and asked.params.q_lens is not None:
        raise UnsupportedError("row_loras and PagedParams.q_lens exclude each other: one pass for each adapter")
    mask, offsets, abort = asked.input_mask, asked.position_offsets, asked.abort_event
    check_context(asked.cache, mask, offsets, abort, batch)
    params: AttentionParams | PagedParams
    if isinstance(asked.params, PagedParams):
        params = paged_params(asked.params, mask, offsets)
    else:
        params = contiguous_params(asked.params, asked.cache, batch, q_len, mask, offsets)
        check_context(asked.cache, params.input_mask, params.position_offsets, abort, batch)
        mask = params.input_mask
    found = CheckedPass(
        ids=ids,
        cache=asked.cache,
        params=params,
        input_mask=mask,
        preprocess_only=asked.preprocess_only,
        last_id_only=asked.last_id_only,
        return_last_state=asked.return_last_state,
        extract=check_indices(asked.extract, len(model.modules)),
        abort_event=abort,
        adapters=of_all_rows(sets, q_len, model.device),
        embeddings=embeddings,
    )
    check_results(model, found)
    return found


def check_results(model: LanguageModel, asked: CheckedPass) -> None:
    """Check which results a pass is asked for. Raises SequenceTooLongError, InputError."""
    limit, q_len = model.config.max_output_len, asked.ids.shape[1]
    if limit is not None and q_len > limit and not (asked.preprocess_only or asked.last_id_only):
        raise SequenceTooLongError(
            f"seq_len exceeds max_output_len: {q_len} positions of logits, config.max_output_len is {limit}; use "
            "last_id_only=True or preprocess_only=True, or raise it"
        )
    check_last_state(asked.return_last_state)
