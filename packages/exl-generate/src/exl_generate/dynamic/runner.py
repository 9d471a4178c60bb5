"""Run the model over pages: chunks of prompts, or one step of a whole batch."""

from __future__ import annotations

import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from exl_core import PagedParams
from exl_core.cache.writes import paged_copies
from exl_generate.dynamic.sequence import EMBEDDING_INDEX, Sequence
from exl_generate.errors import NoCandidatesError, RequestError
from exl_generate.interrupts import interruptible
from exl_kernels.errors import ExlError

if TYPE_CHECKING:
    from exl_core.contracts import ForwardResult
    from exl_generate.contracts import Cache, Embedding, OwnModel, PrelaunchableStep, RequestAdapter
    from exl_generate.sampling.sampler import Sample

__all__ = ["Chunk", "Runner", "Window", "rows_of"]

Ids = NDArray[np.int64]
Output = Literal["all", "last", "none"]
"""The tokens of a pass whose logits are wanted: all, the last one of each sequence, or none."""
_Kind = tuple[int, "tuple[RequestAdapter, ...]", "tuple[Embedding, ...]", bool]
"""Ids of a window, the adapters that its pass has, the embeddings, and whether the hidden state is wanted."""


@dataclass(eq=False, slots=True)
class Chunk:
    """Ids start..end of a sequence's prompt, and the last id after them if the chunk `closes` the prompt."""

    sequence: Sequence
    start: int
    end: int
    #: the pass also evaluates the prompt's last id, whose logits give the first token
    closes: bool = False
    #: float32 [Vp] after the last id, where the chunk `closes` and has been computed
    logits: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        """Tokens of the chunk in its pass."""
        return self.end + self.closes - self.start

    @property
    def ids(self) -> Ids:
        """int64 [tokens], a view."""
        return self.sequence.ids[self.start : self.end + self.closes]


class Window:
    """The ids that one sequence evaluates in a step (its last token, then drafts), and then their logits or an
    error.
    """

    __slots__ = ("error", "ids", "logits", "sequence", "state", "wants_state")

    def __init__(self, sequence: Sequence, drafts: SequenceOf[int], wants_state: bool = False) -> None:
        self.sequence = sequence
        self.ids = [int(sequence.ids[-1]), *drafts]
        self.wants_state = wants_state
        #: float32 [Vp] after each of `ids`, where the model put them
        self.logits: SequenceOf[torch.Tensor] | None = None
        #: the last hidden state [len(ids), hidden], if wanted
        self.state: torch.Tensor | None = None
        self.error: Exception | None = None

    def row(self, at: int) -> torch.Tensor:
        """Return the logits after `ids[at]`."""
        assert self.logits is not None, "the window has not been evaluated"
        return self.logits[at]

    @property
    def kind(self) -> _Kind:
        """A key: windows of one kind go through the model together."""
        loras, embeddings = self.sequence.loras, self.sequence.embeddings
        if loras and mixable(self.sequence):
            loras = ()
        if embeddings and max(self.ids) < EMBEDDING_INDEX:
            embeddings = ()
        return len(self.ids), loras, embeddings, self.wants_state


def mixable(sequence: Sequence) -> bool:
    """Whether the sequence can be in a pass with others that have other adapters, or none."""
    return not sequence.loras or all(lora.mixable for lora in sequence.loras)


class _PassOptions(TypedDict, total=False):
    """Arguments of a pass that few passes have; see `contracts.ModelOf.forward_chunk`."""

    loras: SequenceOf[RequestAdapter]
    row_loras: SequenceOf[SequenceOf[RequestAdapter]]
    indexed_embeddings: SequenceOf[Embedding]
    return_last_state: bool


class Runner:
    """Run one model over the pages of its cache; it knows no jobs.

    A `draft` model uses no adapters, and id 0 in place of ids that it does not have, such as those of embeddings.
    """

    def __init__(self, model: OwnModel, cache: Cache, page_size: int, draft: bool = False) -> None:
        self._model = model
        self._cache = cache
        self._page_size = page_size
        self._draft = draft
        #: whether a pass is only queued when it returns: the model is on a GPU
        self.asynchronous = model.device is not None and model.device.type == "cuda"
        # A CPU pass may take long and may be interrupted: what it has written is beyond the valid part of the pages.
        # A GPU pass is only queued; an interrupt could leave a step half captured.
        self._guard: Callable[[], AbstractContextManager[None]] = nullcontext if self.asynchronous else interruptible

    def copy_page_head(self, source: int, target: int, tokens: int) -> None:
        """Copy the K/V of the first `tokens` tokens of a page to another page."""
        size = self._page_size
        with paged_copies():
            self._cache.copy_states(self._cache, source * size, tokens, target * size, tokens, 0, 1, 0, 1)

    def may_close(self, chunk: Chunk) -> bool:
        """Whether the pass over a chunk may close the prompt: its logits are bitwise those of a decode step."""
        sequence, alike = chunk.sequence, self._model.invariant_tokens()
        if chunk.end < sequence.prefill_end or (alike is not None and len(chunk) >= alike):
            return False
        ids = sequence.ids[chunk.start : chunk.end + 1]
        return not (sequence.scoring or self.hooked or _has_embeddings(sequence, ids))

    def kind_of(self, chunk: Chunk) -> tuple[object, int]:
        """Return a key, and the most tokens of a pass: chunks of one key may be computed in one pass."""
        loras = chunk.sequence.loras
        if chunk.sequence.scoring or self.hooked or _has_embeddings(chunk.sequence, chunk.ids):
            return chunk, len(chunk)  # by itself
        alike = self._model.invariant_tokens()
        if alike is None or len(chunk) > alike:
            return (loras, "any"), sys.maxsize
        return (loras, "alike"), alike

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model knows."""
        return int(self._model.config.vocab_size)

    @property
    def hooked(self) -> bool:
        """Whether hooks of the caller see hidden states: each prompt then needs a pass of its own."""
        return self._model.hooked

    def compute(self, chunks: SequenceOf[Chunk]) -> list[Exception | None]:
        """Compute the K/V of these chunks, and the logits of those that close a prompt, in one pass or, if that fails,
        by halves.

        Each chunk must follow the valid K/V of its sequence and have its pages. Returns the error of each chunk, None
        for success.
        """
        error = _attempt(lambda: self._compute(chunks))
        if error is None or len(chunks) == 1:
            return [error] * len(chunks)
        half = len(chunks) // 2
        return [*self.compute(chunks[:half]), *self.compute(chunks[half:])]

    def _compute(self, chunks: SequenceOf[Chunk]) -> None:
        sequences = [chunk.sequence for chunk in chunks]
        ids = np.concatenate([chunk.ids for chunk in chunks])[None]
        lengths = None if len(chunks) == 1 else [chunk.tokens for chunk in chunks]
        embeddings = sequences[0].embeddings if lengths is None else ()
        starts = [chunk.start for chunk in chunks]
        scores = sequences[0].scores if sequences[0].scoring and not self._draft else None
        output: Output = "all" if scores is not None else "last" if any(chunk.closes for chunk in chunks) else "none"
        found = self.forward(ids, sequences, starts, embeddings, output=output, lengths=lengths)
        if scores is not None:
            scores.add(starts[0], found["logits"][0].float(), self.vocab_size)
        elif output == "last":
            logits = found["logits"].float().clone()  # the model runs again before they are read
            if logits.shape[1] != len(chunks):
                raise RequestError(
                    f"model.forward_chunk returned {logits.shape[1]} rows of logits for last_id_only=True, must be "
                    f"{len(chunks)}, one a prompt: a function in its place must pass last_id_only on"
                )
            for chunk, row in zip(chunks, rows_of(logits), strict=True):
                chunk.logits = row if chunk.closes else None

    def decode(self, windows: list[Window]) -> None:
        """Evaluate every window; windows of one kind together.

        A failing call is repeated window by window, so that only the windows that fail alone get an error.
        """
        groups: dict[_Kind, list[Window]] = defaultdict(list)
        for window in windows:
            groups[window.kind].append(window)
        passes = [(kind, part) for kind, group in groups.items() for part in self._passes(group)]
        keep = self.asynchronous or len(passes) > 1
        for kind, group in passes:
            if _attempt(partial(self._evaluate, kind, group, keep)) is not None:
                for window in group:
                    window.error = _attempt(partial(self._evaluate, kind, [window], True))

    def _passes(self, group: list[Window]) -> list[list[Window]]:
        """Return the passes of windows of one kind."""
        if self.may_share_a_pass([window.sequence for window in group], len(group) * len(group[0].ids)):
            return [group]
        by_adapters: dict[tuple[RequestAdapter, ...], list[Window]] = defaultdict(list)
        for window in group:
            by_adapters[tuple(window.sequence.loras)].append(window)
        return list(by_adapters.values())

    def may_share_a_pass(self, sequences: SequenceOf[Sequence], tokens: int) -> bool:
        """Whether sequences, with so many tokens in all, may be in one pass as far as their adapters are concerned.

        Different adapters share a pass only while its results are batch-invariant: tokens never depend on the adapters
        of other sequences.
        """
        if len({sequence.loras for sequence in sequences}) == 1:
            return True
        alike = self._model.invariant_tokens()
        return alike is None or tokens <= alike

    def _evaluate(self, kind: _Kind, group: list[Window], keep: bool) -> None:
        """Evaluate one pass over windows of this kind.

        `keep`: the model may run again, and overwrite these logits, before they are read.
        """
        _, _, embeddings, wants_state = kind
        for window in group:
            window.sequence.provide(window.sequence.kv_position + len(window.ids))
        ids = np.array([window.ids for window in group], dtype=np.int64)
        sequences = [window.sequence for window in group]
        out = self.forward(
            ids, sequences, [sequence.kv_position for sequence in sequences], embeddings, wants_state=wants_state
        )
        logits = out["logits"].float()
        rows, length = rows_of(logits.clone() if keep else logits), ids.shape[1]
        for i, window in enumerate(group):
            window.logits = rows[i * length : (i + 1) * length]
        if wants_state:
            for window, state in zip(group, out["last_state"].unbind(0), strict=True):
                window.state = state

    def forward(
        self,
        ids: Ids,
        sequences: list[Sequence],
        positions: list[int],
        embeddings: SequenceOf[Embedding] = (),
        output: Output = "all",
        wants_state: bool = False,
        lengths: list[int] | None = None,
    ) -> ForwardResult:
        """Run one pass over int64 `ids` [B, q], row b at positions[b].. of sequences[b], for these logits.

        With `lengths`, ids are [1, their sum], one sequence after the other, and all have the same adapters.
        """
        params = self._params(sequences, positions, ids.shape[1])
        if lengths is not None:
            params.q_lens = torch.tensor(lengths, dtype=torch.int32)
        extra: _PassOptions = {}
        if self._draft:
            ids = np.where(ids < self.vocab_size, ids, 0)
        else:
            extra = _adapters_of(sequences)
            if embeddings:
                extra["indexed_embeddings"] = list(embeddings)
            if wants_state:
                extra["return_last_state"] = True
        with torch.inference_mode(), self._guard():
            return self._model.forward_chunk(
                torch.from_numpy(ids),
                cache=self._cache,
                attn_params=params,
                preprocess_only=output == "none",
                last_id_only=output == "last",
                **extra,
            )

    def prelaunchable_step(
        self, sequences: list[Sequence], positions: list[int], q_len: int = 1
    ) -> tuple[PagedParams, PrelaunchableStep | None]:
        """Prepare a pass over `q_len` tokens of each sequence from `positions` on.

        The sequences have no embeddings there and have mixable adapters. Returns the pass's parameters, and the step of
        `Model.prelaunchable_step` where the model can do everything but the tokens beforehand, else None.
        """
        params = self._params(sequences, positions, q_len)
        adapters = [list(sequence.loras) for sequence in sequences]
        if not any(adapters) or self._draft:
            return params, self._model.prelaunchable_step(q_len, self._cache, params)
        return params, self._model.prelaunchable_step(q_len, self._cache, params, row_loras=adapters)

    def run_prelaunched(self, ids: torch.Tensor, sequences: list[Sequence], params: PagedParams) -> torch.Tensor:
        """Run a step for which the model has no prelaunchable one, over int64 `ids` [B, q] with the parameters of
        `prelaunchable_step`; returns logits float32 [B, q, Vp] in new memory.
        """
        extra: _PassOptions = {} if self._draft else _adapters_of(sequences)
        with torch.inference_mode():
            found = self._model.forward_chunk(ids, cache=self._cache, attn_params=params, **extra)
        return found["logits"].float().clone()  # the result of forward_chunk may be the model's memory

    def check_peers(self) -> None:
        """Raise DeviceError if devices of the model lost one another in a pass, whose K/V and logits are then NaN."""
        self._model.check_peers()

    def explained(self, samples: list[Sample | Exception]) -> list[Sample | Exception]:
        """Replace errors of samples whose logits are NaN because devices of the model lost one another."""
        if not [sample for sample in samples if isinstance(sample, NoCandidatesError)]:
            return samples
        try:
            self.check_peers()
        except ExlError as error:
            return [error if isinstance(sample, NoCandidatesError) else sample for sample in samples]
        return samples

    def _params(self, sequences: list[Sequence], positions: list[int], q_len: int) -> PagedParams:
        blocks = [sequence.block for sequence in sequences]
        width = max(map(len, blocks))
        table = np.zeros((len(blocks), width), dtype=np.int32)
        for row, block in enumerate(blocks):
            table[row, : len(block)] = block
        return PagedParams(
            batch_size=len(sequences),
            block_index=torch.from_numpy(table),
            cache_seqlens=torch.from_numpy(np.array(positions, dtype=np.int32)),
            max_cache_seqlen=max(positions),
            page_size=self._page_size,
            q_len=q_len,
            rope_offsets=None if self._draft else _offsets(sequences, positions),
        )


def _has_embeddings(sequence: Sequence, ids: Ids) -> bool:
    return bool(sequence.embeddings) and int(ids.max()) >= EMBEDDING_INDEX


def rows_of(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the rows of logits [B, q, Vp], B * q of them. One call is cheaper than an index for each."""
    return logits.flatten(0, 1).unbind(0)


def _attempt(run: Callable[[], object]) -> Exception | None:
    """Return what `run` raised, or None. Frees the frames of a failed pass: the next one may need their memory."""
    try:
        run()
        return None
    except Exception as error:
        found: BaseException | None = error
        while found is not None:
            traceback.clear_frames(found.__traceback__)
            found = found.__cause__
        return error


def _offsets(sequences: list[Sequence], places: list[int]) -> torch.Tensor | None:
    """Return int32 [B]: the offset of each row's position after images; None where all are 0."""
    if not [sequence for sequence in sequences if sequence.pictures.offsets]:
        return None
    pairs = zip(sequences, places, strict=True)
    return torch.tensor([sequence.pictures.offset_at(place) for sequence, place in pairs], dtype=torch.int32)


def _adapters_of(sequences: list[Sequence]) -> _PassOptions:
    """Return the arguments of a pass that name the adapters of its rows."""
    if len({sequence.loras for sequence in sequences}) == 1:
        first = sequences[0].loras
        return {"loras": list(first)} if first else {}
    return {"row_loras": [list(sequence.loras) for sequence in sequences]}
