"""The numbers a dynamic generator runs with, checked once against model and cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl_generate.contracts import Cache, ModelOf, first_missing
from exl_generate.dynamic.sequence import EMBEDDING_INDEX
from exl_generate.errors import CapacityError, RequestError
from exl_kernels.drafting import MOST_TOKENS

if TYPE_CHECKING:
    from exl_generate.contracts import Model, Tokenizer
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Limits", "check_drafting", "check_history", "check_pace", "check_part", "check_tokens", "check_wait"]

#: Models of one family have vocabularies of slightly different sizes: padding, and tokens that a fine-tuning has added.
MOST_OTHER_IDS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a dynamic generator: page size and count, and the most tokens or sequences of a step or
    sequence.
    """

    page_size: int
    num_pages: int
    max_batch_size: int
    max_seq_len: int
    max_chunk_size: int

    @classmethod
    def resolve(
        cls,
        model: Model,
        cache: Cache,
        *,
        max_batch_size: int | None,
        max_seq_len: int | None,
        max_chunk_size: int | None,
        max_q_size: int,
        paged: bool,
        page_size: int,
    ) -> Limits:
        """Fill in defaults and check the constructor's parameters against model and cache.

        Unpaged, one page spans the cache and one sequence runs at a time. Raises `RequestError` or `CapacityError`.
        """
        _check_parts(model, cache)
        config = model.config
        for name, value, least in (
            ("page_size", page_size, 1),
            ("max_q_size", max_q_size, 1),
            ("max_batch_size", max_batch_size, 0),
            ("max_seq_len", max_seq_len, 1),
            ("max_chunk_size", max_chunk_size, 1),
        ):
            check_count(name, value, least, optional=name not in ("page_size", "max_q_size"))
        if cache.model is not model:
            raise RequestError("the cache was made for another model; make one with this model as its first argument")
        if cache.batch_size != 1:
            raise RequestError(
                f"the cache has batch_size {cache.batch_size}; a dynamic generator needs 1: all jobs share its length"
            )
        if cache.max_seq_len % page_size or cache.max_seq_len < page_size:
            below = cache.max_seq_len // page_size * page_size
            raise CapacityError(
                f"the cache's max_seq_len {cache.max_seq_len} is not a multiple of {page_size}: "
                f"use {max(below, page_size)} or {below + page_size}"
            )
        batch = max_batch_size or max(1, config.max_input_len // max_q_size)
        positions = config.max_batch_size * config.max_input_len
        if batch < 1 or max_q_size * batch > positions:
            raise RequestError(
                f"max_batch_size {batch} times max_q_size {max_q_size} must be at least 1 and at most {positions} "
                "(config.max_batch_size * config.max_input_len)"
            )
        length = config.max_seq_len if max_seq_len is None else max_seq_len
        if not 1 <= length <= config.max_seq_len:
            raise RequestError(f"max_seq_len is {length}; it must be from 1 to the model's {config.max_seq_len}")
        size = page_size if paged else cache.max_seq_len
        return cls(
            page_size=size,
            num_pages=cache.max_seq_len // size,
            max_batch_size=batch if paged else 1,
            max_seq_len=length,
            max_chunk_size=_chunk_size(max_chunk_size, config.max_input_len, page_size if paged else 1),
        )


def check_count(name: str, value: object, least: int, optional: bool = False) -> None:
    """Raise `RequestError` unless `value` is an integer of at least `least`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"{name} is {value!r}; it must be an integer of at least {least}")


def check_pace(model: Model, target_step_seconds: object) -> None:
    """Raise `RequestError` unless the target is None or a positive, finite number that the model can keep."""
    if target_step_seconds is None:
        return
    if (
        isinstance(target_step_seconds, bool)
        or not isinstance(target_step_seconds, int | float)
        or not 0 < target_step_seconds < math.inf
    ):
        raise RequestError(
            f"target_step_seconds is {target_step_seconds!r}; it must be a positive number of seconds, or None"
        )
    if model.in_lockstep:
        raise RequestError(
            f"target_step_seconds is {target_step_seconds!r}, but other processes run the same passes of this model, "
            "and their clocks differ; pass None, and a smaller max_chunk_size for shorter steps"
        )


def check_wait(model: Model, prompt_wait_seconds: object) -> None:
    """Raise `RequestError` unless the longest wait is a finite number of at least 0 that the model can keep."""
    if (
        isinstance(prompt_wait_seconds, bool)
        or not isinstance(prompt_wait_seconds, int | float)
        or not 0 <= prompt_wait_seconds < math.inf
    ):
        raise RequestError(
            f"prompt_wait_seconds is {prompt_wait_seconds!r}; it must be a finite number of seconds, at least 0: "
            "0 lets no prompt wait"
        )
    if prompt_wait_seconds and model.in_lockstep:
        raise RequestError(
            f"prompt_wait_seconds is {prompt_wait_seconds!r}, but other processes run the same passes of this model, "
            "and their clocks differ; pass 0"
        )


def _check_parts(model: object, cache: object, which: str = "") -> None:
    check_part(f"{which}model", model, ModelOf)
    check_part(f"{which}cache", cache, Cache)


def check_part(name: str, part: object, protocol: type) -> None:
    """Raise `RequestError` for a part of a generator that lacks a member of its protocol."""
    missing = first_missing(part, protocol)
    if missing is not None:
        raise RequestError(
            f"{name} is {'None' if part is None else 'a ' + type(part).__name__}, which has no {missing}; pass a "
            f"loaded model, its cache and its tokenizer, in this order (a {name} of your own has all members of "
            f"exl_generate.contracts.{protocol.__name__.removesuffix('Of')})"
        )


def _chunk_size(asked: int | None, longest: int, page_size: int) -> int:
    if asked is None:
        return max(longest // page_size * page_size, min(longest, page_size))
    if not 1 <= asked <= longest or asked % page_size:
        raise RequestError(
            f"max_chunk_size is {asked}; it must be a multiple of {page_size}, at most {longest} (config.max_input_len)"
        )
    return asked


def check_history(shared_ngram_tokens: int, use_ngram: bool) -> None:
    """Check the number of tokens that jobs draft from together. Raises `RequestError`."""
    check_count("shared_ngram_tokens", shared_ngram_tokens, 0)
    if shared_ngram_tokens > MOST_TOKENS:
        raise RequestError(f"shared_ngram_tokens is {shared_ngram_tokens}; it must be at most {MOST_TOKENS}")
    if shared_ngram_tokens and not use_ngram:
        raise RequestError(f"shared_ngram_tokens is {shared_ngram_tokens}, which needs use_ngram_draft=True")


def check_drafting(
    model: Model,
    cache: Cache,
    *,
    draft_model: Model | None,
    draft_cache: Cache | None,
    use_ngram: bool,
    num_draft_tokens: int,
    max_ngram: int,
    max_q_size: int,
) -> None:
    """Check the parameters of speculative decoding. Raises `RequestError`."""
    check_count("num_draft_tokens", num_draft_tokens, 0)
    check_count("max_ngram", max_ngram, 0)
    if (draft_model is None) != (draft_cache is None):
        raise RequestError("draft_model and draft_cache go together: pass both or neither")
    if draft_model is not None and use_ngram:
        raise RequestError("draft_model and use_ngram_draft exclude each other: choose one")
    if draft_model is None and not use_ngram:
        return
    if not 1 <= num_draft_tokens < max_q_size:
        raise RequestError(
            f"num_draft_tokens is {num_draft_tokens}; it must be from 1 to max_q_size - 1 = {max_q_size - 1}, "
            "since the last accepted token is evaluated along with the drafts"
        )
    if use_ngram and max_ngram < 2:
        raise RequestError(f"max_ngram is {max_ngram}; it must be at least 2")
    if draft_model is None or draft_cache is None:
        return
    _check_parts(draft_model, draft_cache, "draft_")
    sizes = {"max_seq_len": (cache.max_seq_len, draft_cache.max_seq_len)}
    sizes["batch_size"] = (cache.batch_size, draft_cache.batch_size)
    for name, (wanted, found) in sizes.items():
        if wanted != found:
            raise RequestError(f"draft_cache has {name} {found}, the cache {wanted}; they must be equal")
    main, draft = model.config, draft_model.config
    if draft.max_seq_len < main.max_seq_len:
        raise RequestError(f"the draft model's max_seq_len {draft.max_seq_len} is below the model's {main.max_seq_len}")
    if abs(draft.vocab_size - main.vocab_size) > MOST_OTHER_IDS:
        raise RequestError(
            f"the draft model's vocabulary has {draft.vocab_size} ids, the model's {main.vocab_size}; they may differ "
            f"by at most {MOST_OTHER_IDS}: take a draft model that shares the tokenizer"
        )


def check_tokens(job: ExLlamaV2DynamicJob, model: Model, tokenizer: Tokenizer) -> None:
    """Raise `RequestError` for a token id of a prompt or a stop condition that is outside the vocabulary."""
    vocab = model.config.vocab_size
    known = max(vocab, tokenizer.get_vocab_size())
    highest = max(job.request.stop_tokens, default=0)
    if highest >= known:
        raise RequestError(f"stop_conditions holds token id {highest}; the vocabulary has ids 0 to {known - 1}")
    for sequence in job.sequences:
        ids = sequence.ids[: sequence.prompt_length]
        bad = ids[(ids < 0) | ((ids >= vocab) & (ids < EMBEDDING_INDEX))]
        if len(bad):
            raise RequestError(f"input_ids holds token id {int(bad[0])}; the vocabulary has ids 0 to {vocab - 1}")
