"""`ExLlamaV2StreamingGenerator`: one request, one token a call."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from numbers import Real
from operator import index
from typing import Any, ClassVar

import torch

from exl_generate.contracts import Cache, Model, Tokenizer
from exl_generate.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.dynamic.draft_model import ModelDrafter
from exl_generate.dynamic.parameters import check_abort_event, count_of
from exl_generate.dynamic.sequence import EMBEDDING_INDEX
from exl_generate.dynamic.text_drafter import TextDrafter
from exl_generate.errors import CapacityError, JobStateError, RequestError
from exl_generate.interrupts import defer_sigint
from exl_generate.sampling import Settings
from exl_generate.static.base import ExLlamaV2BaseGenerator, eos_ids
from exl_generate.static.rows import one_row, page_size_of
from exl_kernels.errors import UnsupportedError

__all__ = ["ExLlamaV2StreamingGenerator"]

Result = dict[str, Any]

#: Attributes that configure drafting: integers of at least 0.
COUNTS = (
    "num_speculative_tokens",
    "speculative_ngram_min",
    "speculative_ngram_max",
    "speculative_ngram_max_inf",
    "speculative_ngram_threshold",
)


class ExLlamaV2StreamingGenerator(ExLlamaV2BaseGenerator):
    """Stream one request: `set_stop_conditions`, `begin_stream_ex`, then `stream_ex` until `eos`.

    K/V of an earlier request are reused for a common beginning of the new ids. The stream ends where model or cache are
    full. A stream between two calls ends with `JobStateError` when another generator takes the cache.

    Args:
        model: A loaded model.
        cache: A cache of the model.
        tokenizer: The model's tokenizer.
        draft_model: A smaller model with the same vocabulary, for speculative decoding.
        draft_cache: A cache of the draft model. None: an FP16 cache of the main cache's size.
        num_speculative_tokens: Most draft tokens of a step.

    Raises:
        RequestError: `draft_model` is no `ExLlamaV2`, and `draft_cache` is None.
    """

    # Constants that programs written for exllamav2 may read; nothing here depends on them.
    tail_decode_tokens: ClassVar[int] = 2
    max_fallback_tokens: ClassVar[int] = 4

    def __init__(
        self,
        model: Model,
        cache: Cache,
        tokenizer: Tokenizer,
        draft_model: Model | None = None,
        draft_cache: Cache | None = None,
        num_speculative_tokens: int = 5,
    ) -> None:
        super().__init__(model, cache, tokenizer)
        if draft_model is not None and draft_cache is None:
            from exl_core import ExLlamaV2, ExLlamaV2Cache

            if not isinstance(draft_model, ExLlamaV2):
                raise RequestError(f"draft_cache is None; pass a cache of this {type(draft_model).__name__}")
            draft_cache = ExLlamaV2Cache(draft_model, cache.batch_size, cache.max_seq_len)
        self.draft_model = draft_model
        self.draft_cache = draft_cache
        self.num_speculative_tokens = num_speculative_tokens
        self.speculative_prob_threshold = 0.25
        self.speculative_ngram = False
        self.speculative_ngram_min = 1
        self.speculative_ngram_max = 5
        self.speculative_ngram_max_inf = 3
        self.speculative_ngram_threshold = 1
        self.ngram_preloaded: list[int] | None = None
        self.stop_tokens: set[int] = set(eos_ids(tokenizer))
        self.stop_strings: set[str] = set()
        self.reset_sd_stats()
        self._job: ExLlamaV2DynamicJob | None = None
        self._results: list[Result] = []
        self._built_for: tuple[Any, ...] | None = None

    # ---- before a stream -------------------------------------------------------------------------------------------

    def set_stop_conditions(self, stop_conditions: Iterable[int | str]) -> None:
        """Set the ids and strings that end a stream; replaces all earlier ones, the tokenizer's EOS included.

        Raises `RequestError` unless `stop_conditions` is a list, tuple or set of ids and non-empty strings.
        """
        if not isinstance(stop_conditions, list | tuple | set):
            raise RequestError(f"stop_conditions is {stop_conditions!r}; pass a list, tuple or set of ids and strings")
        tokens, strings = set[int](), set[str]()
        for condition in stop_conditions:
            if isinstance(condition, str) and condition:
                strings.add(condition)
            elif isinstance(condition, int) and not isinstance(condition, bool):
                tokens.add(condition)
            else:
                raise RequestError(f"stop condition {condition!r} is neither a token id nor a non-empty string")
        self.stop_tokens, self.stop_strings = tokens, strings

    def ngram_preload(self, input_ids: torch.Tensor | list[int]) -> None:
        """Set example text for n-gram guesses, used where the request's own text has no match.

        `input_ids` are its ids, a list or a tensor of any shape. Raises RequestError if they are no ids.
        """
        flat = input_ids.reshape(-1).tolist() if isinstance(input_ids, torch.Tensor) else input_ids
        preloaded, vocab = _ids("ngram_preload", flat), self.model.config.vocab_size
        bad = next((i for i in preloaded if i < 0 or vocab <= i < EMBEDDING_INDEX), None)
        if bad is not None:
            raise RequestError(f"ngram_preload: token id {bad}; the vocabulary has ids 0 to {vocab - 1}")
        self.ngram_preloaded = preloaded

    def begin_stream(
        self,
        input_ids: torch.Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: Any = None,
        input_mask: torch.Tensor | None = None,
        position_offsets: torch.Tensor | None = None,
        abort_event: threading.Event | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin a stream: an older name of `begin_stream_ex`.

        `input_ids`, `gen_settings`, `token_healing`, `loras`, `input_mask`, `position_offsets`, `abort_event` and all
        `kwargs` are its parameters.
        """
        self.begin_stream_ex(
            input_ids,
            gen_settings,
            token_healing,
            loras,
            input_mask,
            position_offsets,
            abort_event=abort_event,
            **kwargs,
        )

    def begin_stream_ex(
        self,
        input_ids: torch.Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: Any = None,
        input_mask: torch.Tensor | None = None,
        position_offsets: torch.Tensor | None = None,
        return_probabilities: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        abort_event: threading.Event | None = None,
        input_embeddings: Sequence[Any] | None = None,
        decode_special_tokens: bool = False,
        banned_strings: Sequence[str] | None = None,
        filters: Sequence[Any] | None = None,
        filter_prefer_eos: bool = False,
        seed: int | None = None,
    ) -> None:
        """Begin a stream: compute the prompt.

        Args:
            input_ids: int64 [1, n], or [2, n] for CFG: positive and negative prompt, left-padded.
            gen_settings: Sampler settings.
            token_healing: Sample the last token of the prompt again, among tokens that begin with its text.
            loras: An adapter or a list of adapters.
            input_mask: Additive mask, -inf at padding.
            position_offsets: Offsets that follow from the mask; other values are rejected.
            return_probabilities: Report the probability of each token.
            return_top_tokens: Number of candidates to report with each token.
            return_logits: Report the logits of each token.
            abort_event: Ends the prefill only; the next `stream_ex` then reports the end.
            input_embeddings: The `ExLlamaV2MMEmbedding` objects whose ids are in `input_ids`.
            decode_special_tokens: Special tokens have their text in the output.
            banned_strings: Strings that must not be generated.
            filters: Filters that the output must satisfy.
            filter_prefer_eos: Choose a stop token as soon as the filters allow one.
            seed: Seed of the random numbers; None draws one. (exllamav2 has no such parameter.)

        Raises:
            RequestError: a parameter is not valid.
            CapacityError: the prompt fills the model's or the cache's length.
        """
        check_abort_event(abort_event)
        rows = _rows(input_ids, input_mask)
        _check_offsets(position_offsets, [row.shape[1] - input_ids.shape[1] for row in rows])
        engine = self.engine()
        share = engine.max_pages // len(rows) * engine.page_size
        room = min(self.limit, share) - max(row.shape[1] for row in rows)
        if room < 1:
            raise CapacityError(f"the prompt fills all {self.limit} tokens of model and cache; shorten it")
        healing = token_healing and min(row.shape[1] for row in rows) > 1
        job = ExLlamaV2DynamicJob(
            rows,
            room,
            gen_settings=gen_settings,
            seed=seed,
            stop_conditions=[*self.stop_tokens, *sorted(self.stop_strings)],
            decode_special_tokens=decode_special_tokens,
            return_top_tokens=return_top_tokens,
            return_logits=return_logits,
            return_probs=return_probabilities,
            filters=filters,
            filter_prefer_eos=filter_prefer_eos,
            token_healing=token_healing,
            banned_strings=banned_strings,
            loras=[] if loras is None else loras,
            embeddings=input_embeddings,
        )
        self._compute_prompt(engine, job, healing, abort_event)

    def _compute_prompt(
        self,
        engine: ExLlamaV2DynamicGenerator,
        job: ExLlamaV2DynamicJob,
        healing: bool,
        abort_event: threading.Event | None,
    ) -> None:
        """Make `job` the stream's and run its prefill, which `abort_event` ends."""
        with defer_sigint() as section:
            self._close()
            try:
                job.pause()
                engine.enqueue(job)
                self._job, self._healed_pending, self._healed_hidden = job, healing, not healing
                while not job.prefilled and not job.is_finished:
                    if abort_event is not None and abort_event.is_set():
                        engine.cancel(job)
                    self._pull(engine)
                    section.deliver()
                if job.is_finished:
                    self._pull(engine)
                job.unpause()
            except BaseException:
                self._close()
                raise

    # ---- a stream --------------------------------------------------------------------------------------------------

    def stream_ex(self, ban_tokens: Iterable[int] | None = None) -> Result:
        """Return the next token as a dict.

        Keys: `chunk` (str, may be empty), `eos`, `chunk_token_ids` [1, k] (k may be 0; a healed token is never
        included); `probs`, `top_tokens`, `top_probs`, `logits` [1, k, ..] where requested; `suppressed`, the text of a
        banned string that was withdrawn.

        Args:
            ban_tokens: Ids to avoid in this call alone.

        Raises:
            JobStateError: no stream has begun, or it has ended.
        """
        told, after = self._next(ban_tokens)
        before = self._results, self._healed_pending, self._healed_hidden
        try:
            self._results, self._healed_pending, self._healed_hidden = after
            return told
        except BaseException:  # of a Ctrl-C, which has no place to come in here (`ExLlamaV2DynamicGenerator.iterate`)
            self._results, self._healed_pending, self._healed_hidden = before
            raise

    def stream(self, ban_tokens: Iterable[int] | None = None) -> tuple[Any, ...]:
        """Return the next token as (chunk, eos, chunk_token_ids), then probs and logits where requested.

        The ids in `ban_tokens` are not sampled in this call.
        """
        result, after = self._next(ban_tokens)
        names = ("chunk", "eos", "chunk_token_ids", "probs", "logits")
        told = tuple(result[key] for key in names if key in result)
        before = self._results, self._healed_pending, self._healed_hidden
        try:
            self._results, self._healed_pending, self._healed_hidden = after
            return told
        except BaseException:
            self._results, self._healed_pending, self._healed_hidden = before
            raise

    def full(self) -> bool:
        """Whether the sequence has reached the limit of model or cache."""
        return self._job is not None and len(self._job.sequence) >= self.limit

    def reset_sd_stats(self) -> None:
        """Set the counters of speculation to zero."""
        self.total_tokens = self.total_draft_tokens = self.accepted_draft_tokens = 0

    def get_sd_stats(self) -> tuple[float, float, int, int, int]:
        """Return (accepted / all tokens, accepted / drafted tokens, all, drafted, accepted); 0 without any count."""
        efficiency = self.accepted_draft_tokens / self.total_tokens if self.total_tokens else 0.0
        accuracy = self.accepted_draft_tokens / self.total_draft_tokens if self.total_draft_tokens else 0.0
        return efficiency, accuracy, self.total_tokens, self.total_draft_tokens, self.accepted_draft_tokens

    # ---- internals -------------------------------------------------------------------------------------------------

    def engine(self) -> ExLlamaV2DynamicGenerator:
        """Return the engine, made again when the configuration of drafting has changed.

        Raises RequestError if an attribute that configures drafting has no valid value.
        """
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None or name != "num_speculative_tokens" or self.draft_model is not None:
                count_of(name, value)
        given: Any = self.speculative_prob_threshold
        if not isinstance(given, Real):
            raise RequestError(f"speculative_prob_threshold is {given!r:.80}; it must be a number")
        ngram = (self.speculative_ngram, self.speculative_ngram_max, self.speculative_ngram_max_inf)
        wanted = (*ngram, self.draft_model, self.num_speculative_tokens)
        if self._engine is None or self._built_for != wanted:
            self._engine, self._built_for = self._build(), wanted
        drafter = self._engine.drafter
        if isinstance(drafter, ModelDrafter):
            drafter.threshold = self.speculative_prob_threshold
        if isinstance(drafter, TextDrafter):
            drafter.configure(self.speculative_ngram_min, self.speculative_ngram_threshold, self.ngram_preloaded)
        return self._engine

    def _build(self) -> ExLlamaV2DynamicGenerator:
        kw: dict[str, Any] = {}
        if self.speculative_ngram and self.speculative_ngram_max_inf > 1:
            drafts = self.speculative_ngram_max_inf - 1
            kw = {"use_ngram_draft": True, "max_ngram": self.speculative_ngram_max, "num_draft_tokens": drafts}
        elif self.draft_model is not None and self.draft_cache is not None and self.num_speculative_tokens > 0:
            drafts = self.num_speculative_tokens
            kw = {"draft_model": self.draft_model, "draft_cache": one_row(self.draft_cache), "num_draft_tokens": drafts}
        most = kw.get("num_draft_tokens", 0) + 1
        engine = ExLlamaV2DynamicGenerator(
            self.model, one_row(self.cache), self.tokenizer, page_size=page_size_of(self.cache), max_q_size=most, **kw
        )
        engine.yields_cache = True  # an unfinished stream does not block other generators
        return engine

    def _close(self) -> None:
        """End the current stream; its K/V stay reusable."""
        if self._engine is not None:
            self._engine.clear_queue()
        self._results = []
        self._job = None

    def _shown(self, result: Result, hidden: bool) -> tuple[Result, bool]:
        """Convert a job's result to the keys of this generator, without the healed token.

        Also returns whether the healed token has been left out by now: its text may have been held for a while.
        """
        told = self._told(result)
        if hidden or told["chunk_token_ids"].shape[1] == 0:
            return told, hidden
        return _without_first(told), True

    def _next(self, ban_tokens: Iterable[int] | None) -> tuple[Result, tuple[list[Result], bool, bool]]:
        """Return the result of one call and the state after it.

        The state is the remaining results, whether the healed token is still to come, and whether it was left out. The
        caller stores that state, so that an interrupt loses nothing.
        """
        if self._job is None:
            raise JobStateError("no stream has begun; call begin_stream_ex first")
        told, hidden = self._shown(self._look(0, ban_tokens), self._healed_hidden)
        count = 1
        if self._healed_pending and not told["eos"]:
            second, hidden = self._shown(self._look(1, ban_tokens), hidden)
            told, count = _joined(told, second), 2
        return told, (self._results[count:], False, hidden)

    def _look(self, at: int, ban_tokens: Iterable[int] | None) -> Result:
        """Return the job's result `at` positions after the last returned one; it stays in the queue."""
        job, engine = self._job, self._engine
        assert job is not None
        assert engine is not None
        bans = tuple(_ids("ban_tokens", ban_tokens or ()))
        if bans and engine.num_draft_tokens:
            raise UnsupportedError(
                "ban_tokens does not work with drafting, which runs before the call; use banned_strings"
            )
        job.avoid(bans)
        while len(self._results) <= at:
            over = job.is_finished
            with defer_sigint():
                before = (job.new_tokens, job.drafts.drafted, job.drafts.accepted)
                self._pull(engine)
                self.total_tokens += max(0, job.new_tokens - before[0])
                self.total_draft_tokens += job.drafts.drafted - before[1]
                self.accepted_draft_tokens += job.drafts.accepted - before[2]
            if over and len(self._results) <= at:
                raise JobStateError("the stream has ended; begin a new one")
        ids = torch.from_numpy(job.sequence.ids.copy())
        pad = max(0, self.tokenizer.pad_token_id)
        self.sequence_ids = ids.masked_fill(ids >= EMBEDDING_INDEX, pad)[None]
        result = self._results[at]
        if "exception" in result:
            self._results = []
            raise result["exception"]
        return result

    def _pull(self, engine: ExLlamaV2DynamicGenerator) -> None:
        with defer_sigint():
            self._results.extend(result for result in engine.iterate() if result["stage"] == "streaming")

    def _told(self, result: Result) -> Result:
        """Convert a job's result dict to the keys of this generator."""
        told: Result = {
            "chunk": result.get("text", ""),
            "eos": result["eos"],
            "chunk_token_ids": result.get("token_ids", torch.zeros((1, 0), dtype=torch.int64)),
        }
        names = {"token_probs": "probs", "top_k_tokens": "top_tokens", "top_k_probs": "top_probs", "logits": "logits"}
        for theirs, ours in names.items():
            if theirs in result:
                told[ours] = result[theirs]
        if result.get("token_ids") is None:
            told |= self._of_no_token()
        if "suppressed_text" in result:
            told["suppressed"] = result["suppressed_text"]
        return told

    def _of_no_token(self) -> Result:
        """Return the requested reports of a result without tokens: its text is held, or was withdrawn."""
        job = self._job
        assert job is not None
        told: Result = {}
        if job.return_probs:
            told["probs"] = torch.zeros((1, 0))
        if job.return_top_tokens:
            shape = (1, 0, min(job.return_top_tokens, self.engine().padded_vocab_size))
            told |= {"top_tokens": torch.zeros(shape, dtype=torch.int64), "top_probs": torch.zeros(shape)}
        if job.return_logits:
            told["logits"] = torch.zeros((1, 0, self.engine().padded_vocab_size))
        return told


def _rows(input_ids: torch.Tensor, input_mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return one [1, n] tensor per sequence, without the padding that the mask marks."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or not 1 <= input_ids.shape[0] <= 2:
        shape = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise RequestError(f"input_ids has shape {shape}; pass [1, n], or [2, n] for a CFG pair")
    if input_mask is None:
        return [row[None] for row in input_ids]
    if not isinstance(input_mask, torch.Tensor) or input_mask.dim() != 2:
        raise RequestError(f"input_mask is a {type(input_mask).__name__}; pass a tensor like input_ids, or None")
    if input_mask.shape[:1] != input_ids.shape[:1] or input_mask.shape[1] < input_ids.shape[1]:
        raise RequestError(f"input_mask has shape {list(input_mask.shape)}, input_ids {list(input_ids.shape)}")
    return [row[None, mask[: len(row)] >= 0] for row, mask in zip(input_ids, input_mask, strict=True)]


def _check_offsets(offsets: torch.Tensor | None, padding: list[int]) -> None:
    """Reject positions that do not begin at 0 after each row's padding."""
    if offsets is None:
        return
    try:
        given = [int(i) for i in torch.as_tensor(offsets).reshape(-1)]
    except (TypeError, ValueError, RuntimeError):
        raise RequestError(f"position_offsets is {offsets!r:.80}; pass an int tensor of one a row, or None") from None
    if given != padding:
        raise RequestError(
            f"position_offsets is {given}; with this input_mask it must be {padding}, minus the padding of each row: "
            "pass both as tokenizer.encode(return_offsets=True) and padding_mask make them, or neither"
        )


def _ids(name: str, ids: Any) -> list[int]:
    try:
        if not isinstance(ids, str | bytes):
            return [index(token) for token in ids]
    except TypeError:
        pass
    raise RequestError(f"{name} is {ids!r:.80}; pass a list of token ids")


def _without_first(result: Result) -> Result:
    """Return a result without its first token, the healed one; its text stays."""
    tensors = {key: value[:, 1:] for key, value in result.items() if isinstance(value, torch.Tensor)}
    return result | tensors


def _joined(first: Result, second: Result) -> Result:
    joined = {**first, **second, "chunk": first["chunk"] + second["chunk"]}
    for key, value in first.items():
        if isinstance(value, torch.Tensor) and key in second:
            some = [part for part in (value, second[key]) if part.shape[1]] or [value]
            joined[key] = torch.cat(some, dim=1)
    return joined
