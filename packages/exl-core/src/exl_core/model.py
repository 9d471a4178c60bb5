"""`ExLlamaV2`: a model that can be loaded and run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any, Literal

import torch
from torch import Tensor

from .config import ExLlamaV2Config
from .contracts import Cache, ForwardResult
from .embeddings import ExLlamaV2MMEmbedding
from .errors import UnsupportedError
from .execution.attn_params import AttentionParams, PagedParams
from .execution.forward import forward_all, forward_chunk
from .execution.forward_pass import ForwardPass
from .lora import ExLlamaV2Lora
from .stepping import SteppingModel

__all__ = ["ExLlamaV2"]


class ExLlamaV2(SteppingModel):
    """A language model. Building it reads no weights; `load` or `load_autosplit` reads them, `unload` drops them.

    Not thread-safe: one thread at a time may call forward.

    Args:
        config: a prepared configuration.
        lazy_load: ignored.
        archparams: not supported.

    Raises:
        UnsupportedError: archparams is given, or a setting is not supported.
        ConfigError: a setting is invalid.
        InputError: config is no ExLlamaV2Config.
    """

    def __init__(self, config: ExLlamaV2Config, lazy_load: bool = False, archparams: None = None) -> None:
        if archparams is not None:
            raise UnsupportedError("archparams is not supported: the architecture comes from config.arch")
        super().__init__(config)

    def __repr__(self) -> str:
        config = self.config
        tensor_parallel = () if self.tp_context is None else self.tp_context.names
        where = f"on {', '.join(dict.fromkeys([*self.placement.names, *tensor_parallel]))}"
        return (
            f"{type(self).__name__}({Path(config.model_dir or '?').name}: {config.architecture}, "
            f"{config.num_hidden_layers} layers, vocabulary {config.vocab_size}, context {config.max_seq_len}, "
            f"{where if self.loaded else 'not loaded'})"
        )

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        input_mask: Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Sequence[ExLlamaV2Lora] | None = None,
        return_last_state: bool | Literal["normed"] = False,
        position_offsets: Tensor | None = None,
        abort_event: Event | None = None,
        cpu_logits: bool = False,
        *,
        indexed_embeddings: Sequence[ExLlamaV2MMEmbedding] | None = None,
    ) -> Any:  # three arguments choose among the logits, None, and a pair
        """Run ids through the model, in chunks if they are many, appending to `cache`.

        Args:
            input_ids: int64 [batch, q_len].
            cache: keys and values so far, or None.
            input_mask: additive [batch, past + q_len]; 0 attends to a key, -inf ignores it. With tokens in the cache it
                may be narrower, such as the mask of the prompt: later keys are attended to.
            preprocess_only: store keys and values without computing logits.
            last_id_only: compute the logits of the last position only.
            loras: adapters to add, in this order.
            return_last_state: return the hidden state as well: before the final norm, or after it with "normed".
            position_offsets: int [batch, 1], added to RoPE positions (minus the left padding of each row).
            abort_event: when set, the pass ends; cache.current_seq_len stays at the last finished chunk.
            cpu_logits: move the logits to the CPU.
            indexed_embeddings: embeddings whose rows ids from EMBEDDING_INDEX on refer to.

        Returns:
            Float32 logits [batch, q_len (1 with last_id_only), padded vocabulary] on the model's device, -65504 in
            columns beyond the vocabulary; None with preprocess_only, and None if aborted. With return_last_state
            (logits or None, state), where state is [batch, tokens of the last chunk, hidden], float32 or on a GPU half.

        Raises:
            ModelStateError: the model is not loaded.
            SequenceTooLongError: too many positions. All errors are raised before anything is computed.
            TokenIdError: an id is outside the vocabulary.
            InputError: an argument is malformed.
        """
        asked = ForwardPass(
            ids=input_ids,
            cache=cache,
            input_mask=input_mask,
            position_offsets=position_offsets,
            preprocess_only=preprocess_only,
            last_id_only=last_id_only,
            return_last_state=return_last_state,
            abort_event=abort_event,
            loras=loras,
            embeddings=indexed_embeddings,
        )
        return forward_all(self, asked, cpu_logits=cpu_logits)

    def forward_chunk(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        input_mask: Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Sequence[ExLlamaV2Lora] | None = None,
        return_last_state: bool | Literal["normed"] = False,
        position_offsets: Tensor | None = None,
        abort_event: Event | None = None,
        attn_params: AttentionParams | PagedParams | None = None,
        extract_state_indices: Sequence[int] | None = None,
        *,
        indexed_embeddings: Sequence[ExLlamaV2MMEmbedding] | None = None,
        row_loras: Sequence[Sequence[ExLlamaV2Lora]] | None = None,
    ) -> ForwardResult:
        """Run one chunk, contiguous or paged.

        `execution.select` decides how the pass runs. On a GPU a paged step of few tokens is one launch of a captured
        graph (EXL_CUDA_GRAPHS=0 disables captured graphs), with bitwise identical results. Its logits are in memory
        that the next such call overwrites.

        Args:
            input_ids: int64 [batch, q_len].
            cache: keys and values so far, or None.
            input_mask: as for `forward`.
            preprocess_only: as for `forward`.
            last_id_only: as for `forward`; with `PagedParams.q_lens` the last token of each of its rows.
            loras: as for `forward`.
            return_last_state: as for `forward`.
            position_offsets: as for `forward`.
            abort_event: as for `forward`.
            attn_params: places of the tokens. Contiguous AttentionParams have the past length and set
                cache.current_seq_len to it. PagedParams have the length of each sequence; current_seq_len has no
                meaning then.
            extract_state_indices: numbers of modules whose input is returned.
            indexed_embeddings: as for `forward`.
            row_loras: instead of `loras`, the adapters of each sequence of the batch. Where they differ, all must be
                `mixable`. Each row's result is bitwise identical to that of a pass with its adapters alone.

        Returns:
            A dict with the keys that apply: "logits" as in `forward`, [1, rows, padded vocabulary] for the last tokens
            of `q_lens`; "last_state" [batch, q_len, hidden]; "states" {index: input of model.modules[index]}.
            "aborted": True alone if `abort_event` was set; cache.current_seq_len is then unchanged.

        Raises:
            ModelStateError, SequenceTooLongError, TokenIdError, InputError: as for `forward`.
            UnsupportedError: arguments exclude each other.
        """
        asked = ForwardPass(
            ids=input_ids,
            cache=cache,
            params=attn_params,
            input_mask=input_mask,
            position_offsets=position_offsets,
            preprocess_only=preprocess_only,
            last_id_only=last_id_only,
            return_last_state=return_last_state,
            extract=extract_state_indices,
            abort_event=abort_event,
            loras=loras,
            embeddings=indexed_embeddings,
            row_loras=row_loras,
        )
        return forward_chunk(self, asked)
