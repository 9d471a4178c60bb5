"""The frozen description of one completion: the parameters of a job, checked once."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from exl_generate.contracts import Embedding, RequestAdapter
from exl_generate.dynamic.parameters import (
    adapters_of,
    count_of,
    embeddings_of,
    flag_of,
    keys_of,
    listed,
    optional_count_of,
    pictures_of,
    resumed_of,
    salt_of,
    seed_of,
    sequences_of,
    settings_of,
    stop_conditions_of,
    strings_of,
)
from exl_generate.dynamic.sequence import EMBEDDING_INDEX, Pictures
from exl_generate.errors import RequestError, ResumeError
from exl_generate.sampling import FrozenSettings, Settings

__all__ = ["Prompt", "Request", "request_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The ids of one prompt, without a last token that is to be healed. Its arrays are read-only."""

    #: int64 [n], n >= 1
    ids: NDArray[np.int64]
    #: int64 [n], the ids with rows of embeddings named by their content; None where there are no such rows
    keys: NDArray[np.int64] | None
    pictures: Pictures


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The parameters of one completion. `ExLlamaV2DynamicJob` documents them; the fields hold the checked values."""

    #: the prompt or, for CFG, the positive and the negative prompt
    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    min_new_tokens: int
    max_skips: int | None
    #: a copy of the caller's settings, every value in its range
    settings: FrozenSettings
    seed: int | None
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...]
    banned_strings: tuple[str, ...]
    decode_special_tokens: bool
    return_top_tokens: int
    return_logits: bool
    return_probs: bool
    return_hidden_state: bool
    #: candidates for each token of the prompt, whose log-probabilities are reported; None: they are not
    prompt_logprobs: int | None
    filters: tuple[object, ...]
    filter_prefer_eos: bool
    #: last id of the prompt, which the first sampled token replaces and must begin with; None without token healing
    healed_id: int | None
    #: 1 with token healing, else 0
    healing: int
    identifier: object
    embeddings: tuple[Embedding, ...]
    #: adapters asked for; None means those of the generator
    loras: tuple[RequestAdapter, ...] | None
    max_rq_tokens: int | None
    cache_salt: bytes
    #: ids that an earlier run has returned, after which the job continues
    resumed: tuple[int, ...]
    #: ids that an earlier run has handed out, which the job samples again
    rerun: tuple[int, ...]

    @property
    def reports_more(self) -> bool:
        """Whether probabilities, top tokens or logits are reported with the tokens."""
        return self.return_probs or self.return_top_tokens > 0 or self.return_logits


def request_of(
    *,
    input_ids: torch.Tensor | SequenceOf[torch.Tensor],
    max_new_tokens: int,
    min_new_tokens: int,
    max_skips: int | None,
    gen_settings: Settings | None,
    seed: int | None,
    stop_conditions: Iterable[int | str] | None,
    decode_special_tokens: bool,
    return_top_tokens: int,
    return_logits: bool,
    return_probs: bool,
    return_hidden_state: bool,
    prompt_logprobs: int | None,
    filters: SequenceOf[object] | None,
    filter_prefer_eos: bool,
    token_healing: bool,
    identifier: object,
    banned_strings: Iterable[str] | None,
    embeddings: SequenceOf[Embedding] | None,
    loras: object,
    max_rq_tokens: int | None,
    cache_salt: bytes,
    resume_from: object,
) -> Request:
    """Check the parameters of `ExLlamaV2DynamicJob` and return them as a request.

    Raises `RequestError`, which names the parameter, its value and the remedy.
    """
    limits = _limits(max_new_tokens, min_new_tokens)
    settings = settings_of(gen_settings)
    stop_tokens, stop_strings = stop_conditions_of(stop_conditions)
    images = embeddings_of(embeddings)
    prompts, healed_id = _prompts(input_ids, images, flag_of("token_healing", token_healing), settings.cfg_scale)
    healing = int(healed_id is not None)
    resumed = _resumed(resume_from, limits[0] + healing if limits[0] else 0)
    return Request(
        prompts=prompts,
        max_new_tokens=limits[0],
        min_new_tokens=limits[1],
        max_skips=optional_count_of("max_skips", max_skips),
        settings=settings,
        seed=seed_of(seed),
        stop_tokens=stop_tokens,
        stop_strings=tuple(stop_strings),
        banned_strings=tuple(strings_of("banned_strings", banned_strings)),
        decode_special_tokens=flag_of("decode_special_tokens", decode_special_tokens),
        return_top_tokens=count_of("return_top_tokens", return_top_tokens),
        return_logits=flag_of("return_logits", return_logits),
        return_probs=flag_of("return_probs", return_probs),
        return_hidden_state=flag_of("return_hidden_state", return_hidden_state),
        prompt_logprobs=_prompt_logprobs(prompt_logprobs, images, healing),
        filters=tuple(listed("filters", filters)),
        filter_prefer_eos=flag_of("filter_prefer_eos", filter_prefer_eos),
        healed_id=healed_id,
        healing=healing,
        identifier=identifier,
        embeddings=images,
        loras=adapters_of(loras),
        max_rq_tokens=_reservation(max_rq_tokens),
        cache_salt=salt_of(cache_salt),
        resumed=() if settings.mirostat else resumed,
        rerun=resumed if settings.mirostat else (),
    )


def _limits(max_new_tokens: object, min_new_tokens: object) -> tuple[int, int]:
    most, least = count_of("max_new_tokens", max_new_tokens), count_of("min_new_tokens", min_new_tokens)
    if least > most:
        raise RequestError(f"min_new_tokens is {least}, more than max_new_tokens {most}; lower it")
    return most, least


def _prompt_logprobs(value: object, images: tuple[Embedding, ...], healing: int) -> int | None:
    count = optional_count_of("prompt_logprobs", value)
    if count is not None and (images or healing):
        other = "embeddings" if images else "token_healing"
        raise RequestError(f"prompt_logprobs and {other} exclude each other: leave one out")
    return count


def _resumed(resume_from: object, most: int) -> tuple[int, ...]:
    resumed = resumed_of(resume_from)
    if len(resumed) > most:
        raise ResumeError(f"resume_from holds {len(resumed)} ids, more than the {most} that the job may generate")
    return resumed


def _reservation(max_rq_tokens: object) -> int | None:
    count = optional_count_of("max_rq_tokens", max_rq_tokens)
    if count == 0:
        raise RequestError("max_rq_tokens is 0; reserve for at least 1 token, or pass None to reserve for all")
    return count


def _prompts(
    input_ids: object, embeddings: tuple[Embedding, ...], healing: bool, cfg_scale: float | None
) -> tuple[tuple[Prompt, ...], int | None]:
    """Return the prompts, and the token that healing has removed from them; None without healing."""
    rows = sequences_of(input_ids)
    if (len(rows) == 2) != (cfg_scale is not None):
        raise RequestError(
            f"input_ids holds {len(rows)} sequence(s) and cfg_scale is {cfg_scale}: a pair of prompts (positive, "
            "negative) and gen_settings.cfg_scale go together"
        )
    healing = healing and min(map(len, rows)) > 1 and int(max(row[-1] for row in rows)) < EMBEDDING_INDEX
    kept = [row[:-1] if healing else row for row in rows]
    prompts = tuple(_prompt(row, embeddings) for row in kept)
    return prompts, int(rows[0][-1]) if healing else None


def _prompt(ids: NDArray[np.int64], embeddings: tuple[Embedding, ...]) -> Prompt:
    prompt = Prompt(ids, keys_of(ids, embeddings), pictures_of(ids, embeddings))
    for array in (prompt.ids, prompt.keys):
        if array is not None:
            array.setflags(write=False)
    return prompt
