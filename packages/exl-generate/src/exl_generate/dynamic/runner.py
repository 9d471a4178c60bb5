"""Runs the model over pages: one sequence's prompt chunk, or one step of a whole batch."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from exl_core import PagedParams
from exl_generate.dynamic.sequence import Sequence

if TYPE_CHECKING:
    from exl_generate.contracts import Cache, Model

__all__ = ["Runner", "Window"]

Ids = NDArray[np.int64]


class Window:
    """The ids one sequence evaluates in a step (its last token, then drafts), and after the step logits or an error."""

    __slots__ = ("error", "ids", "logits", "sequence")

    def __init__(self, sequence: Sequence, drafts: list[int]) -> None:
        self.sequence = sequence
        self.ids = [int(sequence.ids[-1]), *drafts]
        #: float32 [len(ids), Vp]
        self.logits: torch.Tensor | None = None
        self.error: Exception | None = None

    def take_logits(self) -> torch.Tensor:
        assert self.logits is not None, "the window has not been evaluated"
        return self.logits


class Runner:
    """One model with its cache. Knows pages and ids, not jobs."""

    def __init__(self, model: Model, cache: Cache, page_size: int) -> None:
        self._model = model
        self._cache = cache
        self._page_size = page_size

    def copy_page_head(self, source: int, target: int, tokens: int) -> None:
        """Copy the K/V of the first `tokens` tokens of a page to another page."""
        size = self._page_size
        self._cache.copy_states(self._cache, source * size, tokens, target * size, tokens, 0, 1, 0, 1)

    def compute(self, sequence: Sequence, start: int, end: int) -> None:
        """Compute the K/V of ids start..end, which must follow what is there and have pages."""
        self.forward(np.ascontiguousarray(sequence.ids[None, start:end]), [sequence], [start], preprocess_only=True)

    def decode(self, windows: list[Window]) -> None:
        """Evaluate every window, those of equal length together. A failing call is repeated window by window, so
        that only those that fail by themselves are marked with an error."""
        groups: dict[int, list[Window]] = defaultdict(list)
        for window in windows:
            groups[len(window.ids)].append(window)
        for group in groups.values():
            try:
                self._evaluate(group)
            except Exception:
                for window in group:
                    self._evaluate_alone(window)

    def _evaluate_alone(self, window: Window) -> None:
        try:
            self._evaluate([window])
        except Exception as error:
            window.error = error

    def _evaluate(self, group: list[Window]) -> None:
        for window in group:
            window.sequence.provide(window.sequence.kv_position + len(window.ids))
        ids = np.array([window.ids for window in group], dtype=np.int64)
        sequences = [window.sequence for window in group]
        logits = self.forward(ids, sequences, [sequence.kv_position for sequence in sequences])
        for row, window in enumerate(group):
            window.logits = logits[row]

    def forward(
        self, ids: Ids, sequences: list[Sequence], positions: list[int], preprocess_only: bool = False
    ) -> torch.Tensor:
        """One pass over int64 `ids` [B, q], row b at places positions[b].. of sequences[b]; float32 logits [B, q,
        Vp]."""
        width = max(len(sequence.allocated_pages) for sequence in sequences)
        table = np.zeros((len(sequences), width), dtype=np.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.allocated_pages)] = [page.index for page in sequence.allocated_pages]
        lengths = np.array(positions, dtype=np.int32)
        params = PagedParams(
            batch_size=len(sequences),
            block_index=torch.from_numpy(table),
            cache_seqlens=torch.from_numpy(lengths),
            max_cache_seqlen=int(lengths.max()),
            page_size=self._page_size,
            q_len=ids.shape[1],
        )
        with torch.inference_mode():
            out = self._model.forward_chunk(
                torch.from_numpy(ids), cache=self._cache, attn_params=params, preprocess_only=preprocess_only
            )
        return torch.empty(0) if preprocess_only else out["logits"].float().cpu()
